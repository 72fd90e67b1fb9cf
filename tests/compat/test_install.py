"""compat.install() and uninstall(): what Python and transformers find, each in a process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BEGIN = """
import importlib.metadata as metadata, importlib.util, sys
import torch
from vllm_kernels import compat

"""
WITH_CUDA = "torch.cuda.is_available = lambda: True\n"
IMPORT = "import transformers\nfrom transformers.utils import is_flash_attn_2_available\n"
ASK = "is_flash_attn_2_available()"


def run(*parts: str, path: Path | None = None) -> None:
    """Runs a program, which asserts."""
    program = BEGIN + "".join(textwrap.dedent(part) for part in parts)
    folder = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    done = subprocess.run([sys.executable, "-c", folder + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_and_metadata():
    """The three modules, and a distribution of every spelling; then none."""
    run("""
        compat.install()
        compat.install()
        import flash_attn.bert_padding, flash_attn.flash_attn_interface
        from flash_attn import flash_attn_func
        assert flash_attn_func is compat.flash_attn.flash_attn_func
        assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn_func
        assert flash_attn.bert_padding.pad_input is compat.bert_padding.pad_input
        for name in ("flash-attn", "flash_attn", "Flash.Attn"):
            assert metadata.version(name) == flash_attn.__version__ == "2.8.3"
        assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert metadata.version("numpy")
        for _ in range(2):
            compat.uninstall()
            assert importlib.util.find_spec("flash_attn") is None
            assert "flash_attn" not in metadata.packages_distributions()
            try:
                metadata.version("flash-attn")
            except metadata.PackageNotFoundError:
                pass
            else:
                raise AssertionError("still there")
        compat.install()
        import flash_attn
    """)


@pytest.mark.parametrize("with_cuda", [True, False])
@pytest.mark.parametrize("asked_before", [True, False])
def test_transformers_asks(with_cuda: bool, asked_before: bool):
    """Before and after its first question, whose answer it keeps. Without CUDA it is no."""
    pytest.importorskip("transformers")
    run(
        WITH_CUDA if with_cuda else "torch.cuda.is_available = lambda: False\n",
        f"{IMPORT}assert not {ASK}\n" if asked_before else "",
        "compat.install()\n",
        IMPORT,
        f"assert {ASK} is {with_cuda}\n",
        f"compat.uninstall()\nassert not {ASK}\n",
    )


def test_transformers_imports_again():
    """uninstall() also takes the functions that transformers keeps."""
    pytest.importorskip("transformers")
    run(WITH_CUDA, "compat.install()\n", """
        from transformers import modeling_flash_attention_utils as utils
        functions, _ = utils.lazy_import_flash_attention("flash_attention_2")
        assert functions[0] is compat.flash_attn.flash_attn_func
        compat.uninstall()
        assert utils._loaded_implementation is None
    """)  # fmt: skip


REFUSED = """
try:
    compat.install()
except compat._install.Unsupported as error:
    assert str(error) == {message!r}, error
else:
    raise AssertionError("no error")
assert importlib.util.find_spec("flash_attn").origin == {origin!r}
"""
MESSAGE = (
    "install: expected no flash_attn, got {}: uninstall it, or import "
    "vllm_kernels.compat.flash_attn by that name"
)


def test_real_flash_attn_stays(tmp_path: Path):
    (tmp_path / "flash_attn").mkdir()
    origin = tmp_path / "flash_attn/__init__.py"
    origin.touch()
    run(REFUSED.format(message=MESSAGE.format(origin), origin=str(origin)), path=tmp_path)

    information = tmp_path / "flash_attn-2.7.4.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: flash-attn\nVersion: 2.7.4\n")
    got = f"flash-attn 2.7.4 in {tmp_path}"
    run(REFUSED.format(message=MESSAGE.format(got), origin=str(origin)), path=tmp_path)


def test_imported_flash_attn_stays():
    run("""
        import types
        flash_attn = sys.modules["flash_attn"] = types.ModuleType("flash_attn")
        try:
            compat.install()
        except RuntimeError as error:
            assert "got the imported module <module 'flash_attn'>: uninstall it" in str(error)
        assert sys.modules["flash_attn"] is flash_attn
    """)
