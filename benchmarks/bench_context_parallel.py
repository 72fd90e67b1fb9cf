"""ContextParallel: shards in one process against one rank; over processes, the time of exchanges.

    python -m benchmarks.bench_context_parallel [--device cuda] [--shapes 8x8192 1x131072]
    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel [--device cuda] [--json FILE]

Decode steps of 32 query heads over 8 KV heads of size 128, bfloat16. One process prints medians in
us, and as a multiple of one rank's. Several print the slowest rank: median and smallest time of
eager calls, and the time of a call in a CUDA graph, by events. They also print how far the result
is from that of one rank, as a share of its largest element. Far results make the exit code 1.
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

from benchmarks.harness import capture, medians, replay_seconds, run_record, synchronize
from vllm_kernels import combine_attn_partials, paged_attention
from vllm_kernels.distributed import ContextParallel

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
CALLS = 10  # of a CUDA graph
EXCHANGES = ("all_to_all", "gather")
BOUND = 2**-6  # of the largest element: two roundings to bfloat16 are 2**-8


def eager_us(call: Callable[[], object], device: str) -> float:
    """Wall time of a call. The ranks begin together."""
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6


def in_graph(call: Callable[[], Tensor], rounds: int) -> tuple[Tensor, float]:
    """Returns the result of CALLS calls in a CUDA graph, and the median time of one in us."""
    outs: list[Tensor] = []

    def calls() -> None:
        outs[:] = [call() for _ in range(CALLS)]

    graph = capture(calls)
    dist.barrier()
    graph.replay()
    seconds = median(replay_seconds(graph) for _ in range(rounds)) / CALLS
    return outs[-1], seconds * 1e6


def slowest(values: list[float]) -> list[float]:
    """The largest of the ranks' values."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def pool(shards: int, seqs: int, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Caches [shards, ...] and tables [shards, seqs, blocks] for ``tokens`` in all."""
    blocks = -(-tokens // (BLOCK * shards)) + 1
    shape = (shards, seqs * blocks, KV_HEADS, BLOCK, SIZE)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
    tables = torch.stack([torch.randperm(seqs * blocks).view(seqs, blocks) for _ in range(shards)])
    return caches[0], caches[1], tables.to(device, torch.int32)


def in_one_process(seqs: int, tokens: int, device: str) -> None:
    """Times shards in turn, one shard beside as many tokens of one rank, and merges.

    The window of "1 of N, window" has all tokens: it costs the positions of a shard's tokens alone.
    A bare sum reads and writes what a merge does, without the weights.
    """
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
        arms[f"1 of {shards}, seq_lens"] = lambda _, c=cache, n=local, k=shards: paged_attention(  # type: ignore[misc]
            query, *(x[0] for x in c), n[0], layout="HND", return_lse=True,
            total_seq_lens=lens, shards=k,
        )  # fmt: skip
        arms[f"1 of {shards}, window"] = lambda _, c=cache, n=local, k=shards: paged_attention(  # type: ignore[misc]
            query, *(x[0] for x in c), n[0], layout="HND", return_lse=True,
            total_seq_lens=lens, shards=k, sliding_window=tokens,
        )  # fmt: skip
        arms[f"1/{shards} of tokens"] = lambda _, n=local: paged_attention(  # type: ignore[misc]
            query, *whole, n[0], layout="HND"
        )
        partials = torch.randn(shards, *query.shape, dtype=torch.bfloat16, device=device)
        lses = torch.randn(shards, seqs, HEADS, device=device)
        out = torch.empty_like(query)
        arms[f"merge of {shards}"] = lambda _, o=out, x=partials, y=lses: combine_attn_partials(  # type: ignore[misc]
            o, x, y
        )
        arms[f"bare sum of {shards}"] = lambda _, o=out, x=partials: torch.sum(x, 0, out=o)  # type: ignore[misc]
    times = medians(arms, device, 1)
    print(f"{seqs} sequences of {tokens} tokens")
    for name, seconds in times.items():
        print(f"{name:18} {seconds * 1e6:9.1f} us, {seconds / times['one rank']:.3f}")


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


def arms_of(
    group: dist.ProcessGroup, seqs: int, tokens: int, device: str
) -> dict[str, Callable[[], Tensor]]:
    """One rank with all tokens, this rank's part alone, and both exchanges, over equal tokens."""
    rank, size = group.rank(), group.size()
    generator = torch.Generator(device).manual_seed(0)

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
    for exchange in EXCHANGES:
        arms[exchange] = lambda e=exchange: parallel.attend(  # type: ignore[misc]
            query, *caches, table, local, layout="HND", exchange=e
        )
    return arms


def in_processes(
    seqs: int, tokens: int, device: str, rounds: int
) -> list[tuple[str, float, float, float, float]]:
    """Times a layer of the slowest rank, and compares it with one rank that has all tokens.

    Returns of each arm the median and the smallest time in us, the time in a CUDA graph, and the
    largest difference of its elements, as a share of the largest element.
    """
    group = dist.group.WORLD
    assert group is not None
    arms = arms_of(group, seqs, tokens, device)
    exact = arms["one rank"]().view(seqs, group.size(), -1, SIZE)[:, group.rank()].float()
    rows: list[tuple[str, float, float, float, float]] = []
    for name, call in arms.items():
        eager = [eager_us(call, device) for _ in range(rounds)]
        out, graph = in_graph(call, rounds) if device == "cuda" else (call(), 0.0)
        error = 0.0
        if name in EXCHANGES:
            error = ((out.float() - exact).abs().max() / exact.abs().max()).item()
        middle, least, graph, error = slowest([median(eager), min(eager), graph, error])
        rows.append((name, middle, least, graph, error))
    return rows


def over_ranks(asked: argparse.Namespace) -> int:
    """Returns 1 if a result of the ranks is not that of one."""
    if asked.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    rows: list[list[str | float]] = []
    is_wrong = False
    for shape in asked.shapes:
        seqs, tokens = map(int, shape.split("x"))
        for name, middle, least, graph, error in in_processes(
            seqs, tokens, asked.device, asked.rounds
        ):
            rows.append([shape, name, middle, least, graph, error])
            is_wrong |= error > BOUND
            if dist.get_rank() == 0:
                print(
                    f"{shape:10} {name:14} {middle:9.1f} us, least {least:9.1f}, graph "
                    f"{graph:9.1f}, differs by {error:.4f}", flush=True,
                )  # fmt: skip
    if dist.get_rank() == 0 and asked.json:
        asked.json.write_text(json.dumps(run_record(asked.device) | {"rows": rows}))
    dist.destroy_process_group()
    return int(is_wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="cuda: a GPU per process of torchrun")
    parser.add_argument("--shapes", nargs="+", default=["8x8192"], help="SEQUENCESxTOKENS")
    parser.add_argument("--rounds", type=int, default=30, help="with torchrun")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="with torchrun")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    if "RANK" in os.environ:
        return over_ranks(asked)
    if asked.json:
        parser.error("--json: expected torchrun")
    for shape in asked.shapes:
        in_one_process(*map(int, shape.split("x")), asked.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
