"""Host time of a call from Python: paged_attention and flash_attn's functions beside torch.add.

    python -m benchmarks.bench_host_cost [--device cuda]

The shapes are tiny, so that no kernel takes as long as its call. The clock counts the CPU time of
this thread, and each row is the least of many short batches. The second column has
torch.set_default_device in force: then every torch function called from Python passes through a
mode.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import vllm_kernels
from vllm_kernels.compat import flash_attn as fa2
from vllm_kernels.compat import flash_attn_interface as fa3

CALLS, BATCHES = 40, 300
SEQS, HEADS, KV_HEADS, SIZE, PAGE, PAGES = 2, 2, 1, 64, 16, 4

Calls = dict[str, Callable[[], object]]


def host_us(call: Callable[[], object], device: str) -> float:
    """The least host time of a call; the device is idle at the start of each batch."""
    best = float("inf")
    for _ in range(BATCHES):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        best = min(best, (time.thread_time_ns() - start) / CALLS)
        if device != "cpu":
            torch.cuda.synchronize()
    return best / 1e3


def calls(device: str) -> Calls:
    """By row of the table; all tensors but the results are the same in every call."""

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    a, b = floats(8), floats(8)
    norm = torch.ops.vllm_kernels.rms_norm_weightless.default
    one = torch.ones(1, device=device)
    q, k = floats(SEQS, HEADS, SIZE), floats(SEQS, KV_HEADS, SIZE)
    out = torch.empty_like(q)
    q1, k1 = q[:, None], k[:, None]
    pages, value_pages = (floats(SEQS * PAGES, PAGE, KV_HEADS, SIZE) for _ in "kv")
    rows, value_rows = (x.view(SEQS, PAGES * PAGE, KV_HEADS, SIZE) for x in (pages, value_pages))
    vllm_keys = floats(SEQS * PAGES, KV_HEADS, SIZE // 8, PAGE, 8)
    vllm_values = floats(SEQS * PAGES, KV_HEADS, SIZE, PAGE)
    table = ints(list(range(SEQS * PAGES))).view(SEQS, PAGES)
    lens, starts = ints([9] * SEQS), ints(list(range(SEQS + 1)))
    paged, varlen = vllm_kernels.paged_attention, vllm_kernels.varlen_attention
    on_pages = {"cache_seqlens": lens, "causal": True}
    return {
        "torch.add": lambda: torch.add(a, b),
        "torch.empty_like": lambda: torch.empty_like(a),
        "rms_norm_weightless, the op": lambda: norm(a, b, 1e-6),
        "paged_attention_v1": lambda: vllm_kernels.paged_attention_v1(
            out,
            q,
            vllm_keys,
            vllm_values,
            KV_HEADS,
            0.1,
            table,
            lens,
            PAGE,
            64,
            None,
            "auto",
            one,
            one,
        ),
        "paged_attention": lambda: paged(q, pages, value_pages, table, lens, layout="NHD"),
        "paged_attention, out given": lambda: paged(
            q, pages, value_pages, table, lens, layout="NHD", out=out
        ),
        "varlen_attention": lambda: varlen(q, k, k, starts, starts, max_query_len=1),
        "FA2 with_kvcache, pages": lambda: fa2.flash_attn_with_kvcache(
            q1, pages, value_pages, block_table=table, **on_pages
        ),
        "FA3 with_kvcache, pages": lambda: fa3.flash_attn_with_kvcache(
            q1, pages, value_pages, page_table=table, **on_pages
        ),
        "FA2 with_kvcache, rows": lambda: fa2.flash_attn_with_kvcache(
            q1, rows, value_rows, **on_pages
        ),
        "FA2 with_kvcache, pages, k and v": lambda: fa2.flash_attn_with_kvcache(
            q1, pages, value_pages, k1, k1, block_table=table, **on_pages
        ),
        "FA3 with_kvcache, pages, k and v": lambda: fa3.flash_attn_with_kvcache(
            q1, pages, value_pages, k1, k1, page_table=table, **on_pages
        ),
        "FA2 with_kvcache, rows, k and v": lambda: fa2.flash_attn_with_kvcache(
            q1, rows, value_rows, k1, k1, **on_pages
        ),
        "FA2 varlen": lambda: fa2.flash_attn_varlen_func(q, k, k, starts, starts, 1, 1),
        "FA3 varlen": lambda: fa3.flash_attn_varlen_func(q, k, k, starts, starts, 1, 1),
        "FA2 varlen, pages": lambda: fa2.flash_attn_varlen_func(
            q, pages, value_pages, starts, starts, 1, 1, block_table=table
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    device = parser.parse_args().device
    torch.set_num_threads(1)
    rows = calls(device)
    with torch.no_grad():
        plain = {name: host_us(call, device) for name, call in rows.items()}
        torch.set_default_device(device)
        moded = {name: host_us(call, device) for name, call in rows.items()}
        torch.set_default_device(None)
    print("| call | us | / torch.add | default device, us | / torch.add |\n|---|---|---|---|---|")
    for name in rows:
        print(
            f"| {name} | {plain[name]:.1f} | {plain[name] / plain['torch.add']:.2f} "
            f"| {moded[name]:.1f} | {moded[name] / moded['torch.add']:.2f} |"
        )


if __name__ == "__main__":
    main()
