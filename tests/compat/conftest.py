"""Fixtures of the compat functions' tests."""

from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("flash_attn_cases", "flashinfer_cases")
from flash_attn_cases import FA2, FA3  # noqa: E402


@pytest.fixture(params=[FA2, FA3], ids=["fa2", "fa3"])
def fa(request: pytest.FixtureRequest):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["NHD", "HND"])
def kv_layout(request: pytest.FixtureRequest) -> str:
    return request.param
