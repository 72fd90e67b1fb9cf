"""Measures two builds of the package in turns, row by row.

    KIT=.peers python3 -m benchmarks.compare_builds OLD NEW [--groups decode,layer] [--rounds 5]

A tree is a checkout with its libraries built in place. Each tree has a process of its own, which
keeps the CUDA graphs of a row's candidates. The parent lets them replay one after the other, in
alternating order, so both see the same clocks. This resolves differences of 1%.

Rows are those of the kit of peers (KIT: bench.py, prefill.py), of benchmarks/peers_ours.py and of
benchmarks/bench_layer.py. Group `batches` has those of benchmarks/decode_batches.py. The figure of
a row is new / old, the ratio of the medians in us.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

GROUPS = ("decode", "prefill", "small", "layer")
REPLAY_SECONDS = 0.012
SMALL_TOKENS = (16, 256, 4096)

Calls = dict[str, tuple[Callable[[int], object], int]]  # name: (call(copy), copies)


# --- the process of one build


def bench_rows(workloads: dict, makers: dict) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Rows of the kit's bench.py. `workloads`: as its WL. `makers`: of peers_ours.py's DECODE."""
    import bench

    for name, spec in workloads.items():

        def prepare(name=name, spec=spec) -> Calls:
            work = bench.W(name, *spec)
            return {peer: (make(work), work.R) for peer, (_, make) in makers.items()}

        yield name, prepare


def decode_rows(ours: dict) -> Iterator[tuple[str, Callable[[], Calls]]]:
    import bench

    return bench_rows(bench.WL, ours["DECODE"])


def batches_rows(ours: dict) -> Iterator[tuple[str, Callable[[], Calls]]]:
    # An old tree may lack this file.
    workloads = runpy.run_path(str(Path(__file__).with_name("decode_batches.py")))["workloads"]()
    return bench_rows(
        workloads, {peer: ours["DECODE"][peer] for peer in ("ours_pa", "ours_pa_nhd")}
    )


def prefill_rows(ours: dict) -> Iterator[tuple[str, Callable[[], Calls]]]:
    import prefill

    for name, spec in prefill.WL.items():

        def prepare(name=name, spec=spec) -> Calls:
            work = prefill.P(name, **{"dtype": prefill.BF, **spec})
            return {peer: (make(work), work.R) for peer, make in ours["PREFILL"].items()}

        yield name, prepare


def small_rows(ours: dict) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Hidden size 4096, 32 query heads, 8 KV heads of 128, 14336 activations, as kit's small.py."""

    def randn(copies: int, *shape: int) -> list:
        return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]

    def state(tokens: int, copies: int) -> dict[str, SimpleNamespace]:
        weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        x, other = randn(copies, tokens, 4096), randn(copies, tokens, 4096)
        wide = randn(copies, tokens, 2 * 14336)
        heads, kv, values = (randn(copies, tokens, n, 128) for n in (32, 8, 8))
        pages = max(4096, 2 * tokens)
        keys = torch.zeros(pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
        cache = torch.zeros_like(keys)
        return {
            "rms_norm": SimpleNamespace(X=x, O=other, w=weight, eps=1e-6),
            "fused_add_rms": SimpleNamespace(X=x, S=other, w=weight, eps=1e-6),
            "silu_and_mul": SimpleNamespace(X=wide, O=randn(copies, tokens, 14336)),
            "rope": SimpleNamespace(
                Q=heads, K=kv, D=128, pos=torch.randint(0, 8192, (tokens,), device="cuda"),
                cs=torch.randn(8192, 128, device="cuda", dtype=torch.bfloat16),
            ),
            "kv_write": SimpleNamespace(
                K=kv, V=values, kc=keys, vc=cache, one=torch.ones(1, device="cuda"),
                kx=keys.view(pages, 8, 16, 16, 8), vx=cache.view(pages, 8, 128, 16),
                slots=[torch.randperm(pages * 16, device="cuda")[:tokens] for _ in range(copies)],
            ),
        }  # fmt: skip

    for tokens in SMALL_TOKENS:

        def prepare(tokens=tokens) -> Calls:
            copies = max(2, min(64, 2**28 // (tokens * 8192)))
            states = state(tokens, copies)
            return {
                f"{op}/{name}": (make(states[op]), copies)
                for op, makers in ours["SMALL"].items()
                for name, make in makers.items()
            }

        yield f"T{tokens}", prepare


def layer_rows(_: dict) -> Iterator[tuple[str, Callable[[], Calls]]]:
    from benchmarks import bench_layer

    for batch in bench_layer.GOALS:

        def prepare(batch=batch) -> Calls:
            layer = bench_layer.Layer(bench_layer.LLAMA_3_8B, batch, 2048, "cuda")
            calls: Calls = {}
            for name, make in bench_layer.candidates("cuda").items():
                if name.startswith("ours"):
                    candidate = make(layer)
                    run = lambda i, candidate=candidate: layer.run(candidate, i)  # noqa: E731
                    calls[name] = (run, layer.copies)
            return calls

        yield f"layer_b{batch}", prepare


class Graph:
    """A CUDA graph with one call per copy of the data."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        self.call, self.copies = call, copies
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(0)
            call(copies - 1)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for copy in range(copies):
                call(copy)
        self.times = 1
        self.times = max(3, min(60, round(REPLAY_SECONDS / (self.time() * copies * 1e-6))))

    def time(self) -> float:
        """us per call: the median of some replays. The first one waits for its launch."""
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.times + 1)
        ]
        for start, end in events:
            start.record()
            self.graph.replay()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events[1:]) * 1e3 / self.copies


def worker(groups: list[str], pattern: str) -> None:
    """Reads requests from stdin: "next" prepares a row, a name measures that candidate."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    torch.set_grad_enabled(False)
    ours = runpy.run_path("benchmarks/peers_ours.py")
    rows = (
        row
        for group in groups
        for row in globals()[f"{group}_rows"](ours)
        if any(fnmatch.fnmatch(row[0], one) for one in pattern.split(","))
    )
    graphs: dict[str, Graph] = {}
    for request in sys.stdin:
        request = json.loads(request)
        if request != "next":
            print(json.dumps(graphs[request].time()), file=answers)
            continue
        graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        row = next(rows, None)
        if row is not None:
            for name, (call, copies) in row[1]().items():
                try:
                    graphs[name] = Graph(call, copies)
                except RuntimeError as error:  # the writer on rows of 8 bits
                    print(f"{row[0]} {name}: left out: {error}", file=sys.stderr)
        print(json.dumps([row and row[0], list(graphs)]), file=answers)


# --- the parent


class Build:
    def __init__(self, tree: str, arguments: argparse.Namespace) -> None:
        path = os.pathsep.join([tree, os.environ["KIT"], os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", *sys.argv[1:]],
            cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def send(self, request: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")

    def receive(self):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended")
        return json.loads(line)

    def ask(self, request: str):
        self.send(request)
        return self.receive()


def compare(builds: list[Build], rounds: int) -> Iterator[dict]:
    """A record per row and candidate: us of each build."""
    while True:
        for build in builds:
            build.send("next")
        answers = [build.receive() for build in builds]
        row, names = answers[0][0], [name for name in answers[0][1] if name in answers[1][1]]
        if row is None:
            return
        for name in names:
            times: list[list[float]] = [[], []]
            for turn in range(rounds):
                for which in (0, 1) if turn % 2 == 0 else (1, 0):
                    time.sleep(0.002)
                    times[which].append(builds[which].ask(name))
            old, new = (statistics.median(of_build) for of_build in times)
            yield {"row": row, "candidate": name, "old": old, "new": new}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old", help="a tree with its libraries")
    parser.add_argument("new", help="likewise")
    parser.add_argument("--groups", default=",".join(GROUPS), help="also: batches")
    parser.add_argument("--rows", default="*", help="patterns of row names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=os.environ.get("OUT", "/tmp") + "/compare.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.groups.split(","), arguments.rows)
        return
    os.environ["KIT"] = str(Path(os.environ["KIT"]).resolve())
    builds = [Build(str(Path(t).resolve()), arguments) for t in (arguments.old, arguments.new)]
    records: list[dict] = []
    for record in compare(builds, arguments.rounds):
        records.append(record)
        Path(arguments.out).write_text(json.dumps(records))
        ratio = record["new"] / record["old"]
        print(
            f"{record['row']:<16} {record['candidate']:<24} {record['old']:>9.2f} "
            f"{record['new']:>9.2f} us  {ratio:.4f}", flush=True,
        )  # fmt: skip
    print(f"{'candidate':<24} rows  geomean     min     max")
    for name in dict.fromkeys(record["candidate"] for record in records):
        ratios = [r["new"] / r["old"] for r in records if r["candidate"] == name]
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        print(f"{name:<24} {len(ratios):>4}  {mean:.4f}  {min(ratios):.4f}  {max(ratios):.4f}")


if __name__ == "__main__":
    main()
