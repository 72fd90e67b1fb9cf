"""A chunk of a prompt on a cached prefix, on a CPU: ours beside a gather and torch's SDPA.

    python -m benchmarks.bench_prompt_cpu [--new 512] [--prefix 8192] [--threads 2]

32 query heads, 8 KV heads, head size 128, permuted pages of 16 tokens. The candidates take turns in
one process. FLOP: four times head size for each pair of query token and token it sees, each head.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

import vllm_kernels
from benchmarks.harness import machine
from vllm_kernels import _C

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16


def candidates(dtype: torch.dtype, new: int, prefix: int):
    tokens = prefix + new
    pages = tokens // PAGE + 64
    rows = torch.randn(2, pages, PAGE, KV_HEADS, HEAD_SIZE).to(dtype)
    x = 16 // dtype.itemsize
    caches = {
        "NHD": tuple(rows),
        "vllm": (
            rows[0].unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(),
            rows[1].permute(0, 2, 3, 1).contiguous(),
        ),
    }
    table = torch.randperm(pages)[: tokens // PAGE].int()[None]
    query = torch.randn(new, HEADS, HEAD_SIZE).to(dtype)
    lens = torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, new], dtype=torch.int32)
    mask = torch.ones(new, tokens, dtype=torch.bool).tril(prefix)
    gathered = [cache[table[0].long()].flatten(0, 1) for cache in rows]
    key_starts = torch.tensor([0, tokens], dtype=torch.int32)

    def sdpa() -> Tensor:
        key, value = (cache[table[0].long()].flatten(0, 1).transpose(0, 1)[None] for cache in rows)
        heads = query.transpose(0, 1)[None]
        return torch.nn.functional.scaled_dot_product_attention(
            heads, key, value, attn_mask=mask, enable_gqa=True
        )[0].transpose(0, 1)

    def paged(layout: str) -> Tensor:
        return vllm_kernels.paged_attention(
            query, *caches[layout], table, lens, query_start_loc=starts, max_query_len=new,
            layout=layout,
        )  # fmt: skip

    return {
        "gather + SDPA": sdpa,
        "paged_attention vllm": lambda: paged("vllm"),
        "paged_attention NHD": lambda: paged("NHD"),
        "varlen_attention": lambda: vllm_kernels.varlen_attention(
            query, *gathered, starts, key_starts
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    new, prefix = arguments.new, arguments.prefix
    flop = 4 * HEADS * HEAD_SIZE * sum(prefix + i + 1 for i in range(new))
    print(f"{machine('cpu')}, level {_C.cpu_level()}, {arguments.threads} threads")
    print(f"{new} new tokens on {prefix}: {flop / 1e9:.1f} GFLOP")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        calls = candidates(dtype, new, prefix)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        want = calls["gather + SDPA"]().double()
        for name, call in calls.items():
            error = ((call().double() - want).norm() / want.norm()).item()
            assert error < 1e-2, f"{name}: {error}"
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - start)
        for name, seconds in samples.items():
            median, best = statistics.median(seconds), min(seconds)
            times = f"{median * 1e3:7.0f} ms median {best * 1e3:7.0f} best"
            print(f"{str(dtype)[6:]:9} {name:22} {times} {flop / best / 1e9:6.0f} GFLOP/s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
