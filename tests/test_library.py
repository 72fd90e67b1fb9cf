"""What the package says about itself, and one sentence where something is missing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm_kernels
from vllm_kernels import _C, _library, ops
from vllm_kernels.__main__ import main

ROOT = Path(__file__).parent.parent


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_every_op_is_registered_and_documented():
    for name in vllm_kernels.OPS:
        assert hasattr(torch.ops.vllm_kernels, name)
        assert getattr(vllm_kernels, name).__doc__, f"{name} has no docstring"


def test_every_op_has_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "ops").glob("test_*.py"))
    for name in vllm_kernels.OPS:
        assert name in tests, f"{name} has no test"


def test_levels():
    assert _C.cpu_level() in ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx")
    done = run(
        "import vllm_kernels; from vllm_kernels import _C; print(_C.cpu_level())",
        VLLM_KERNELS_ISA="baseline",
    )
    assert done.stdout.strip() == "baseline"
    done = run(
        "import vllm_kernels; from vllm_kernels import _C; print(_C.cpu_level())",
        VLLM_KERNELS_ISA="sse9",
    )
    assert (
        "VLLM_KERNELS_ISA=sse9: expected baseline, avx2, avx512, avx512_bf16 or avx512_amx"
        in done.stderr
    )


def test_old_torch_is_one_sentence():
    done = run("""
        import torch
        torch.__version__ = "2.10.1"
        import vllm_kernels
    """)
    assert "ImportError: vllm_kernels needs torch >= 2.11, found torch 2.10.1." in done.stderr


@pytest.mark.parametrize(
    "built, complaint",
    [
        ("", "is a source tree that was not built: start Python outside of it"),
        ("_C.cpython-38.so", "was built for another Python (_C.cpython-38.so): start Python outsi"),
    ],
    ids=["not", "elsewhere"],
)
def test_missing_library_is_one_sentence(tmp_path, built, complaint):
    package = tmp_path / "vllm_kernels"
    package.mkdir()
    for source in (ROOT / "vllm_kernels").glob("*.py"):
        (package / source.name).write_text(source.read_text())
    if built:
        (package / built).touch()
    # An editable install would find the built _C of the source tree all the same.
    code = """
        import sys
        sys.meta_path = [f for f in sys.meta_path if not f.__module__.startswith("__editable__")]
        import vllm_kernels
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin"},
        timeout=120,
    )
    assert complaint in done.stderr


def test_check_waits_for_devices_with_scans_only(monkeypatch):
    waited, raised = [], []
    scans = SimpleNamespace(default=lambda: [1, 3])
    raising = SimpleNamespace(default=lambda: raised.append(list(waited)))
    monkeypatch.setattr(
        ops, "library_ops", SimpleNamespace(scanned_devices=scans, raise_bad_index=raising)
    )
    monkeypatch.setattr(_library, "cuda_loaded", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    vllm_kernels.check()
    assert raised == [[1, 3]]


def test_broken_cuda_library_leaves_the_cpu_ops(monkeypatch, tmp_path):
    broken = tmp_path / "libvllm_kernels_cuda.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_library, "CUDA_LIBRARY", broken)
    with pytest.warns(UserWarning, match="cannot load its CUDA library, only CPU ops work"):
        loaded, reason = _library._load_cuda()
    assert not loaded and reason.endswith(".")
    x = torch.randn(2, 64)
    vllm_kernels.rms_norm(torch.empty_like(x), x, torch.ones(64), 1e-6)


def test_the_command_without_arguments_prints_its_help(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert (
        "{demo,bench,info,selftest," in printed.err and "versions, build, libraries" in printed.err
    )
    assert not printed.out
