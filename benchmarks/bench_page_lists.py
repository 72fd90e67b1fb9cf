"""Attention by CSR page lists beside block tables, and pages of one token beside pages of 16.

    python -m benchmarks.bench_page_lists [--device cpu|cuda] [--batch 64] [--length 2048]
                                          [--dtype bfloat16] [--layout NHD HND vllm]
    python -m benchmarks.bench_page_lists --queries 8 --batch 32 --length 4096 --page 16

Decode steps of 32 query heads over 8 KV heads of 128, random pages, cold caches. GB/s count K, V.
With several query tokens of a sequence a third candidate has a tree mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for, machine, medians
from vllm_kernels import Layout
from vllm_kernels.kv_cache.tensors import KVShape

HEADS, KV_HEADS, SIZE = 32, 8, 128


def calls(
    asked: argparse.Namespace, layout: Layout, page: int
) -> dict[str, Callable[[int], Tensor]]:
    dtype, device = getattr(torch, asked.dtype), asked.device
    pages = -(-asked.length // page)
    blocks = asked.batch * pages
    copies = copies_for(device, 2 * blocks * page * KV_HEADS * SIZE * dtype.itemsize)
    keys, values = (
        torch.randn(copies, *shape, dtype=dtype, device=device)
        for shape in KVShape(1, KV_HEADS, SIZE, dtype, page, layout).cache_shapes(blocks)
    )
    count = asked.queries
    query = torch.randn(asked.batch * count, HEADS, SIZE, dtype=dtype, device=device)
    several = {}
    if count > 1:
        starts = torch.arange(asked.batch + 1, dtype=torch.int32, device=device) * count
        several = {"query_start_loc": starts, "max_query_len": count}
    tables = torch.randperm(blocks, device=device).int().view(asked.batch, pages)
    lens = torch.full((asked.batch,), asked.length, dtype=torch.int32, device=device)
    lists = {
        "kv_indptr": torch.arange(0, blocks + 1, pages, dtype=torch.int32, device=device),
        "kv_indices": tables.flatten(),
        "last_page_len": lens - (pages - 1) * page,
        "max_pages": pages,
    }

    def tabled(i: int) -> Tensor:
        i %= copies
        return vllm_kernels.paged_attention(
            query, keys[i], values[i], tables, lens, layout=layout, **several
        )

    def listed(i: int) -> Tensor:
        i %= copies
        return vllm_kernels.paged_attention(
            query, keys[i], values[i], layout=layout, **lists, **several
        )

    tree = torch.randint(2**31, (asked.batch * count,), dtype=torch.int32, device=device)

    def with_tree(i: int) -> Tensor:
        i %= copies
        return vllm_kernels.paged_attention(
            query, keys[i], values[i], tables, lens, layout=layout, tree_mask=tree, **several
        )

    candidates = {"tables": tabled, "lists": listed}
    return candidates | ({"tree": with_tree} if count > 1 else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    here = "cuda" if torch.cuda.is_available() and vllm_kernels.cuda_loaded else "cpu"
    parser.add_argument("--device", default=here)
    parser.add_argument("--batch", type=int, default=64 if here == "cuda" else 4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", nargs="+", default=["NHD", "HND", "vllm"])
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--page", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--seconds", type=float, default=0.5)
    asked = parser.parse_args()
    print(machine(asked.device))
    print(f"{asked.batch} x {asked.length}, {asked.dtype}")
    itemsize = getattr(torch, asked.dtype).itemsize
    size = 2 * asked.batch * asked.length * KV_HEADS * SIZE * itemsize
    for layout in asked.layout:
        for page in asked.page:
            copies = copies_for(asked.device, size)
            times = medians(calls(asked, layout, page), asked.device, copies, asked.seconds)
            columns = "  ".join(f"{who} {1e6 * time:9.1f} us" for who, time in times.items())
            rate = size / times["lists"] / 1e9
            print(f"{layout:5} pages of {page:3} {columns}  {rate:7.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
