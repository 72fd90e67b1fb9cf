"""Host time of a call from Python: paged_attention and flash_attn's functions beside torch.add.

    python -m benchmarks.bench_host_cost [--device cuda] [--breakdown]

The shapes are tiny, so that no kernel takes as long as its call. The clock counts the CPU time of
this thread, and each row is the least of many short batches. The second column has
torch.set_default_device in force: then every torch function called from Python passes through a
mode.

--breakdown adds two tables: what the ops cost without their Python functions, with one cache and
with many in turn; and what a call does by torch.profiler: torch's ops, launches, other CUDA calls.
More caches than a thread remembers tensor maps of (512 maps) cost the encoding of two maps each.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import vllm_kernels
from vllm_kernels.compat import flash_attn as fa2
from vllm_kernels.compat import flash_attn_interface as fa3
from vllm_kernels.ops._common import entry_points

CALLS, BATCHES = 40, 300
SEQS, HEADS, KV_HEADS, SIZE, PAGE, PAGES = 2, 2, 1, 64, 16, 4
LAYERS, MANY = 28, 1024  # caches in turn
PROFILED = 10  # calls

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


def ops(device: str) -> Calls:
    """The ops alone, by position as the Python functions call them."""
    query = torch.randn(SEQS, HEADS, SIZE, dtype=torch.bfloat16, device=device)
    token = torch.randn(SEQS, KV_HEADS, SIZE, dtype=torch.bfloat16, device=device)
    shape = MANY, SEQS * PAGES, PAGE, KV_HEADS, SIZE
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in "kv")
    caches = list(zip(keys, values, strict=True))
    table = torch.arange(SEQS * PAGES, dtype=torch.int32, device=device).view(SEQS, PAGES)
    lens = torch.full((SEQS,), 9, dtype=torch.int32, device=device)
    starts = torch.arange(SEQS + 1, dtype=torch.int32, device=device)
    (_, decode), (_, kvcache), (_, varlen) = (
        entry_points("paged_attention", "result"),
        entry_points("attention_with_kvcache"),
        entry_points("varlen_attention", "result"),
    )
    rows, new = query[:, None], token[:, None]
    nobody = query[:0], *caches[0], table[:0], lens[:0]

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return decode(query, key, value, table, lens, None, "NHD", 0, 0.0)

    def attend_to(number: int) -> Callable[[], object]:
        turns = itertools.cycle(caches[:number])
        return lambda: attend(*next(turns))

    def append(key: Tensor | None) -> Tensor:
        return kvcache(rows, *caches[0], lens, table, key, key, None, 0, None, 0, 0)

    return {
        "paged_attention.result": lambda: attend(*caches[0]),
        "the same, no sequences: no launch": lambda: decode(*nobody, None, "NHD", 0, 0.0),
        f"the same, {LAYERS} caches in turn": attend_to(LAYERS),
        f"the same, {MANY} caches in turn": attend_to(MANY),
        "attention_with_kvcache": lambda: append(None),
        "attention_with_kvcache, k and v": lambda: append(new),
        "attention_with_kvcache, cumulative lengths": lambda: kvcache(
            query, *caches[0], starts, table, None, None, starts, 1, None, 0, 0, 0.0, None, True
        ),
        "varlen_attention.result": lambda: varlen(query, token, token, starts, starts, 1),
    }


def done_by(call: Callable[[], object], device: str) -> tuple[Counter[str], Counter[str]]:
    """torch's ops and CUDA's functions that some calls use, by torch.profiler."""
    call()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device != "cpu")
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            call()
    names = Counter(event.name for event in profiler.events() if event.device_type.name == "CPU")
    torch_ops = Counter({name: count for name, count in names.items() if "::" in name})
    cuda = Counter({name: count for name, count in names.items() if name.startswith("cu")})
    del cuda["cudaDeviceSynchronize"]  # the profiler's
    return torch_ops, cuda


def print_breakdown(device: str, rows: Calls) -> None:
    alone = ops(device)
    print("\n| op alone | us |\n|---|---|")
    for name, call in alone.items():
        print(f"| {name} | {host_us(call, device):.2f} |")
    print("\n| call | torch's ops | CUDA calls |\n|---|---|---|")
    for name, call in {**rows, **alone}.items():
        texts = (
            ", ".join(f"{count / PROFILED:g} {one}" for one, count in counter.items())
            for counter in done_by(call, device)
        )
        print(f"| {name} | {' | '.join(texts)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--breakdown", action="store_true")
    arguments = parser.parse_args()
    device = arguments.device
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
    if arguments.breakdown:
        with torch.no_grad():
            print_breakdown(device, rows)


if __name__ == "__main__":
    main()
