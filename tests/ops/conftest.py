"""Fixtures of several ops' tests."""

from __future__ import annotations

import pytest
from helpers import LAYOUTS

pytest.register_assert_rewrite(
    "paged_attention_v1_v2_cases", "paged_attention_cases", "fused_decode_attention_cases"
)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Of a paged cache."""
    return request.param


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def version(request: pytest.FixtureRequest) -> int:
    """Of paged_attention_v1 and _v2."""
    return request.param
