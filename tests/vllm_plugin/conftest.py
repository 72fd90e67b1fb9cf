"""A vLLM to plug into, which is not there."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from fake_vllm import Installed


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(monkeypatch)


@pytest.fixture
def backend(vllm: Installed) -> ModuleType:
    """The module of the backend, on vLLM for CPUs."""
    vllm.install()
    return importlib.import_module("vllm_kernels.integrations.vllm.backend")
