"""Attention over int8 and int4 with a scale a token and head, next to int8 and e4m3 with one.

    python -m benchmarks.bench_token_scales [--layout vllm] [--seconds 0.3]

32 query heads, 8 KV heads, head size 128, permuted pages of 16 tokens. KV copies rotate, so that no
cache serves them. On a CPU the candidates of a case take turns. Bytes are those of K, V, their
scales and zeros. `b64_c2k`: 64 sequences of 2048 tokens; `_q8`: of 8 query tokens.
"""

from __future__ import annotations

import argparse
import functools

import torch
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for, machine, medians
from vllm_kernels import Layout
from vllm_kernels.kv_cache.tensors import KVShape

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16
CASES = {  # sequences, tokens, query tokens
    "cuda": {
        "b1_c8k": (1, 8192, 1), "b8_c8k": (8, 8192, 1), "b64_c2k": (64, 2048, 1),
        "b256_c4k": (256, 4096, 1), "b32_c4k_q8": (32, 4096, 8), "b8_c4k_q128": (8, 4096, 128),
        "b4_c4k_q1024": (4, 4096, 1024),
    },
    "cpu": {
        "b1_c4k": (1, 4096, 1), "b8_c4k": (8, 4096, 1), "b8_c2k_q4": (8, 2048, 4),
        "b1_c1k_q256": (1, 1024, 256),
    },
}  # fmt: skip
CANDIDATES = {
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int8, a scale a token": torch.int8,
    "int4, a scale a token": torch.uint8,
}


def measure(name: str, layout: Layout, device: str, seconds: float) -> None:
    batch, context, queries = CASES[device][name]
    pages = context // PAGE
    blocks = batch * pages
    copies = copies_for(device, batch * context * KV_HEADS * HEAD_SIZE)  # those of int4
    options = {"device": device}
    query = torch.randn(batch * queries, HEADS, HEAD_SIZE, **options).bfloat16()
    out = torch.empty_like(query)
    tables = torch.randperm(blocks, **options).view(batch, pages).int()
    lens = torch.full((batch,), context, dtype=torch.int32, **options)
    starts = torch.arange(batch + 1, dtype=torch.int32, **options) * queries
    several = {"query_start_loc": starts, "max_query_len": queries} if queries > 1 else {}
    shape = functools.partial(KVShape, 1, KV_HEADS, HEAD_SIZE, torch.bfloat16, PAGE, layout)
    keys, values = (
        torch.randint(-100, 100, (copies, *sizes), dtype=torch.int8, **options)
        for sizes in shape("int8_per_token").cache_shapes(blocks)
    )
    halves = [
        pages.view(torch.uint8).flatten()[: pages.numel() // 2].view(copies, *sizes)
        for pages, sizes in zip((keys, values), shape("int4_per_token").cache_shapes(blocks))
    ]
    scales = torch.rand(2, copies, blocks, KV_HEADS, PAGE, **options) / 32
    zeros = torch.randn(2, copies, blocks, KV_HEADS, PAGE, **options)
    one = torch.full((1,), 1 / 32, **options)

    def call(i: int, candidate: str) -> Tensor:
        given = {"k_scale": one, "v_scale": one}
        if "token" in candidate:
            given = {"k_token_scales": scales[0, i], "v_token_scales": scales[1, i]}
        if "int4" in candidate:
            given |= {"k_token_zeros": zeros[0, i], "v_token_zeros": zeros[1, i]}
        stored = CANDIDATES[candidate]
        pages = halves if "int4" in candidate else (keys, values)
        return vllm_kernels.paged_attention(
            query, *(x[i].view(stored) for x in pages), tables, lens, layout=layout,
            out=out, **given, **several,
        )  # fmt: skip

    runs = {candidate: functools.partial(call, candidate=candidate) for candidate in CANDIDATES}
    times = medians(runs, device, copies, seconds)
    for candidate in CANDIDATES:
        kind = candidate.replace(", a scale a token", "_per_token")
        total = batch * context * shape(kind.replace("e4m3", "fp8")).token_bytes
        print(
            f"{name:<13} {layout:<5} {candidate:<22} {times[candidate] * 1e6:>9.1f} "
            f"{total / 1e6:>8.1f} {total / times[candidate] * 1e-9:>6.0f} "
            f"{times[candidate] / times['e4m3']:>6.3f} "
            f"{times[candidate] / times['int8']:>6.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layout", nargs="*", default=["vllm", "HND", "NHD"])
    parser.add_argument("--cases", nargs="*", default=None)
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    print(machine(asked.device))
    print(f"{'case':<13} {'':<5} {'cache':<22} {'us':>9} {'MB':>8} {'GB/s':>6} /e4m3  /int8")
    for name in asked.cases or CASES[asked.device]:
        for layout in asked.layout:
            measure(name, layout, asked.device, asked.seconds)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
