"""vllm_kernels.explain: the kernel of a call and why; nothing is launched."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of CUDA kernels only")
@pytest.mark.parametrize("seed", range(10))
def test_the_choice_is_what_runs(seed):
    """Kernels, grids and blocks of 10 calls of each seed, by the profiler."""
    draw = random.Random(seed)
    cases = [draw_case(draw) for _ in range(10)]
    want = [launch for case in cases for launch in explained_launches(explain(case))]
    for case in cases:  # first calls load kernels
        case.run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for case in cases:
            case.run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    launches = [event for event in events if "paged_attention_" in event.get("name", "")]
    launches = [event for event in launches if event.get("cat") == "kernel"]
    # A concurrent launch may start before the main one: the order within a call is free.
    got = [
        (re.search(r"paged_attention_(\w+)_kernel", event["name"]).group(1),
         math.prod(event["args"]["grid"]), math.prod(event["args"]["block"]))
        for event in sorted(launches, key=lambda event: event["args"]["correlation"])
    ]  # fmt: skip
    assert len(got) == len(want)
    for (kernel, grid, threads), (wanted, wanted_grid, warps) in zip(got, want, strict=True):
        assert (kernel, grid) == (wanted, wanted_grid)
        assert warps is None or threads == 32 * warps


KERNELS = {
    "simt": "simt",
    "decode": "decode",
    "decode (several warps a pipeline)": "decode",
    "decode_wgmma": "decode_wgmma",
    "prefill sm90": "prefill",
    "prefill sm80": "prefill_sm80",
}


def explained_launches(text: str) -> list[tuple[str, int, int | None]]:
    """Kernel, CTAs and warps of each line of explain()."""
    launches = []
    for line in text.splitlines():
        kernel = re.search(r"(?:^paged_attention|query tokens): ([^,;]+)", line).group(1)
        grid = math.prod(map(int, re.search(r"grid ([\dx]+)", line).group(1).split("x")))
        warps = re.search(r"(\d+) warps", line)
        launches.append((KERNELS[kernel], grid, int(warps.group(1)) if warps else None))
    return launches


def draw_case(draw: random.Random) -> Case:
    dtype = draw.choice([torch.float16, torch.bfloat16, torch.bfloat16, torch.float32])
    lens = [draw.randint(1, 900) for _ in range(draw.choice([1, 3, 40]))]
    queries = [draw.choice([1, 1, draw.randint(1, length)]) for length in lens]
    kv_heads = draw.choice([1, 2, 8])
    eight_bits = draw.choice([None, None, torch.float8_e4m3fn, torch.int8])
    options = draw.choice([{}, {}, {"softcap": 5.0}, {"sliding_window": 100}])
    return make_case(
        "cuda", dtype, lens, draw.choice([None, queries]),
        heads=kv_heads * draw.choice([1, 4, 8]), kv_heads=kv_heads,
        head_size=draw.choice([64, 80, 96, 128, 192, 256]),
        block_size=draw.choice([8, 16, 16, 32, 64]), stored=eight_bits,
        layout=draw.choice(["vllm", "NHD", "HND"]), **options,
    )  # fmt: skip


def test_names_a_silent_cliff(device):
    case = make_case(device, torch.bfloat16, [70, 3])
    row = case.query[0].numel() + 1  # rows begin at odd elements
    case.query = torch.zeros(2 * row, dtype=torch.bfloat16, device=device).as_strided(
        case.query.shape, (row, 64, 1)
    )
    text = explain(case)
    if device == "cuda":
        assert "simt, grid 2x1x2" in text and "; because: " in text
        assert "query: base or token stride is unaligned" in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of CUDA kernels only")
def test_fixed_split_size_is_the_reason():
    case = make_case("cuda", torch.bfloat16, [4000], [4000], heads=32)
    text = explain(case.with_options(fixed_split_size=1024))
    assert "decode" in text and "fixed_split_size: the kernel may not depend on the batch" in text
    case = make_case("cuda", torch.bfloat16, [9000] * 64, heads=64, kv_heads=64)
    with pytest.raises(RuntimeError, match="fixed_split_size: block_tables has room"):
        explain(case.with_options(fixed_split_size=16))  # as the call itself


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


def test_log_prints_each_choice_once(device):
    code = f"""
        import torch
        from paged_attention_cases import make_case
        case = make_case("{device}", torch.float32, [70, 3])
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
    kernel = "CPU, decode kernel" if device == "cpu" else "simt, grid"
    assert done.stderr.count(f"vllm_kernels: paged_attention: {kernel}") == 1
