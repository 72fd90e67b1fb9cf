"""ContextParallel: shards in one process against one rank; over processes, the time of exchanges.

    python -m benchmarks.bench_context_parallel [--device cuda] [--seqs 8] [--tokens 8192]
    torchrun --nproc-per-node 2 -m benchmarks.bench_context_parallel [--device cuda] --tokens 8192

Decode steps of 32 query heads over 8 KV heads of size 128, bfloat16. In one process the medians are
printed, in us and as a multiple of one rank's; over processes, where arms run in turns, medians and
smallest times.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from vllm_kernels import combine_attn_partials, paged_attention
from vllm_kernels.distributed import ContextParallel

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16


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


def in_processes(seqs: int, tokens: int, device: str, rounds: int) -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    parallel = ContextParallel(dist.group.WORLD)
    query = torch.randn(seqs, HEADS // parallel.size, SIZE, dtype=torch.bfloat16, device=device)
    keys, values, tables = (x[0] for x in pool(parallel.size, seqs, tokens, device))
    local = parallel.local_lens(torch.full((seqs,), tokens, device=device))
    everyone = query.repeat(1, parallel.size, 1)
    arms: dict[str, Callable[[], object]] = {
        "attention alone": lambda: paged_attention(
            everyone, keys, values, tables, local, layout="HND", return_lse=True
        )
    }
    for exchange in ("all_to_all", "gather"):
        arms[exchange] = lambda e=exchange: parallel.attend(  # type: ignore[misc]
            query, keys, values, tables, local, layout="HND", exchange=e
        )
    for name, (us, least) in timed(arms, rounds, device).items():
        if dist.get_rank() == 0:
            print(f"{name:16} {us:9.1f} us, at least {least:9.1f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seqs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30, help="over processes")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if "RANK" in os.environ:
        in_processes(arguments.seqs, arguments.tokens, arguments.device, arguments.rounds)
    else:
        in_one_process(arguments.seqs, arguments.tokens, arguments.device)


if __name__ == "__main__":
    main()
