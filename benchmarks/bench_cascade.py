"""Sequences with a common prefix: cascade_attention beside paged_attention.

    python -m benchmarks.bench_cascade [--device cuda] [--batch 64] [--common 8192] [--own 1024]
                                       [--layout NHD]

One query token a sequence; 32 query heads, 8 KV heads, head size 128, bfloat16, permuted pages of
16 tokens; every combination of the lists. `planned`: cascade_attention with the plan made before,
as in all layers of a pass but the first. Bytes: K and V as the algorithm reads them, so for
paged_attention the common ones once a sequence (which a GPU's L2 cache may serve). `pays`: what
cascade_pays says.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for, machine, medians
from vllm_kernels.kv_cache.tensors import KVShape

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16


def measure(device: str, layout: str, batch: int, common_tokens: int, own_tokens: int) -> None:
    shape = KVShape(1, KV_HEADS, HEAD_SIZE, torch.bfloat16, PAGE, layout)
    common, own = common_tokens // PAGE, own_tokens // PAGE
    blocks = common + batch * own
    once = blocks * shape.block_bytes
    each = batch * (common + own) * shape.block_bytes
    copies = copies_for(device, once)
    options = {"device": device, "dtype": torch.bfloat16}
    keys, values = (torch.randn(copies, *s, **options) for s in shape.cache_shapes(blocks))
    order = torch.randperm(blocks, device=device).int()
    tables = torch.cat(
        [order[:common].expand(batch, common), order[common:].view(batch, own)], dim=1
    ).contiguous()
    lens = torch.full((batch,), common_tokens + own_tokens, device=device).int()
    query = torch.randn(batch, HEADS, HEAD_SIZE, **options)
    plan = vllm_kernels.cascade_plan(
        tables, lens, common, block_size=PAGE, num_heads=HEADS, num_kv_heads=KV_HEADS
    )

    def call(i: int, shared: int | vllm_kernels.CascadePlan) -> Tensor:
        return vllm_kernels.cascade_attention(
            query, keys[i], values[i], tables, lens, shared, layout=layout
        )

    plain = call(0, 0).double()
    error = ((call(0, plan).double() - plain).norm() / plain.norm()).item()
    ways = {"paged_attention": 0, "cascade_attention": common, "planned": plan}
    calls = {name: lambda i, shared=shared: call(i, shared) for name, shared in ways.items()}
    times = medians(calls, device, copies)
    pays = vllm_kernels.cascade_pays(batch, common_tokens, shape.token_bytes, query.device)
    cells = [f"{batch} x ({common_tokens} + {own_tokens})", layout, str(plan.num_splits)]
    cells += [f"{seconds * 1e6:.1f}" for seconds in times.values()]
    cells += [f"{times['paged_attention'] / times['planned']:.2f}", "yes" if pays else "no"]
    rates = (each / times["paged_attention"], once / times["planned"])
    cells += [f"{rate / 1e9:.0f}" for rate in rates]
    print(f"| {' | '.join(cells)} | {error:.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--common", type=int, nargs="+", default=[8192])
    parser.add_argument("--own", type=int, nargs="+", default=[1024])
    parser.add_argument("--layout", nargs="+", default=["NHD"])
    arguments = parser.parse_args()
    print(machine(arguments.device))
    head = ["sequences x (common + own)", "layout", "splits", "paged_attention, us"]
    head += ["cascade_attention, us", "planned, us", "times as fast", "pays"]
    head += ["paged_attention, GB/s", "planned, GB/s", "relative difference"]
    print(f"| {' | '.join(head)} |")
    print("| --- " * len(head) + "|")
    shapes = product(arguments.batch, arguments.common, arguments.own)
    for layout, sizes in product(arguments.layout, shapes):
        measure(arguments.device, layout, *sizes)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
