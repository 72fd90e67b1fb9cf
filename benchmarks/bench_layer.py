"""The non-GEMM part of one Llama-3-8B decoder layer at decode, ours beside vLLM and FlashInfer.

    python -m benchmarks.bench_layer [--device cpu|cuda] [--batch 1 16 64 256] [--context 2048]
                                     [--only 'ours*'] [--skip vllm_v1] [--out layer.json] [--smoke]

bfloat16, page 16, permuted pages; add + norm, rotary + cache write, attention, add + norm,
silu_and_mul, as benchmarks/layer.py has them. On a GPU: one CUDA graph of layers over rotated
buffers a candidate; the candidates' graphs are replayed in turn, so that all see the same clocks.
us: median over replays, a layer. GB/s: of the bytes that the five ops must move, for every
candidate alike. Rivals: benchmarks/layer_peers.py; tools/gpu_session.sh peers_layer runs it beside
them.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable

import torch

import vllm_kernels as vk
from benchmarks.harness import machine
from benchmarks.layer import EPSILON, LLAMA_3_8B, SMOKE, WRONG, Candidate, Layer, Missing
from benchmarks.layer_peers import PEERS
from benchmarks.tables import CEILING

GOALS = {1: 1.3, 16: 1.15, 64: 1.0, 256: 1.0}  # best peer / ours
LAYERS = 16  # at least, in a graph
BURST_SECONDS = 0.015
STICKY = ("illegal", "device-side", "misaligned", "unspecified launch")  # CUDA is lost after these

Prepare = Callable[[Layer], Candidate]


def ours(layer: Layer, layout: str, attend_after_product: Callable[..., None]) -> Candidate:
    caches = layer.caches[layout]
    workspace = vk.paged_attention_workspace(layer.device) if layer.device == "cuda" else None

    def norm(x, residual, weight):
        vk.fused_add_rms_norm(x, residual, weight, EPSILON)

    def attend(i):
        attend_after_product(layer, layout, i, caches[i], workspace)

    return Candidate(norm, attend, vk.silu_and_mul)


def attention(layer: Layer, layout: str, i: int, caches, workspace) -> None:
    vk.paged_attention(
        layer.packed[i][0], *caches, layer.block_tables, layer.seq_lens, scale=layer.scale,
        layout=layout, out=layer.attended[i], workspace=workspace,
    )  # fmt: skip


def fused(layer: Layer, layout: str, i: int, caches, workspace) -> None:
    """rope_and_cache on slices of the packed product, then paged_attention."""
    vk.rope_and_cache(
        layer.positions, *layer.packed[i], layer.cos_sin, True, *caches, layer.slots, layout
    )
    attention(layer, layout, i, caches, workspace)


def unfused(layer: Layer, layout: str, i: int, caches, workspace) -> None:
    """rotary_embedding, the cache writer, then paged_attention."""
    query, key, value = layer.packed[i]
    vk.rotary_embedding(layer.positions, query, key, layer.shape.head_size, layer.cos_sin, True)
    write = vk.reshape_and_cache if layout == "vllm" else vk.reshape_and_cache_flash
    write(key, value, *caches, layer.slots, "auto", layer.one, layer.one)
    attention(layer, layout, i, caches, workspace)


def one_launch(layer: Layer, layout: str, i: int, caches, workspace) -> None:
    """fused_decode_attention for the whole of it (in the launches of `fused`, as yet)."""
    vk.fused_decode_attention(
        layer.qkv[i], layer.positions, layer.cos_sin, *caches, layer.slots, layer.block_tables,
        layer.seq_lens, scale=layer.scale, layout=layout, out=layer.attended[i],
        workspace=workspace,
    )  # fmt: skip


def candidates(device: str) -> dict[str, Prepare]:
    """Name -> prepare(layer)."""
    kinds = {"ours_one_launch": one_launch, "ours_fused": fused, "ours_unfused": unfused}
    found: dict[str, Prepare] = {
        name + suffix: functools.partial(ours, layout=layout, attend_after_product=kind)
        for name, kind in kinds.items()
        for layout, suffix in (("vllm", ""), ("NHD", "_nhd"))
    }
    return found | (PEERS if device == "cuda" else {})


def captured(layer: Layer, candidate: Candidate, layers: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(2):
            layer.run(candidate, i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for j in range(layers):
            layer.run(candidate, j % layer.copies)
    torch.cuda.synchronize()
    return graph


def graph_is_right(layer: Layer, candidate: Candidate, layers: int, graph) -> bool:
    """Whether a replay leaves behind what the same calls leave, one by one."""
    layer.restore()
    for j in range(layers):
        layer.run(candidate, j % layer.copies)
        torch.cuda.synchronize()
    want = layer.results()
    layer.restore()
    graph.replay()
    torch.cuda.synchronize()
    rows = (
        ((got.float() - one.float()).norm(dim=-1) / one.float().norm(dim=-1)).max()
        for got, one in zip(layer.results(), want, strict=True)
    )
    return all(bool(worst < WRONG) for worst in rows)  # False for NaN


def burst_cuda(graph: torch.cuda.CUDAGraph, layers: int) -> Callable[[], list[float]]:
    def replay(times: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in events]

    once = replay(3)[-1]
    times = 1 + min(12, max(2, round(BURST_SECONDS / once)))
    # The first replay of a burst finds an idle GPU and waits for its own launch: left out.
    return lambda: [seconds / layers for seconds in replay(times)[1:]]


def burst_cpu(layer: Layer, candidate: Candidate) -> Callable[[], list[float]]:
    copy = itertools.cycle(range(layer.copies))

    def burst() -> list[float]:
        samples = []
        for _ in range(5):
            i = next(copy)
            start = time.perf_counter()
            layer.run(candidate, i)
            samples.append(time.perf_counter() - start)
        return samples

    return burst


class Run:
    """One batch size: who takes part, and what was measured."""

    def __init__(self, layer: Layer, arguments: argparse.Namespace) -> None:
        self.layer, self.arguments = layer, arguments
        self.records: dict[str, dict] = {}
        self.candidates: dict[str, Candidate] = {}  # a graph does not keep their workspaces
        self.bursts: dict[str, Callable[[], list[float]]] = {}
        self.samples: dict[str, list[float]] = {}
        # Whole rounds over the copies.
        self.layers = layer.copies * -(-LAYERS // layer.copies)

    def guarded(self, name: str, step: Callable[[], None]) -> None:
        """A candidate that fails is left out, and the others go on."""
        try:
            step()
        except Missing as reason:
            print(f"{name:<17} left out: {reason}", flush=True)
            self.arguments.skip.append(name)  # of the next batches too
        except Exception as error:
            message = str(error).strip().splitlines() or [""]
            self.records[name]["error"] = f"{type(error).__name__}: {message[0][:300]}"
            self.bursts.pop(name, None)
            print(f"{name:<17} ERROR {self.records[name]['error']}", flush=True)
            if self.arguments.smoke:
                traceback.print_exc(limit=-4, file=sys.stdout)
            if self.layer.device == "cuda" and any(word in str(error) for word in STICKY):
                print(f"CUDA is lost: all over again without {name}", flush=True)
                os.execv(
                    sys.executable,
                    [sys.executable, "-m", "benchmarks.bench_layer", *sys.argv[1:], "--skip", name],
                )

    def prepare(self, name: str, make: Prepare) -> None:
        layer = self.layer
        record = self.records[name] = {
            "candidate": name, "batch": layer.batch, "context": layer.context,
            "bytes": layer.bytes, "copies": layer.copies,
        }  # fmt: skip

        def step() -> None:
            candidate = self.candidates[name] = make(layer)
            record["attention_error"], record["other_error"] = layer.errors(candidate)
            if layer.device == "cuda":
                graph = captured(layer, candidate, self.layers)
                record["graph_ok"] = graph_is_right(layer, candidate, self.layers, graph)
                self.bursts[name] = burst_cuda(graph, self.layers)
            else:
                self.bursts[name] = burst_cpu(layer, candidate)

        self.guarded(name, step)

    def measure(self) -> None:
        self.samples = {name: [] for name in self.bursts}
        self.layer.restore()
        for turn in range(self.arguments.rounds):
            order = list(self.bursts)
            for name in order if turn % 2 == 0 else reversed(order):
                self.guarded(name, lambda name=name: self.samples[name].extend(self.bursts[name]()))
        for name, samples in self.samples.items():
            if "error" in self.records[name]:
                continue
            spread = statistics.quantiles(samples, n=10, method="inclusive")
            us = statistics.median(samples) * 1e6
            record = self.records[name]
            record["right"] = accurate(record) and record.get("graph_ok", True)
            record.update(
                us=us, us_p10=spread[0] * 1e6, us_p90=spread[-1] * 1e6, replays=len(samples),
                gbps=self.layer.bytes / us * 1e-3,
            )  # fmt: skip

    def show(self) -> None:
        layer, timed = self.layer, [r for r in self.records.values() if "us" in r]
        on_gpu = layer.device == "cuda"
        floor = f", {layer.bytes / CEILING * 1e6:.1f} us at 4.34 TB/s" if on_gpu else ""
        graph = f", {self.layers} layers a graph" if on_gpu else ""
        print(
            f"\nbatch {layer.batch}, context {layer.context}: {layer.bytes / 1e6:.1f} MB a layer"
            f"{floor}; {layer.copies} copies{graph}"
        )
        right = [r for r in timed if r["right"]]
        best = min((r["us"] for r in right if r["candidate"].startswith("ours")), default=None)
        print(f"{'candidate':<17} {'us':>9} {'p10':>9} {'p90':>9} {'GB/s':>6} "
              f"{'% peak':>6} {'/ ours':>6} {'attn err':>9} {'other err':>9}")  # fmt: skip
        for r in sorted(timed, key=lambda r: r["us"]):
            peak = f"{100 * r['gbps'] * 1e9 / CEILING:.1f}" if on_gpu else "-"
            ratio = f"{r['us'] / best:.2f}" if best else "-"
            remark = "" if r.get("graph_ok", True) else "  GRAPH MISMATCH"
            remark += "" if accurate(r) else "  WRONG"
            print(
                f"{r['candidate']:<17} {r['us']:>9.2f} {r['us_p10']:>9.2f} {r['us_p90']:>9.2f} "
                f"{r['gbps']:>6.0f} {peak:>6} {ratio:>6} {r['attention_error']:>9.1e} "
                f"{r['other_error']:>9.1e}{remark}",
                flush=True,
            )
        print("", flush=True)


def accurate(record: dict) -> bool:
    return record["attention_error"] < WRONG and record["other_error"] < WRONG  # False for NaN


def summary(records: list[dict]) -> None:
    """Best peer over ours, a line a batch."""
    for batch in dict.fromkeys(r["batch"] for r in records):
        us = {r["candidate"]: r["us"] for r in records if r["batch"] == batch and r.get("right")}
        mine = sorted((u, name) for name, u in us.items() if name.startswith("ours"))
        theirs = sorted((u, name) for name, u in us.items() if not name.startswith("ours"))
        if not mine:
            continue
        line = f"batch {batch:>3}: best of ours {mine[0][1]} {mine[0][0]:.2f} us"
        for suffix in ("", "_nhd"):
            if f"ours_fused{suffix}" in us and f"ours_unfused{suffix}" in us:
                gain = us[f"ours_unfused{suffix}"] / us[f"ours_fused{suffix}"]
                line += f"; unfused / fused {'NHD' if suffix else 'vllm'} {gain:.2f}"
        if theirs:
            peer, name = theirs[0]
            goal = f" (goal: {GOALS[batch]:.2f})" if batch in GOALS else ""
            each = " ".join(f"{n} {peer / u:.2f}" for u, n in mine)
            line += f"; best peer {name} {peer:.2f} us, over ours: {each}{goal}"
        print(line, flush=True)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="*")
    parser.add_argument("--context", type=int, help="tokens, the new one included")
    parser.add_argument("--only", action="append", help="pattern of candidates; may be repeated")
    parser.add_argument("--skip", action="append", help="likewise, left out", default=[])
    parser.add_argument("--rounds", type=int, help="bursts of replays a candidate")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer, to see that it runs")
    parser.add_argument("--out", help="JSON file: a list with a record a batch and candidate")
    arguments = parser.parse_args(argv)
    smoke, device = arguments.smoke, arguments.device
    shape = SMOKE if smoke else LLAMA_3_8B
    batches = arguments.batch or ([1, 3] if smoke else [1, 16] if device == "cpu" else list(GOALS))
    context = arguments.context or (100 if smoke else 2048)
    arguments.rounds = arguments.rounds or (2 if smoke else 12)

    def chosen(name: str) -> bool:
        return any(fnmatch.fnmatch(name, p) for p in arguments.only or ["*"]) and not any(
            fnmatch.fnmatch(name, p) for p in arguments.skip
        )

    torch.manual_seed(0)
    print(machine(device))
    print(f"{shape}, bfloat16, {arguments.rounds} rounds")
    if device == "cpu":
        print("vLLM and FlashInfer are left out: no GPU")
    records: list[dict] = []
    for batch in batches:
        layer = Layer(shape, batch, context, device, copies=2 if smoke else None)
        run = Run(layer, arguments)
        for name, make in candidates(device).items():
            if chosen(name):
                run.prepare(name, make)
        run.measure()
        run.show()
        records += [r for r in run.records.values() if "us" in r or "error" in r]
        if arguments.out:
            with open(arguments.out, "w") as file:
                json.dump(records, file, indent=1)
        del run, layer
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    summary(records)
    return records


if __name__ == "__main__":
    with torch.no_grad():
        main()
