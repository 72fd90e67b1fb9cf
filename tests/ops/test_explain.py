"""vllm_kernels.explain: the kernel of a call and why; nothing is launched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from paged_attention_cases import Case, make_case

import vllm_kernels


def explain(case: Case, **options: object) -> str:
    return vllm_kernels.explain(
        vllm_kernels.paged_attention,
        *case.tensors(),
        **case.options,
        max_query_len=case.max_query_len,
        **options,
    )


def test_decode(device, layout):
    text = explain(make_case(device, torch.bfloat16, [70, 3], layout=layout))
    if device == "cpu":
        assert re.fullmatch(r"paged_attention: CPU, decode kernel, level \w+", text), text
    else:
        assert re.match(r"paged_attention: decode, head size 64, .* \d+ warps, \d+ stages", text)


def test_prompt(device, layout):
    text = explain(make_case(device, torch.bfloat16, [4000], [4000], layout=layout, heads=32))
    kernel = "CPU, general" if device == "cpu" else "prefill"
    assert text.startswith(f"paged_attention: {kernel}"), text


def test_names_a_silent_cliff(device):
    case = make_case(device, torch.bfloat16, [70, 3])
    row = case.query[0].numel() + 1  # rows begin at odd elements
    case.query = torch.zeros(2 * row, dtype=torch.bfloat16, device=device).as_strided(
        case.query.shape, (row, 64, 1)
    )
    text = explain(case)
    if device == "cuda":
        assert "simt; because:" in text
        assert "query: base or token stride is unaligned" in text


def test_nothing_is_launched(device):
    case = make_case(device, torch.float32, [70, 3])
    out = torch.full_like(case.query, 7.0)
    assert explain(case, out=out).startswith("paged_attention: ")
    assert (out == 7.0).all()
    assert torch.isfinite(case.run()).all()  # and afterwards calls run again


def test_arguments_are_checked(device):
    case = make_case(device, torch.float32, [70, 3])
    with pytest.raises(RuntimeError, match=r"^paged_attention: softcap: expected"):
        explain(case, softcap=-1.0)
    assert torch.isfinite(case.run()).all()


def test_other_functions_are_refused():
    with pytest.raises(ValueError, match=r"^explain: op: expected one of fused_decode_attention, "):
        vllm_kernels.explain(vllm_kernels.rms_norm, torch.zeros(1))
    with pytest.raises(ValueError, match=r"^explain: expected tensors among the arguments"):
        vllm_kernels.explain(vllm_kernels.paged_attention)


def test_log_prints_each_choice_once():
    code = """
        import torch
        from paged_attention_cases import make_case
        case = make_case("cpu", torch.float32, [70, 3])
        case.run(), case.run()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "VLLM_KERNELS_LOG": "1",
            "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[1]}:{Path.cwd()}",
        },
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stderr.count("vllm_kernels: paged_attention: CPU, decode kernel") == 1
