"""Fixtures of several ops' tests."""

from __future__ import annotations

import pytest
from helpers import LAYOUTS

pytest.register_assert_rewrite(
    "paged_attention_v1_v2_cases",
    "paged_attention_cases",
    "fused_decode_attention_cases",
    "gather_cache_cases",
    "reshape_and_cache_cases",
    "sampling_cases",
)
from reshape_and_cache_cases import OPS  # noqa: E402


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Sums what random tests recorded: how many points and calls they had."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
    ]
    for kind in ("points", "calls"):
        counts = [value for one in reports for name, value in one.user_properties if name == kind]
        if counts:
            wrong = sum(one.failed for one in reports if kind in dict(one.user_properties))
            terminalreporter.write_line(f"{kind} {sum(counts)}, tests {len(counts)}, wrong {wrong}")


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Of a paged cache."""
    return request.param


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def version(request: pytest.FixtureRequest) -> int:
    """Of paged_attention_v1 and _v2."""
    return request.param


@pytest.fixture(params=OPS, ids=["vllm", "flash"])
def op(request: pytest.FixtureRequest) -> str:
    """Of reshape_and_cache's tests: the op of a layout."""
    return request.param
