"""A result that an op makes beside a given `out`: what clearing rows of no sequence costs.

    python -m benchmarks.bench_made_results [--device cuda]

bfloat16, 32 query heads on 8 KV heads of 128, permuted pages of 16 tokens, layout NHD. "padded":
query tokens behind the last sequence, which get 0 where the op makes the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for, machine, medians

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16


def measure(
    name: str, device: str, copies: int, query: Tensor, call: Callable[..., object]
) -> None:
    """call(copy, **options) with and without out."""
    out = torch.empty_like(query)
    calls = {"makes": lambda i: call(i), "given": lambda i: call(i, out=out)}
    times = medians(calls, device, copies)
    print(f"| {name} | {times['makes'] * 1e6:.1f} | {times['given'] * 1e6:.1f} |", flush=True)


def contiguous(device: str, tokens: int, padded: int, return_lse: bool = False) -> None:
    options = {"device": device, "dtype": torch.bfloat16}
    copies = copies_for(device, 2 * tokens * KV_HEADS * HEAD_SIZE * 2)
    query = torch.randn(tokens + padded, HEADS, HEAD_SIZE, **options)
    keys, values = torch.randn(2, copies, tokens, KV_HEADS, HEAD_SIZE, **options)
    starts = torch.tensor([0, tokens], device=device, dtype=torch.int32)

    def call(i: int, **more: Tensor) -> object:
        return vllm_kernels.varlen_attention(
            query, keys[i], values[i], starts, starts, max_query_len=tokens, return_lse=return_lse,
            **more,
        )  # fmt: skip

    name = f"varlen_attention, {tokens} tokens, {padded} padded{', lse' if return_lse else ''}"
    measure(name, device, copies, query, call)


def paged(device: str, batch: int, length: int, queries: int, padded: int) -> None:
    options = {"device": device, "dtype": torch.bfloat16}
    blocks = batch * length // PAGE
    copies = copies_for(device, 2 * blocks * PAGE * KV_HEADS * HEAD_SIZE * 2)
    keys, values = torch.randn(2, copies, blocks, PAGE, KV_HEADS, HEAD_SIZE, **options)
    tables = torch.randperm(blocks, device=device).int().view(batch, -1)
    lens = torch.full((batch,), length, device=device, dtype=torch.int32)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * queries
    query = torch.randn(batch * queries + padded, HEADS, HEAD_SIZE, **options)

    def call(i: int, **more: Tensor) -> object:
        return vllm_kernels.paged_attention(
            query, keys[i], values[i], tables, lens, query_start_loc=starts, max_query_len=queries,
            layout="NHD", **more,
        )  # fmt: skip

    name = f"paged_attention, {batch} x {length}, {queries} tokens each, {padded} padded"
    measure(name, device, copies, query, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    print(machine(device))
    print("\n| call | makes its result, us | given out, us |\n|---|---|---|")
    sizes = ((64, 0), (64, 4000), (256, 0), (4096, 0)) if device == "cuda" else ((64, 0), (64, 500))
    for tokens, padded in sizes:
        contiguous(device, tokens, padded)
    contiguous(device, 64, 0, return_lse=True)
    for batch, length, queries, padded in ((1, 1024, 1, 0), (8, 1024, 1, 56), (32, 4096, 8, 0)):
        if device == "cuda" or batch < 32:
            paged(device, batch, length, queries, padded)


if __name__ == "__main__":
    main()
