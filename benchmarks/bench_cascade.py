"""Sequences with a common prefix: cascade_attention beside paged_attention.

    python -m benchmarks.bench_cascade [--device cuda] [--batch 64] [--common 8192] [--own 1024]

One query token a sequence; 32 query heads, 8 KV heads, head size 128, bfloat16, permuted pages of
16 tokens. Bytes: K and V as the algorithm reads them, so for paged_attention the common ones once a
sequence (which a GPU's L2 cache may serve).
"""

from __future__ import annotations

import argparse

import torch

import vllm_kernels
from benchmarks.harness import copies_for, machine, median_seconds

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--common", type=int, default=8192)
    parser.add_argument("--own", type=int, default=1024)
    arguments = parser.parse_args()
    device, batch = arguments.device, arguments.batch
    print(machine(device))
    common, own = arguments.common // PAGE, arguments.own // PAGE
    blocks = common + batch * own
    token_bytes = 2 * KV_HEADS * HEAD_SIZE * 2
    once = (arguments.common + batch * arguments.own) * token_bytes
    each = batch * (arguments.common + arguments.own) * token_bytes
    copies = copies_for(device, once)
    options = {"device": device, "dtype": torch.bfloat16}
    keys, values = torch.randn(2, copies, blocks, PAGE, KV_HEADS, HEAD_SIZE, **options)
    order = torch.randperm(blocks, device=device).int()
    tables = torch.cat(
        [order[:common].expand(batch, common), order[common:].view(batch, own)], dim=1
    ).contiguous()
    lens = torch.full((batch,), arguments.common + arguments.own, device=device).int()
    query = torch.randn(batch, HEADS, HEAD_SIZE, **options)

    def call(i: int, shared: int) -> torch.Tensor:
        return vllm_kernels.cascade_attention(
            query, keys[i], values[i], tables, lens, shared, layout="NHD"
        )

    plain, cascade = call(0, 0).double(), call(0, common).double()
    error = ((cascade - plain).norm() / plain.norm()).item()
    print(f"{batch} sequences, {arguments.common} common tokens and {arguments.own} own each")
    print(f"relative difference {error:.1e}")
    times = {}
    for name, shared, size in (("paged_attention", 0, each), ("cascade_attention", common, once)):
        seconds = median_seconds(lambda i, shared=shared: call(i, shared), device, copies)
        times[name] = seconds
        rate = size / seconds / 1e9
        print(f"{name:18} {seconds * 1e6:10.1f} us {size / 1e6:8.0f} MB {rate:7.0f} GB/s")
    print(f"{times['paged_attention'] / times['cascade_attention']:.2f} times as fast")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
