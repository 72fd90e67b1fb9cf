"""What a call with next to nothing to compute costs: paged_attention_v1 of one token on the CPU.

    python -m benchmarks.bench_call_overhead

One sequence, context 1, one head of 32. Best of many repeats, beside the op without its Python
wrapper and the cheapest in-place op of torch.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable

import torch

import vllm_kernels

CALLS, REPEATS = 200, 600  # short blocks: a neighbour does not reach into every one
HEAD_SIZE, BLOCK = 32, 16


def best_us(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS * 1e6


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    query = torch.randn(1, 1, HEAD_SIZE)
    out = torch.empty_like(query)
    key_cache = torch.randn(1, 1, HEAD_SIZE // 4, BLOCK, 4)
    value_cache = torch.randn(1, 1, HEAD_SIZE, BLOCK)
    block_tables = torch.zeros(1, 1, dtype=torch.int32)
    seq_lens = torch.ones(1, dtype=torch.int32)
    one = torch.ones(1)
    arguments = (out, query, key_cache, value_cache, 1, 0.1, block_tables, seq_lens, BLOCK, 1, None,
                 "auto", one, one)  # fmt: skip
    sparse = (0, 0, 0, 64, 0)
    wrapped = vllm_kernels.paged_attention_v1
    op = torch.ops.vllm_kernels.paged_attention_v1.default
    add = torch.ops.aten.add_.Tensor
    print("| call | us |\n|---|---|")
    for label, call in {
        "paged_attention_v1, 14 arguments": lambda: wrapped(*arguments),
        "paged_attention_v1, 19 arguments": lambda: wrapped(*arguments, *sparse),
        "the op itself, 14 arguments": lambda: op(*arguments),
        "the op itself, 19 arguments": lambda: op(*arguments, *sparse),
        "torch.ops.aten.add_": lambda: add(one, one),
    }.items():
        print(f"| {label} | {best_us(call):.2f} |")
    with torch.no_grad():
        time = best_us(lambda: wrapped(*arguments, *sparse))
        print(f"| paged_attention_v1, 19 arguments, under no_grad | {time:.2f} |")


if __name__ == "__main__":
    main()
