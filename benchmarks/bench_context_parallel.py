"""ContextParallel: shards in one process against one rank; over processes, the time of exchanges.

    python -m benchmarks.bench_context_parallel [--device cuda] [--shapes 8x8192 1x131072]
    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel [--device cuda] [--json FILE]

Decode steps of 32 query heads over 8 KV heads of size 128, bfloat16. In one process the medians are
printed, in us and as a multiple of one rank's. Over processes arms run in turns: medians and
smallest times of eager calls, the time of a call in a CUDA graph, and how far the result of the
ranks is from that of one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from vllm_kernels import combine_attn_partials, paged_attention
from vllm_kernels.distributed import ContextParallel

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
CALLS = 10  # of a CUDA graph


def timed(
    arms: dict[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, tuple[float, float]]:
    """Returns the median and the smallest time of each arm in us."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, call in arms.items():
            begin = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: (median(all_times), min(all_times)) for name, all_times in times.items()}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Returns the replay of a CUDA graph with ``CALLS`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    return graph.replay


def pool(shards: int, seqs: int, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Caches [shards, ...] and tables [shards, seqs, blocks] for ``tokens`` in all."""
    blocks = -(-tokens // (BLOCK * shards)) + 1
    shape = (shards, seqs * blocks, KV_HEADS, BLOCK, SIZE)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
    tables = torch.stack([torch.randperm(seqs * blocks).view(seqs, blocks) for _ in range(shards)])
    return caches[0], caches[1], tables.to(device, torch.int32)


def in_one_process(seqs: int, tokens: int, device: str) -> None:
    """Times shards in turn, one shard beside as many tokens of one rank, and merges."""
    query = torch.randn(seqs, HEADS, SIZE, dtype=torch.bfloat16, device=device)
    lens = torch.full((seqs,), tokens, dtype=torch.int32, device=device)
    arms: dict[str, Callable[[int], object]] = {}
    keys, values, tables = pool(1, seqs, tokens, device)
    whole = keys[0], values[0], tables[0]
    arms["one rank"] = lambda _: paged_attention(query, *whole, lens, layout="HND")
    for shards in (2, 4, 8):
        parallel = ContextParallel(shards=shards)
        cache, local = pool(shards, seqs, tokens, device), parallel.local_lens(lens)
        arms[f"{shards} shards"] = lambda _, p=parallel, c=cache, n=local: p.attend(  # type: ignore[misc]
            query, *c, n, layout="HND"
        )
        arms[f"1 of {shards}, lse"] = lambda _, c=cache, n=local: paged_attention(  # type: ignore[misc]
            query, *(x[0] for x in c), n[0], layout="HND", return_lse=True
        )
        arms[f"1/{shards} of tokens"] = lambda _, n=local: paged_attention(  # type: ignore[misc]
            query, *whole, n[0], layout="HND"
        )
        partials = torch.randn(shards, *query.shape, dtype=torch.bfloat16, device=device)
        lses = torch.randn(shards, seqs, HEADS, device=device)
        out = torch.empty_like(query)
        arms[f"merge of {shards}"] = lambda _, o=out, x=partials, y=lses: combine_attn_partials(  # type: ignore[misc]
            o, x, y
        )
    times = harness.medians(arms, device, 1)
    print(f"{seqs} sequences of {tokens} tokens")
    for name, seconds in times.items():
        print(f"{name:16} {seconds * 1e6:9.1f} us, {seconds / times['one rank']:.3f}")


def pages_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Puts rows [seqs, tokens, KV_HEADS, SIZE] into a cache in layout HND, at random places.

    Returns the cache and its block table. All calls give the same places.
    """
    seqs, tokens = rows.shape[:2]
    blocks = -(-tokens // BLOCK)
    places = torch.randperm(seqs * blocks, generator=torch.Generator().manual_seed(0))
    cache = rows.new_zeros(seqs * blocks, KV_HEADS, BLOCK, SIZE)
    table = places.to(rows.device, torch.int32).view(seqs, blocks)
    for seq in range(seqs):
        for first in range(0, tokens, 1 << 16):
            part = rows[seq, first : first + (1 << 16)]
            padded = part.new_zeros(-(-len(part) // BLOCK) * BLOCK, KV_HEADS, SIZE)
            padded[: len(part)] = part
            at = table[seq, first // BLOCK :][: len(padded) // BLOCK].long()
            cache[at] = padded.view(-1, BLOCK, KV_HEADS, SIZE).transpose(1, 2)
    return cache, table


def in_processes(
    seqs: int, tokens: int, device: str, rounds: int
) -> list[list[str | float | None]]:
    """Times a layer of this rank, and compares it with one rank that has all tokens.

    Returns of each arm the median and the smallest time in us, the time in a CUDA graph, and the
    largest difference of its elements.
    """
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    generator = torch.Generator(device).manual_seed(0)  # the same tokens on all ranks

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    parallel, everyone = ContextParallel(group), random(seqs, HEADS, SIZE)
    query = everyone.view(seqs, size, -1, SIZE)[:, rank].contiguous()
    whole, own = [], []
    for _ in range(2):
        rows = random(seqs, tokens, KV_HEADS, SIZE)
        whole.append(pages_of(rows))
        own.append(pages_of(rows[:, rank::size]))
    caches, (_, table) = [cache for cache, _ in own], own[0]
    lens = torch.full((seqs,), tokens, dtype=torch.int32, device=device)
    local = parallel.local_lens(lens)
    arms: dict[str, Callable[[], Tensor]] = {
        "one rank": lambda: paged_attention(
            everyone, whole[0][0], whole[1][0], whole[0][1], lens, layout="HND"
        ),
        "a rank's part": lambda: paged_attention(
            everyone, *caches, table, local, layout="HND", return_lse=True
        )[0],
    }
    for exchange in ("all_to_all", "gather"):
        arms[exchange] = lambda e=exchange: parallel.attend(  # type: ignore[misc]
            query, *caches, table, local, layout="HND", exchange=e
        )
    exact = arms["one rank"]().view(seqs, size, -1, SIZE)[:, rank].float()
    errors = {name: (arms[name]() - exact).abs().max().item() for name in list(arms)[2:]}
    times = timed(arms, rounds, device)
    graphs = {}
    if device == "cuda":
        graphs = timed({name: captured(call) for name, call in arms.items()}, rounds, device)
    return [
        [name, *times[name], graphs[name][0] / CALLS if graphs else None, errors.get(name)]
        for name in arms
    ]


def over_ranks(asked: argparse.Namespace) -> None:
    if asked.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    result = {
        "machine": harness.machine(asked.device), "ranks": dist.get_world_size(),
        "command": " ".join(sys.argv), "rows": [],
    }  # fmt: skip
    for shape in asked.shapes:
        seqs, tokens = map(int, shape.split("x"))
        for name, middle, least, graph, error in in_processes(
            seqs, tokens, asked.device, asked.rounds
        ):
            result["rows"].append([shape, name, middle, least, graph, error])
            if dist.get_rank() == 0:
                of_graph = f", graph {graph:9.1f}" if graph else ""
                off = f", differs by {error:.4f}" if error is not None else ""
                print(f"{shape:10} {name:14} {middle:9.1f} us, least {least:9.1f}{of_graph}{off}")
    if dist.get_rank() == 0 and asked.json:
        asked.json.write_text(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", nargs="+", default=["8x8192"], help="SEQUENCESxTOKENS")
    parser.add_argument("--rounds", type=int, default=30, help="over processes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="over processes")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    if "RANK" in os.environ:
        return over_ranks(asked)
    for shape in asked.shapes:
        in_one_process(*map(int, shape.split("x")), asked.device)


if __name__ == "__main__":
    main()
