"""Shared fixtures: the same test runs on every device that is there."""

from __future__ import annotations

import pytest
import torch

import vllm_kernels

DEVICES = ["cpu", "cuda"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        pytest.skip("needs a GPU and the CUDA library")
    return request.param


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def pytest_itemcollected(item: pytest.Item) -> None:
    """Lets ``-k cuda`` find the tests that only a GPU runs, too."""
    reasons = (str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif"))
    if any("GPU" in reason for reason in reasons):
        item.extra_keyword_matches.add("cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
