"""The kit's prefill rows (../shared/peers/prefill.py) in rounds over all candidates.

A prompt's attention heats the GPU until it lowers its clock: whoever is measured last looks slower.
Here every round launches each candidate once, as a CUDA graph over all KV copies, after a pause;
the figure is the median of the rounds.

    . .peers/env.sh; OURS=benchmarks/peers_ours.py python3 benchmarks/peers_rounds.py --wl 'a_*,b_*'
"""

from __future__ import annotations

import argparse
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


def capture(call, work, rows, want) -> torch.cuda.CUDAGraph:
    """A graph of `call`, whose tensors the caller keeps."""
    call(0).fill_(float("nan"))
    error = (call(0)[rows].double() - want).norm() / want.norm()
    if not error < (0.006 if work.kv == "auto" else 0.06):
        raise RuntimeError(f"relative error {error:.1e}")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(work.R):
            call(copy)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--wl", default="a_*,b_*,d_*,e_*,f_*")
    parser.add_argument("--peers", default="ours_*,fa3,fa3_s1,fa3_p16*,fi_fa3")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", default=os.environ.get("OUT", "/tmp") + "/rounds.json")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.set_grad_enabled(False)
    sys.modules["__main__"].Skip = kit.Skip
    ours = runpy.run_path(os.environ["OURS"])["PREFILL"]
    candidates = {**ours, **kit.PEERS}
    result, ratios = {}, {name: [] for name in ours}
    for workload, spec in kit.WL.items():
        if not matches(workload, args.wl):
            continue
        work, calls, graphs = kit.P(workload, **{"dtype": dtype, **spec}), {}, {}
        rows, want = work.ref()
        for name, prepare in candidates.items():
            if not matches(name, args.peers):
                continue
            try:
                calls[name] = prepare(work)
                graphs[name] = capture(calls[name], work, rows, want)
            except kit.Skip:
                pass
            except Exception as error:
                print(workload, name, str(error)[:120])
        times = {name: [] for name in graphs}
        for _ in range(args.rounds):
            for name, graph in graphs.items():
                times[name].append(replay_time(graph) / work.R)
        medians = result[workload] = {n: statistics.median(t) for n, t in times.items()}
        paged = [us for name, us in medians.items() if name in kit.PAGED16]
        texts = []
        for name, us in medians.items():
            text = f"{name} {us:.1f} us {work.flops / us / 1e6:.0f} TFLOP/s"
            if name in ours and paged:
                ratios[name].append(min(paged) / us)
                text += f" ({ratios[name][-1]:.2f})"
            texts.append(text)
        print(workload, *texts, sep="\n  ", flush=True)
        with open(args.out, "w") as file:
            json.dump(result, file)
    for name, of_name in ratios.items():
        if of_name:
            mean = math.exp(sum(map(math.log, of_name)) / len(of_name))
            print(
                f"{name}: speed against the best peer on 16-token pages, geometric mean {mean:.3f}"
            )


if __name__ == "__main__":
    main()
