"""Prompts beside the rivals, in rounds over all candidates.

A prompt's attention heats the GPU until it lowers its clock: whoever is measured last looks slower.
Here every round launches each candidate once, as a CUDA graph over all KV copies, after a pause;
the figure is the median of the rounds. Rows are those of the kit (../shared/peers): prefill.py, or
shapes.py and SHAPES below.

    . .peers/env.sh; OURS=benchmarks/peers_ours.py python3 benchmarks/peers_rounds.py --wl 'a_*,b_*'
    . .peers/env.sh; python3 benchmarks/peers_rounds.py --set shapes --wl 'd*_8x1k' --peers 'fa3*'
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import math
import os
import runpy
import statistics
import sys
import time

import torch

sys.path.insert(0, os.environ["KIT"])
import prefill as kit

# Rows of the kind of shapes.py's that it lacks: what its rows are compared with, and small pages.
SHAPES = {
    **{f"d{size}_8x1k": {"D": size} for size in (40, 88, 104, 136, 208)},
    **{f"p{page}_2x4k": {"page": page, "lens": (2, 4096, 0)} for page in (1, 2, 4, 8, 16, 256)},
    "p16_1k_on_50k": {"page": 16, "lens": (1, 1024, 50_000)},
    **{
        f"{rows}_on_8k{suffix}": {"lens": (4, rows, 8192), **kv}
        for rows in (64, 128, 256, 512)
        for suffix, kv in (("", {}), ("_fp8", {"kv": "fp8"}))
    },
    # Few work tiles: NxQ_on_P has N sequences with Q new tokens on P cached ones.
    **{
        f"{count}x{new}_on_{cached}{suffix}": {"lens": (count, new, cached), **kv}
        for count, new, cached in (
            (1, 32, 8192), (1, 128, 8192), (1, 256, 30_000), (4, 16, 8192), (4, 32, 8192),
            (8, 32, 4096), (32, 16, 4080),
        )
        for suffix, kv in (("", {}), ("_fp8", {"kv": "fp8"}))
    },
    # Unequal lengths.
    "16x16_one_11k": {"qlens": [16] * 16, "kvlens": [11_000] + [300] * 15},
    "16x16_one_6k": {"qlens": [16] * 16, "kvlens": [6000] + [300] * 15},
    "16x16_half_8k": {"qlens": [16] * 16, "kvlens": [8000, 500] * 8},
    "32x16_one_16k": {"qlens": [16] * 32, "kvlens": [16_000] + [1000] * 31},
    "64x16_one_30k": {"qlens": [16] * 64, "kvlens": [30_000] + [1000] * 63},
    "128x16_one_40k": {"qlens": [16] * 128, "kvlens": [40_000] + [600] * 127},
    "4x64_unequal": {"qlens": [64] * 4, "kvlens": [20_000, 5000, 2000, 500]},
    "3x128_unequal": {"qlens": [128] * 3, "kvlens": [30_000, 2000, 200]},
}  # fmt: skip


OURS = ("vllm", "NHD", "HND", "varlen")
# Rivals that read the row's pages.
PAGED = {*kit.PAGED16, "fa3_paged", "fa3_paged_s1"}


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


def replay_time(graph: torch.cuda.CUDAGraph) -> float:
    """us of the second of two replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    time.sleep(0.004)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def capture(call, work, rows, want) -> tuple[torch.cuda.CUDAGraph, float]:
    """A graph of `call`, whose tensors the caller keeps, and its relative error."""
    call(0).fill_(float("nan"))
    error = float((call(0)[rows].double() - want).norm() / want.norm())
    if not error < (0.006 if work.kv == "auto" else 0.06):
        raise RuntimeError(f"relative error {error:.1e}")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(work.R):
            call(copy)
    return graph, error


def of_8_bit_queries(prepare):
    """The same call of ours with e4m3 queries, as FlashAttention-3 takes them over an fp8 cache."""

    def prepared(work):
        if work.kv == "auto":
            raise kit.Skip
        mine = copy.copy(work)
        call = prepare(mine)  # makes `out` in 16 bits
        mine.q = work.q.to(torch.float8_e4m3fn)  # exact: the kit's queries are rounded to e4m3
        return call

    return prepared


def with_8_bit_queries(candidates):
    ours = [name for name in OURS if name in candidates]
    return candidates | {f"ours_q8_{name}": of_8_bit_queries(candidates[name]) for name in ours}


def of_prefill(patterns: str, dtype: torch.dtype):
    """Yields (row, work, checked rows of out, their reference, candidates) of prefill.py."""
    sys.modules["__main__"].Skip = kit.Skip
    candidates = {**runpy.run_path(os.environ["OURS"])["PREFILL"], **kit.PEERS}
    for row, spec in kit.WL.items():
        if matches(row, patterns):
            work = kit.P(row, **{"dtype": dtype, **spec})
            yield row, work, *work.ref(), with_8_bit_queries(candidates)


def of_shapes(patterns: str, dtype: torch.dtype):
    """The same of shapes.py and SHAPES."""
    import shapes

    import vllm_kernels
    from benchmarks import peers_ours

    shapes.vk = vllm_kernels
    # The kit's call of ours does not give the longest keys, as its calls of FlashAttention-3 do.
    candidates = {**shapes.PREFILL, "varlen": peers_ours.PREFILL["ours_varlen"]}
    rows = shapes.prefill_rows()
    for row, spec in copy.deepcopy(SHAPES).items():
        if "qlens" not in spec:
            count, new, cached = spec.pop("lens", (8, 1024, 0))
            spec |= {"qlens": [new] * count, "kvlens": [new + cached] * count}
        rows[row] = spec
    for row, spec in rows.items():
        if matches(row, patterns):
            page, window = spec.pop("page", 16), spec.pop("window", 0)
            kit.BS = page
            work = kit.P(row, **{"dtype": dtype, **spec})
            work.page, work.window, work.note = page, window, ""
            yield row, work, *shapes.rows_ref(work), with_8_bit_queries(candidates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--set", choices=["prefill", "shapes"], default="prefill")
    parser.add_argument("--wl", default="a_*,b_*,d_*,e_*,f_*")
    parser.add_argument("--peers", default="fa3,fa3_s1,fa3_p16*,fi_fa3")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default=os.environ.get("OUT", "/tmp") + "/rounds.json")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.set_grad_enabled(False)
    result, ratios = {}, {}
    of_set = of_shapes if args.set == "shapes" else of_prefill
    for workload, work, rows, want, candidates in of_set(args.wl, dtype):
        calls, graphs, errors = {}, {}, {}
        for name, prepare in candidates.items():
            is_ours = name in OURS or name.startswith("ours_")
            if not is_ours and not matches(name, args.peers):
                continue
            try:
                calls[name] = prepare(work)
                graphs[name], errors[name] = capture(calls[name], work, rows, want)
            except kit.Skip:
                pass
            except Exception as error:
                print(workload, name, str(error)[:120])
        times = {name: [] for name in graphs}
        for _ in range(args.rounds):
            for name, graph in graphs.items():
                times[name].append(replay_time(graph) / work.R)
        medians = result[workload] = {n: statistics.median(t) for n, t in times.items()}
        paged = [us for name, us in medians.items() if name in PAGED]
        texts = []
        for name, us in medians.items():
            text = (
                f"{name} {us:.1f} us {work.flops / us / 1e6:.0f} TFLOP/s error {errors[name]:.1e}"
            )
            if (name in OURS or name.startswith("ours_")) and paged:
                ratios.setdefault(name, []).append(min(paged) / us)
                text += f" ({ratios[name][-1]:.2f})"
            texts.append(text)
        print(workload, *texts, sep="\n  ", flush=True)
        with open(args.out, "w") as file:
            json.dump(result, file)
    for name, of_name in ratios.items():
        mean = math.exp(sum(map(math.log, of_name)) / len(of_name))
        print(f"{name}: speed against the best peer on the same pages, geometric mean {mean:.3f}")


if __name__ == "__main__":
    main()
