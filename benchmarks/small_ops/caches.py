"""Cache writes, gathers, the MLA cache and swaps, ours beside others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import vllm_kernels
from benchmarks import rivals
from benchmarks.harness import copies_for
from benchmarks.small_ops.common import HEAD_SIZE, KV_HEADS, PAGE, Call, Row, vllm


def new_slots(tokens: int, pages: int, device: str) -> tuple[Tensor, Tensor]:
    """Slots of single tokens, and of runs of whole pages in random order."""
    random = torch.randperm(pages * PAGE, device=device)[:tokens]
    starts = torch.randperm(pages, device=device)[: -(-tokens // PAGE)] * PAGE
    runs = (starts[:, None] + torch.arange(PAGE, device=device)).flatten()[:tokens].contiguous()
    return random, runs


def cache_writes(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    """One token a sequence (random slots), and a prompt (runs of whole pages in random order)."""
    size = tokens * KV_HEADS * HEAD_SIZE * dtype.itemsize
    copies = copies_for(device, 4 * size)
    shape = (copies, tokens, KV_HEADS, HEAD_SIZE)
    key, value = torch.randn(2, *shape, device=device, dtype=dtype)
    pages = 2 * tokens
    nhd = torch.zeros(2, pages, PAGE, KV_HEADS, HEAD_SIZE, device=device, dtype=dtype)
    x = 16 // dtype.itemsize
    keys = nhd[0].view(pages, KV_HEADS, HEAD_SIZE // x, PAGE, x)
    values = nhd[1].view(pages, KV_HEADS, HEAD_SIZE, PAGE)
    one = torch.ones(1, device=device)
    random, runs = new_slots(tokens, pages, device)

    def candidates(name: str, caches: tuple[Tensor, Tensor], slots: Tensor) -> dict[str, Call]:
        vllm = rivals.vllm_ops if device == "cuda" else None
        libraries = {"ours": vllm_kernels} | ({"vllm": vllm} if vllm else {})
        writers = {library: getattr(ops, name) for library, ops in libraries.items()}
        return {
            library: lambda i, op=op: op(key[i], value[i], *caches, slots, "auto", one, one)
            for library, op in writers.items()
        }

    flash = candidates("reshape_and_cache_flash", (nhd[0], nhd[1]), random)
    hnd = torch.zeros(2, pages, KV_HEADS, PAGE, HEAD_SIZE, device=device, dtype=dtype)
    through_view = candidates("reshape_and_cache_flash", tuple(hnd.transpose(2, 3)), random)
    return [
        ("cache write HND (a view)", 4 * size, copies, through_view),
        ("cache write NHD", 4 * size, copies, flash),
        ("cache write vllm, tokens", 4 * size, copies,
         candidates("reshape_and_cache", (keys, values), random)),
        ("cache write vllm, pages", 4 * size, copies,
         candidates("reshape_and_cache", (keys, values), runs)),
    ]  # fmt: skip


def eight_bit_writes(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Writes that quantise, single tokens (random slots) and runs of whole pages. Reads and writes
    count, scales do not."""
    elements = tokens * KV_HEADS * HEAD_SIZE
    size = 2 * elements * (dtype.itemsize + 1)
    copies = copies_for(device, size)
    key, value = torch.randn(2, copies, tokens, KV_HEADS, HEAD_SIZE, device=device, dtype=dtype)
    pages = 2 * tokens
    nhd = torch.zeros(2, pages, PAGE, KV_HEADS, HEAD_SIZE, device=device, dtype=torch.int8)
    keys = nhd[0].view(pages, KV_HEADS, HEAD_SIZE // 16, PAGE, 16)
    values = nhd[1].view(pages, KV_HEADS, HEAD_SIZE, PAGE)
    scales = torch.zeros(2, pages, KV_HEADS, PAGE, device=device)
    one, by_head = torch.ones(1, device=device), torch.ones(KV_HEADS, device=device)
    random, runs = new_slots(tokens, pages, device)

    def plain(op: str, caches, slots: Tensor, name: str, scale: Tensor) -> dict[str, Call]:
        write = getattr(vllm_kernels, op)
        typed = tuple(c.view(torch.int8 if name == "int8" else torch.uint8) for c in caches)
        calls: dict[str, Call] = {
            "ours": lambda i: write(key[i], value[i], *typed, slots, name, scale, scale)
        }
        if vllm and device == "cuda" and name != "int8" and scale is one:
            theirs = getattr(vllm, op)
            calls["vllm"] = lambda i: theirs(key[i], value[i], *typed, slots, name, scale, scale)
        return calls

    def by_token(caches, slots: Tensor, layout: str) -> dict[str, Call]:
        write = vllm_kernels.reshape_and_cache_per_token_quant
        return {
            "ours": lambda i: write(key[i], value[i], *caches, scales[0], scales[1], slots, layout)
        }

    flash, rows, x = "reshape_and_cache_flash", (nhd[0], nhd[1]), (keys, values)
    calls = {
        "write NHD fp8": plain(flash, rows, random, "fp8", one),
        "write NHD fp8, head scales": plain(flash, rows, random, "fp8", by_head),
        "write NHD int8": plain(flash, rows, random, "int8", one),
        "write vllm int8, tokens": plain("reshape_and_cache", x, random, "int8", by_head),
        "write vllm int8, pages": plain("reshape_and_cache", x, runs, "int8", by_head),
        "per token NHD": by_token(rows, random, "NHD"),
        "per token vllm, tokens": by_token(x, random, "vllm"),
        "per token vllm, pages": by_token(x, runs, "vllm"),
    }
    return [(name, size, copies, call) for name, call in calls.items()]


def gathers(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    """16 sequences' pages in random order into rows; eager is an index of the cache's rows."""
    sequences = min(16, tokens)
    ends = torch.linspace(0, tokens, sequences + 1).int()
    longest = int(ends.diff().max())
    blocks_per_seq = -(-longest // PAGE)
    pages = sequences * blocks_per_seq
    table = torch.randperm(pages, device=device).view(sequences, blocks_per_seq).int()
    cu = ends.to(device)
    seqs = torch.arange(sequences).repeat_interleave(ends.diff()).int().to(device)
    place = torch.arange(tokens, device=device) - cu[seqs.long()]
    block, within = table[seqs.long(), place // PAGE].long(), place % PAGE
    one = torch.ones(1, device=device)
    elements = tokens * KV_HEADS * HEAD_SIZE
    size = 4 * elements * dtype.itemsize
    copies = min(copies_for(device, size), 1024)  # few tokens: far more pages than are read
    nhd = torch.randn(copies, 2, pages, PAGE, KV_HEADS, HEAD_SIZE, device=device).to(dtype)
    out = torch.empty(copies, 2, tokens, KV_HEADS, HEAD_SIZE, device=device, dtype=dtype)
    x = 16 // dtype.itemsize
    paged = (pages, KV_HEADS)
    gather = vllm_kernels.gather_paged_kv

    def kv(layout: str, caches: Callable[[int], tuple[Tensor, Tensor]]) -> dict[str, Call]:
        return {"ours": lambda i: gather(*out[i], *caches(i), table, cu, layout=layout)}

    def vllm_pages(i: int) -> tuple[Tensor, Tensor]:
        keys = nhd[i, 0].view(*paged, HEAD_SIZE // x, PAGE, x)
        return keys, nhd[i, 1].view(*paged, HEAD_SIZE, PAGE)

    contiguous = kv("NHD", lambda i: (nhd[i, 0], nhd[i, 1]))
    contiguous["eager"] = lambda i: [nhd[i, part][block, within] for part in range(2)]
    eight = nhd.view(torch.int8)[..., :HEAD_SIZE].contiguous()
    eight_size = 2 * elements * (dtype.itemsize + 1)

    def from_int8(i: int) -> None:
        gather(*out[i], *eight[i], table, cu, k_scale=one, v_scale=one, layout="NHD")

    entry = 576
    mla = torch.randn(copies, pages, PAGE, entry, device=device).to(dtype)
    rows = torch.empty(copies, tokens, entry, device=device, dtype=dtype)
    entries: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.cp_gather_cache(mla[i], rows[i], table, cu, sequences),
        "eager": lambda i: mla[i][block, within],
    }
    fp8 = torch.zeros(copies, pages, PAGE, entry, device=device, dtype=torch.uint8)
    dequantised: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.gather_and_maybe_dequant_cache(
            fp8[i], rows[i], table, cu, seqs, tokens, "fp8", one
        )
    }
    if vllm and device == "cuda" and hasattr(vllm, "cp_gather_cache"):
        entries["vllm"] = lambda i: vllm.cp_gather_cache(mla[i], rows[i], table, cu, sequences)
    return [
        ("gather_paged_kv NHD", size, copies, contiguous),
        ("gather_paged_kv vllm", size, copies, kv("vllm", vllm_pages)),
        ("gather_paged_kv NHD int8", eight_size, copies, {"ours": from_int8}),
        ("cp_gather_cache 576", 2 * tokens * entry * dtype.itemsize, copies, entries),
        ("gather_and_dequant 576", tokens * entry * (dtype.itemsize + 1), copies, dequantised),
    ]


def mla(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Single tokens into the cache of latent attention, and the gather of its fp8 entries."""
    size = tokens * 576 * dtype.itemsize
    copies = min(copies_for(device, 2 * size), 4096)
    packed = torch.randn(copies, tokens, 576, device=device, dtype=dtype)
    kv_c, k_pe = packed[..., :512].contiguous(), packed[..., 512:].contiguous()
    blocks = -(-2 * tokens // 64)
    caches = {
        "auto": torch.zeros(blocks, 64, 576, device=device, dtype=dtype),
        "fp8": torch.zeros(blocks, 64, 576, device=device, dtype=torch.uint8),
        "fp8_ds_mla": torch.zeros(blocks, 64, 656, device=device, dtype=torch.uint8),
    }
    slots = torch.randperm(blocks * 64, device=device)[:tokens]
    one = torch.ones(1, device=device)

    def write(name: str) -> Row:
        libraries = {"ours": vllm_kernels} | ({"vllm": vllm} if vllm and device == "cuda" else {})
        if name == "fp8_ds_mla" and dtype != torch.bfloat16:
            libraries.pop("vllm", None)
        cache = caches[name]
        calls: dict[str, Call] = {
            library: lambda i, op=ops.concat_and_cache_mla: op(
                kv_c[i], k_pe[i], cache, slots, name, one
            )
            for library, ops in libraries.items()
        }
        entry = cache.size(-1) * cache.element_size()
        return f"concat_and_cache_mla {name[:6]}", size + tokens * entry, copies, calls

    sources = torch.zeros(copies, blocks, 64, 656, device=device, dtype=torch.uint8)
    table = torch.randperm(blocks, device=device)[None].int()
    rows = torch.empty(copies, tokens, 576, device=device, dtype=dtype)
    length = torch.tensor([tokens], dtype=torch.int32, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    upconvert: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(
            sources[i], rows[i], table, length, start, 1
        )
    }
    return [
        *(write(name) for name in caches),
        ("upconvert fp8_ds_mla", tokens * 656 + size, copies, upconvert),
    ]


def swapped_pages(tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pages on the GPU and in pinned memory, and pairs of them in random order."""
    pages = max(tokens // PAGE, 4)
    shape = (pages, PAGE, KV_HEADS, HEAD_SIZE)
    gpu = torch.zeros(shape, device=device, dtype=dtype)
    host = torch.zeros(shape, dtype=dtype).pin_memory()
    order = torch.randperm(pages)
    return gpu, host, torch.stack([order, order.roll(1)], 1)


def swaps(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Pages in random order between the GPU and pinned memory. One by one, as in a graph (where a
    batch cannot be); `swap_blocks_rates` times the batched copy."""
    if device == "cpu":
        return []
    gpu, host, pairs = swapped_pages(tokens, dtype, device)
    size = 2 * gpu.numel() * gpu.element_size()
    return [
        ("swap_blocks out, captured", size, 1,
         {"ours": lambda i: vllm_kernels.swap_blocks(gpu, host, pairs)}),
        ("swap_blocks in, captured", size, 1,
         {"ours": lambda i: vllm_kernels.swap_blocks(host, gpu, pairs)}),
    ]  # fmt: skip


def swap_blocks_rates(tokens: int, dtype: torch.dtype) -> None:
    """Wall time until a side stream is done (batched) and the default stream (one by one), and the
    time that the call itself takes the CPU."""
    gpu, host, pairs = swapped_pages(tokens, dtype, "cuda")
    size = gpu.numel() * gpu.element_size()
    streams = {"batched": torch.cuda.Stream(), "one by one": torch.cuda.default_stream()}
    for direction, (source, target) in {"out": (gpu, host), "in": (host, gpu)}.items():
        for name, stream in streams.items():
            calls, totals = [], []
            for _ in range(20):
                torch.cuda.synchronize()
                began = time.perf_counter()
                with torch.cuda.stream(stream):
                    vllm_kernels.swap_blocks(source, target, pairs)
                calls.append(time.perf_counter() - began)
                stream.synchronize()
                totals.append(time.perf_counter() - began)
            call, total = statistics.median(calls), statistics.median(totals)
            print(
                f"{tokens:>6} {str(dtype)[6:]:<9} {f'swap_blocks {direction}, {name}':<26} "
                f"ours {total * 1e6:>9.2f} us {size / total * 1e-9:>6.1f} GB/s one way, "
                f"the call {call * 1e6:.1f} us for {len(gpu)} pages",
                flush=True,
            )
