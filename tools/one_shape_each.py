"""Calls every op once on the GPU, one shape per kernel: what compute-sanitizer watches.

With names of dtypes as arguments: for those only. With names of the functions below: those only.
"""

from __future__ import annotations

import itertools
import sys

import torch

import vllm_kernels
from vllm_kernels.kv_cache.tensors import KVCache, KVShape

torch.manual_seed(0)
CUDA = torch.device("cuda")
ASKED = set(sys.argv[1:])
NAMES = {"float16", "bfloat16", "float32"}
DTYPES = [getattr(torch, name) for name in sorted(ASKED & NAMES or NAMES)]


def norms() -> None:
    for dtype in DTYPES:
        for rows, hidden in ((3, 7), (3, 64), (3, 4096), (133, 8192), (3, 16384), (3, 32768)):
            x = torch.randn(rows, hidden, device=CUDA, dtype=dtype)
            weight = torch.randn(hidden, device=CUDA, dtype=dtype)
            vllm_kernels.rms_norm(torch.empty_like(x), x, weight, 1e-6)
            vllm_kernels.fused_add_rms_norm(x, torch.randn_like(x), weight, 1e-6)
            other_norms(x, weight)


def other_norms(x: torch.Tensor, weight: torch.Tensor) -> None:
    residual, hidden = torch.randn_like(x), x.size(-1)
    vllm_kernels.rms_norm_weightless(torch.empty_like(x), x, 1e-6)
    vllm_kernels.gemma_rms_norm(torch.empty_like(x), x, weight, 1e-6)
    vllm_kernels.fused_add_rms_norm_weightless(x, residual, 1e-6)
    vllm_kernels.gemma_fused_add_rms_norm(x, residual, weight, 1e-6)
    one = torch.ones(1, device=CUDA)
    fp8 = torch.empty(x.shape, device=CUDA, dtype=torch.float8_e4m3fn)
    vllm_kernels.rms_norm_static_fp8_quant(fp8, x, weight, one, 1e-6)
    vllm_kernels.fused_add_rms_norm_static_fp8_quant(fp8, x, residual, weight, one, 1e-6)
    for out in (fp8, fp8.view(torch.int8)):
        bound = one if out is fp8 else None
        scales = torch.empty(len(x), 1, device=CUDA)
        vllm_kernels.rms_norm_dynamic_per_token_quant(out, x, weight, scales, 1e-6, bound, residual)
        for group in (64, 128):
            if hidden % group == 0:
                scales = torch.empty(hidden // group, len(x), device=CUDA).t()
                vllm_kernels.rms_norm_per_block_quant(
                    out, x, weight, scales, 1e-6, bound, residual, group, True
                )


def rotary_and_activations() -> None:
    positions = torch.randint(0, 32, (5,), device=CUDA)
    for dtype in DTYPES:
        for head_size, rot_dim in ((64, 64), (80, 32), (128, 128), (36, 18)):
            cache = torch.randn(32, rot_dim, device=CUDA, dtype=dtype)
            for is_neox in (True, False):
                query = torch.randn(5, 4, head_size, device=CUDA, dtype=dtype)
                key = torch.randn(5, 2, head_size, device=CUDA, dtype=dtype)
                vllm_kernels.rotary_embedding(positions, query, key, head_size, cache, is_neox)
                vllm_kernels.rotary_embedding(positions, query, None, head_size, cache, is_neox)
                vllm_kernels.batched_rotary_embedding(
                    positions // 2, query, key, head_size, cache, is_neox, rot_dim, positions // 2
                )
        for width in (7, 64, 1000):
            x = torch.randn(3, 2 * width, device=CUDA, dtype=dtype)
            out = torch.empty(3, width, device=CUDA, dtype=dtype)
            for name in ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul"):
                getattr(vllm_kernels, name)(out, x)
            for name in ("gelu_new", "gelu_fast", "gelu_quick"):
                getattr(vllm_kernels, name)(torch.empty_like(x), x)
            vllm_kernels.silu_and_mul_split(out, x[:, :width], x[:, width:])
            vllm_kernels.fatrelu_and_mul(out, x, 0.1)
            vllm_kernels.silu_and_mul_with_clamp(out, x, 1.0)
            vllm_kernels.swigluoai_and_mul(out, x)
        for width in (7, 256):
            x = torch.randn(3, 2 * width, device=CUDA, dtype=dtype)
            fp8 = torch.empty(3, width, device=CUDA, dtype=torch.float8_e4m3fn)
            vllm_kernels.silu_and_mul_quant(fp8, x, torch.ones(1, device=CUDA))
            for group in (64, 128) if width == 256 else ():
                scales = torch.empty(3, width // group, device=CUDA)
                vllm_kernels.silu_and_mul_per_block_quant(fp8, x, scales, group)
                vllm_kernels.silu_and_mul_per_block_quant(fp8.view(torch.int8), x, scales, group)


def scaled_quant() -> None:
    """Scales of the tensor and of rows: few and many, short and long, aligned and not."""
    one, azp = torch.ones(1, device=CUDA), torch.ones(1, device=CUDA, dtype=torch.int32)
    for dtype in DTYPES:
        for rows, width in ((3, 7), (3, 64), (3, 4096), (700, 8192), (3, 40_000), (3, 77)):
            x = torch.randn(rows, width, device=CUDA, dtype=dtype)
            for by_row in (False, True):
                vllm_kernels.scaled_fp8_quant(x, scale_ub=one, use_per_token_if_dynamic=by_row)
                vllm_kernels.scaled_int8_quant(x, symmetric=by_row)
            vllm_kernels.scaled_fp8_quant(x, one)
            vllm_kernels.scaled_int8_quant(x, one)
            vllm_kernels.scaled_int8_quant(x, one, azp, False)


def fused_rope() -> None:
    """rope_and_cache and fused_qk_norm_rope: few and many tokens, packs and single elements."""
    for dtype in DTYPES:
        for stored in (dtype, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            shapes = ((5, 128, 128), (100, 128, 128), (1100, 128, 64), (700, 128, 128), (7, 48, 18))
            for tokens, size, rotary in shapes:
                x = 16 // stored.itemsize
                cos_sin = torch.randn(32, rotary, device=CUDA, dtype=dtype)
                positions = torch.randint(0, 32, (tokens,), device=CUDA)
                qkv = torch.randn(tokens, 12, size, device=CUDA, dtype=dtype)
                weight = torch.randn(size, device=CUDA, dtype=dtype)
                rows = torch.zeros(80, 16, 4, size, device=CUDA).to(stored)
                vllm = rows.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
                for layout, key, value in (
                    ("NHD", rows, rows.clone()),
                    ("vllm", vllm, rows.permute(0, 2, 3, 1).contiguous()),
                ):
                    scattered = torch.randperm(1280, device=CUDA)[:tokens]
                    runs = torch.arange(tokens, device=CUDA)
                    heads = (qkv[:, :4], qkv[:, 4:8], qkv[:, 8:])
                    is_neox = (layout == "NHD") == (tokens < 700)
                    for norm, slots in ((weight, scattered), (None, scattered), (None, runs)):
                        vllm_kernels.rope_and_cache(
                            positions, *heads, cos_sin, is_neox, key, value, slots, layout,
                            q_weight=norm, k_weight=norm,
                        )  # fmt: skip
            vllm_kernels.fused_qk_norm_rope(
                qkv.flatten(1), 4, 4, 4, size, 1e-6, weight, weight, cos_sin, True, positions
            )


def cache() -> None:
    one = torch.ones(1, device=CUDA)
    for dtype in DTYPES:
        for cache_dtype in ("auto", "fp8_e4m3", "fp8_e5m2", "int8"):
            size = dtype.itemsize if cache_dtype == "auto" else 1
            stored = dtype if cache_dtype == "auto" else torch.uint8
            for heads, head_size, block_size in ((2, 64, 16), (3, 128, 8), (1, 48, 32)):
                x = 16 // size
                key, value = torch.randn(2, 40, heads, head_size, device=CUDA, dtype=dtype)
                runs = torch.arange(40, device=CUDA)
                single = torch.randperm(8 * block_size, device=CUDA)[:40]
                shapes = [
                    (8, heads, head_size // x, block_size, x),
                    (8, heads, head_size, block_size),
                ]
                vllm = [torch.zeros(shape, device=CUDA, dtype=stored) for shape in shapes]
                flash = torch.zeros(2, 8, block_size, heads, head_size, device=CUDA, dtype=stored)
                repeated = torch.randint(-1, 30, (40,), device=CUDA)
                by_head = torch.rand(heads, device=CUDA) + 0.1
                for slots, scale in ((runs, one), (single, by_head), (repeated, one)):
                    arguments = (slots, cache_dtype, scale, scale)
                    vllm_kernels.reshape_and_cache(key, value, *vllm, *arguments)
                    vllm_kernels.reshape_and_cache_flash(key, value, flash[0], flash[1], *arguments)
                pairs = torch.tensor([[0, 3], [1, 4]], device=CUDA)
                vllm_kernels.copy_blocks(vllm[:1], vllm[1:], pairs)
                vllm_kernels.swap_blocks(
                    vllm[0], torch.zeros_like(vllm[0], device="cpu"), pairs.cpu()
                )
                lists = (vllm[0].data_ptr(), flash.data_ptr(), vllm[0][:1].nbytes)
                vllm_kernels.swap_blocks_batch(*(torch.tensor([number]) for number in lists))
            many_tokens(dtype, cache_dtype)
        for scale in (1.0, 0.5):
            wide = torch.randn(3, 77, device=CUDA, dtype=dtype)
            narrow = torch.empty(3, 77, device=CUDA, dtype=torch.uint8)
            vllm_kernels.convert_fp8(narrow, wide, scale, "fp8")
            vllm_kernels.convert_fp8(wide, narrow, scale, "fp8")
        parts = torch.randn(2, 5, 4, 64, device=CUDA, dtype=dtype)
        lse = torch.randn(3, 4, 5, device=CUDA)
        merged = torch.empty_like(parts[0])
        vllm_kernels.merge_attn_states(merged, parts[0], lse[0], parts[1], lse[1], lse[2])
        vllm_kernels.combine_attn_partials(merged, parts, lse[:2].view(2, 5, 4), lse[2].view(5, 4))


def many_tokens(dtype: torch.dtype, cache_dtype: str) -> None:
    """The cache writers' kernels for more tokens than a decode step has; narrow and wide rows."""
    one = torch.ones(1, device=CUDA)
    size = dtype.itemsize if cache_dtype == "auto" else 1
    stored = dtype if cache_dtype == "auto" else torch.uint8
    x = 16 // size
    for heads, head_size, block_size in ((8, 128, 16), (1, 32, 8), (16, 256, 32)):
        tokens, blocks = 1100, 1200 // block_size
        key, value = torch.randn(2, tokens, heads, head_size, device=CUDA, dtype=dtype)
        keys = torch.zeros(blocks, heads, head_size // x, block_size, x, device=CUDA, dtype=stored)
        values = torch.zeros(blocks, heads, head_size, block_size, device=CUDA, dtype=stored)
        flash = torch.zeros(2, blocks, block_size, heads, head_size, device=CUDA, dtype=stored)
        order = torch.randperm(blocks * block_size, device=CUDA)[:tokens]
        for slots in (torch.arange(tokens, device=CUDA), order, order // 2):
            arguments = (slots, cache_dtype, one, one)
            vllm_kernels.reshape_and_cache(key, value, keys, values, *arguments)
            vllm_kernels.reshape_and_cache_flash(key, value, flash[0], flash[1], *arguments)


def per_token_quant() -> None:
    """reshape_and_cache_per_token_quant: few and many tokens, every layout, any alignment."""
    for dtype in DTYPES:
        for heads, head_size, block_size in ((2, 64, 16), (3, 128, 8), (1, 16, 32), (2, 40, 16)):
            for tokens in (40, 150):
                blocks = 160 // block_size
                key, value = torch.randn(2, tokens, heads, head_size, device=CUDA, dtype=dtype)
                scales = torch.zeros(2, blocks, heads, block_size, device=CUDA)
                rows = torch.zeros(
                    2, blocks, block_size, heads, head_size, device=CUDA, dtype=torch.int8
                )
                by_layout = {"NHD": rows, "HND": rows.transpose(2, 3).contiguous()}
                if head_size % 16 == 0:
                    by_layout["vllm"] = (
                        rows[0].unflatten(-1, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous(),
                        rows[1].permute(0, 2, 3, 1).contiguous(),
                    )
                runs = torch.arange(tokens, device=CUDA)
                for layout, (keys, values) in by_layout.items():
                    for slots in (runs, runs.flip(0), runs // 2):
                        vllm_kernels.reshape_and_cache_per_token_quant(
                            key, value, keys, values, scales[0], scales[1], slots, layout
                        )


def int4_caches() -> None:
    """int4 with a scale and a zero a token: the writer, the gather, and attention of one, several
    and many query tokens."""
    for dtype, head_size, block_size, layout in itertools.product(
        DTYPES, (64, 96, 128, 192, 256), (8, 16, 32), ("vllm", "NHD", "HND")
    ):
        shape = KVShape(1, 2, head_size, dtype, block_size, layout, "int4_per_token")
        cache = KVCache(shape, 480 // block_size, device=CUDA)
        key, value = torch.randn(2, 450, 2, head_size, device=CUDA, dtype=dtype)
        tables = torch.arange(cache.num_blocks, device=CUDA, dtype=torch.int32)[None]
        for length in (1, 40, 450):
            cache.write(0, key[:length], value[:length], torch.arange(length, device=CUDA))
            lens = torch.tensor([length], dtype=torch.int32, device=CUDA)
            for queries in (1, 9, 330):
                query = torch.randn(min(queries, length), 8, head_size, device=CUDA, dtype=dtype)
                starts = torch.tensor([0, len(query)], dtype=torch.int32, device=CUDA)
                out = cache.attend(0, query, tables, lens, query_start_loc=starts)
                assert out.isfinite().all()
            vllm_kernels.gather_paged_kv(
                key, value, cache.key_caches[0], cache.value_caches[0], tables, starts,
                k_scale=cache.key_scales[0], v_scale=cache.value_scales[0], layout=layout,
                k_zero=cache.key_zeros[0], v_zero=cache.value_zeros[0],
            )  # fmt: skip


def gathers() -> None:
    """cp_gather_cache, gather_and_maybe_dequant_cache, gather_paged_kv: vectors and elements."""
    table = torch.randperm(12, device=CUDA)[:9].view(3, 3).int()
    cu = torch.tensor([0, 40, 40, 73], dtype=torch.int32, device=CUDA)
    starts = torch.tensor([5, 0, 3], dtype=torch.int32, device=CUDA)
    seqs = torch.arange(3, device=CUDA).repeat_interleave(cu.diff(), output_size=73).int()
    one = torch.ones(1, device=CUDA)
    for entry in (576, 7):
        source = torch.randint(0, 100, (12, 16, entry), device=CUDA, dtype=torch.uint8)
        rows = torch.zeros(75, entry, device=CUDA, dtype=torch.uint8)
        vllm_kernels.cp_gather_cache(source, rows, table, cu, 3, starts)
        vllm_kernels.gather_cache(source, rows, table, cu, 3, starts)
    for dtype in DTYPES:
        for stored in (dtype, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            names = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}
            for entry in (576, 7):
                source = torch.randn(12, 16, entry, device=CUDA).to(stored)
                rows = torch.zeros(75, entry, device=CUDA, dtype=dtype)
                vllm_kernels.gather_and_maybe_dequant_cache(
                    source, rows, table, cu, seqs, 73, names.get(stored, "auto"), one, starts
                )
            x = 16 // stored.itemsize
            for head_size, unaligned in ((128, 0), (48, 1)):
                pages = torch.randn(12, 16, 2, head_size, device=CUDA).to(stored)
                by_layout = {
                    "NHD": (pages, pages),
                    "HND": (pages.transpose(1, 2).contiguous(),) * 2,
                    "vllm": (
                        pages.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(),
                        pages.permute(0, 2, 3, 1).contiguous(),
                    ),
                }
                out = torch.zeros(2, 75, 2, head_size + unaligned, device=CUDA, dtype=dtype)
                key, value = out[..., unaligned:]
                scales = (
                    [None, None] if stored == dtype else [torch.rand(12, 2, 16, device=CUDA)] * 2
                )
                for layout, (keys, values) in by_layout.items():
                    vllm_kernels.gather_paged_kv(
                        key, value, keys, values, table, cu, seq_starts=starts,
                        k_scale=scales[0], v_scale=scales[1], layout=layout,
                    )  # fmt: skip


def pages() -> None:
    """page_bounds_update, select_pages, copy_slots: accesses of 16 bytes and of elements."""
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    one = torch.ones(1, device=CUDA)
    few, many = (torch.randint(-1, 640, (count,), device=CUDA) for count in (9, 1100))
    moves = torch.randperm(640, device=CUDA)
    for dtype in DTYPES:
        for stored in (dtype, *eight_bits):
            x = 16 // stored.itemsize
            for head_size in (64, 7):
                rows = torch.randn(40, 16, 2, head_size, device=CUDA).to(stored)
                by_layout = {"NHD": [rows], "HND": [rows.transpose(1, 2).contiguous()]}
                if head_size == 64:
                    by_layout["vllm"] = [
                        rows.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(),
                        rows.permute(0, 2, 3, 1).contiguous(),
                    ]
                bounds = torch.zeros(40, 2, 2, head_size, device=CUDA, dtype=dtype)
                for layout, caches in by_layout.items():
                    for slots in (few, many):
                        vllm_kernels.page_bounds_update(
                            bounds, caches[0], slots, layout=layout,
                            k_scale=None if stored == dtype else one,
                        )  # fmt: skip
                    for count in (1, 300):
                        src, dst = moves[:count], moves[count : 2 * count]
                        vllm_kernels.copy_slots(
                            [*caches, one.new_zeros(40, 2, 16)], src, dst, layout
                        )
        selections(dtype)
        for stored in (dtype, *eight_bits):
            sparq(dtype, stored)


def sparq(dtype: torch.dtype, stored: torch.dtype) -> None:
    """sparq_attention, value_mean_update: rows within the budget and longer ones."""
    lens = torch.tensor([5000, 0, 17, 900, 16 * 400], dtype=torch.int32, device=CUDA)
    tables = torch.randint(0, 500, (5, 400), dtype=torch.int32, device=CUDA)
    query = torch.randn(5, 8, 64, device=CUDA, dtype=dtype)
    mean, counts = torch.zeros(5, 2, 64, device=CUDA), torch.zeros(5, device=CUDA).int()
    rows = torch.randint(-1, 5, (300,), device=CUDA)
    value = torch.randn(300, 2, 64, device=CUDA, dtype=dtype)
    vllm_kernels.value_mean_update(mean, counts, value, rows)
    for shift in (0, 1):
        memory = torch.randn(500 * 2048 + shift, device=CUDA).to(stored)[shift:]
        chunks = memory.view(500, 2, -1, 16, 16 // stored.itemsize)
        in_pages = {
            "vllm": (chunks, memory.view(500, 2, 64, 16)), "NHD": [memory.view(500, 16, 2, 64)] * 2,
            "HND": [memory.view(500, 2, 16, 64)] * 2,
        }  # fmt: skip
        for layout, (keys, values) in in_pages.items():
            for select in ("pages", "tokens")[: 1 if layout == "vllm" else 2]:
                for mean_value in (None, mean):
                    vllm_kernels.sparq_attention(
                        query, keys, values, tables, lens, k=512, select=select, layout=layout,
                        mean_value=mean_value,
                    )  # fmt: skip


def selections(dtype: torch.dtype) -> None:
    lens = torch.tensor([5000, 0, 17, 900, 16 * 400], dtype=torch.int32, device=CUDA)
    tables = torch.randint(0, 500, (5, 400), dtype=torch.int32, device=CUDA)
    for head_size, shift in ((64, 0), (7, 0), (64, 1)):
        memory = torch.randn(500, 4 * head_size + shift, device=CUDA, dtype=dtype)
        bounds = memory[:, shift:].unflatten(1, (2, 2, head_size))
        query = torch.randn(5, 8, head_size, device=CUDA, dtype=dtype)
        for per_kv_head in (False, True):
            for budget in (80, 2048):
                vllm_kernels.select_pages(
                    query, bounds, tables, lens, budget, block_size=16, per_kv_head=per_kv_head
                )


def mla() -> None:
    """The MLA cache's ops: few and many tokens, aligned rows and others."""
    one = torch.ones(1, device=CUDA)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=CUDA)
    lengths = torch.tensor([30, 17], dtype=torch.int32, device=CUDA)
    starts = torch.tensor([0, 30], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        for tokens in (40, 1200):
            packed = torch.randn(tokens, 578, device=CUDA, dtype=dtype)
            for kv_c, k_pe in (
                (packed[:, 1:513], packed[:, 513:577]),
                (packed[:, :512].contiguous(), packed[:, 512:576].contiguous()),
            ):
                order = torch.randperm(80 * 16, device=CUDA)[:tokens]
                for slots in (order, order // 2):
                    for name in ("auto", "fp8", "fp8_e5m2", "fp8_ds_mla"):
                        stored = dtype if name == "auto" else torch.uint8
                        width = 656 if name == "fp8_ds_mla" else 576
                        cache = torch.zeros(80, 16, width, device=CUDA, dtype=stored)
                        vllm_kernels.concat_and_cache_mla(kv_c, k_pe, cache, slots, name, one)
        rows = torch.zeros(50, 576, device=CUDA, dtype=dtype)
        vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(cache, rows, table, lengths, starts, 2)
        for nope, rope in ((512, 64), (7, 3)):
            query = torch.randn(5, 3, nope + rope, device=CUDA, dtype=dtype)
            parts = (query[..., :nope].contiguous(), query[..., nope:].contiguous())
            vllm_kernels.concat_mla_q(*parts, torch.empty_like(query))
    pairs = torch.tensor([[0, 3], [1, 4]], device=CUDA)
    vllm_kernels.copy_blocks_mla([torch.zeros(5, 16, 576, device=CUDA)], pairs)


def attention() -> None:
    """v1 and v2: every pair of types, padded head size and page size, ragged lengths with 0."""
    lengths = [0, 1, 17, 530]
    for dtype in DTYPES:
        for cache_dtype in ("auto", "fp8_e4m3", "fp8_e5m2"):
            for heads, kv_heads, head_size, block_size in (
                (8, 2, 128, 16), (12, 1, 128, 32), (4, 4, 64, 8), (18, 2, 80, 16), (4, 1, 240, 16),
                (10, 1, 256, 32),
            ):  # fmt: skip
                _attention(dtype, cache_dtype, heads, kv_heads, head_size, block_size, lengths)


def _attention(dtype, cache_dtype, heads, kv_heads, head_size, block_size, lengths) -> None:
    size = dtype.itemsize if cache_dtype == "auto" else 1
    x, pages, num_seqs = 16 // size, 70, len(lengths)
    keys = torch.randn(pages, kv_heads, head_size // x, block_size, x, device=CUDA)
    values = torch.randn(pages, kv_heads, head_size, block_size, device=CUDA)
    if cache_dtype == "auto":
        keys, values = keys.to(dtype), values.to(dtype)
    else:
        stored = torch.float8_e4m3fn if cache_dtype == "fp8_e4m3" else torch.float8_e5m2
        keys, values = keys.to(stored).view(torch.uint8), values.to(stored).view(torch.uint8)
    tables = torch.randint(0, pages, (num_seqs, 67), device=CUDA, dtype=torch.int32)
    query = torch.randn(num_seqs, heads, head_size, device=CUDA, dtype=dtype)
    out, one = torch.empty_like(query), torch.ones(1, device=CUDA)
    seq_lens = torch.tensor(lengths, device=CUDA, dtype=torch.int32)
    slopes = torch.rand(heads, device=CUDA)
    arguments = (query, keys, values, kv_heads, 0.1, tables, seq_lens, block_size, max(lengths))
    vllm_kernels.paged_attention_v1(out, *arguments, None, cache_dtype, one, one)
    sums = torch.empty(num_seqs, heads, 2, device=CUDA)
    partial = torch.empty(num_seqs, heads, 2, head_size, device=CUDA, dtype=dtype)
    scratch = (out, sums, torch.empty_like(sums), partial)
    vllm_kernels.paged_attention_v2(*scratch, *arguments, slopes, cache_dtype, one, one)
    sparse = (0, 1, 2, 64, 1)
    vllm_kernels.paged_attention_v2(*scratch, *arguments, None, cache_dtype, one, one, *sparse)


def general_attention() -> None:
    """paged_attention: every form of page, padded and whole heads, one and several query tokens."""
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    lens = torch.tensor([700, 0, 33, 5], dtype=torch.int32, device=CUDA)
    starts = torch.tensor([0, 9, 10, 14, 15], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        for stored in (dtype, *eight_bits):
            x = 16 // stored.itemsize
            for head_size, page in (
                (128, 16), (64, 16), (48, 32), (256, 8), (96, 64), (80, 16), (112, 8), (192, 256),
            ):  # fmt: skip
                pages, heads = -(-700 // page) + 8, 2
                tables = torch.randint(0, pages, (4, -(-700 // page)), device=CUDA).int()
                rows = torch.randn(pages, page, heads, head_size, device=CUDA).to(stored)
                by_layout = {
                    "NHD": (rows, rows),
                    "HND": (rows.transpose(1, 2).contiguous(),) * 2,
                    "vllm": (
                        rows.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(),
                        rows.permute(0, 2, 3, 1).contiguous(),
                    ),
                }
                for layout, (key, value) in by_layout.items():
                    query = torch.randn(4, 8, head_size, device=CUDA, dtype=dtype)
                    call = vllm_kernels.paged_attention
                    call(query, key, value, tables, lens, layout=layout, return_lse=True)
                    query = torch.randn(15, 8, head_size, device=CUDA, dtype=dtype)
                    call(query, key, value, tables, lens, layout=layout, query_start_loc=starts)
                    if dtype == torch.bfloat16 and page == 16:
                        query = torch.randn(4, 32, head_size, device=CUDA, dtype=dtype)
                        call(query, key, value, tables, lens, layout=layout, fixed_split_size=64)
                        call(query, key, value, tables, lens, layout=layout, kv_ready=True)
                    torch.cuda.synchronize()  # racecheck fails with hundreds of launches in flight


def prompts() -> None:
    """paged_attention of prompts beside decodes: every head size, layout and kind of score."""
    heads, page = 24, 16  # 3 tiles of 128 rows of each are enough for the kernel of many rows
    lens = torch.tensor([300, 47, 333], dtype=torch.int32, device=CUDA)
    starts = torch.tensor([0, 290, 291, 380], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        for head_size in (64, 96, 128, 192, 256):
            tables = torch.randperm(3 * 21, device=CUDA).view(3, 21).int()
            rows = torch.randn(3 * 21, page, heads, head_size, device=CUDA, dtype=dtype)
            x = 16 // dtype.itemsize
            vllm = (
                rows.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(),
                rows.permute(0, 2, 3, 1).contiguous(),
            )
            query = torch.randn(380, heads, head_size, device=CUDA, dtype=dtype)
            eight = rows.to(torch.float8_e4m3fn)
            pages = {"NHD": (rows, rows), "vllm": vllm, "HND": (eight.transpose(1, 2),) * 2}
            for layout, (key, value) in pages.items():
                for options in ({}, {"sliding_window": 70}, {"softcap": 2.0}, {"causal": False}):
                    vllm_kernels.paged_attention(
                        query, key, value, tables, lens, layout=layout, query_start_loc=starts,
                        max_query_len=290, return_lse=True, **options,
                    )  # fmt: skip
                    torch.cuda.synchronize()


def rows_by_layout(rows: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layout, of rows in layout NHD of one byte an element."""
    return {
        "NHD": (rows, rows),
        "HND": (rows.transpose(1, 2).contiguous(),) * 2,
        "vllm": (
            rows.unflatten(-1, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous(),
            rows.permute(0, 2, 3, 1).contiguous(),
        ),
    }


TOKEN_LENS = (700, 0, 33, 1300)


def attend_by_tokens(
    dtype: torch.dtype, heads: int, head_size: int, key: torch.Tensor, value: torch.Tensor,
    tables: torch.Tensor, **options: object,
) -> None:  # fmt: skip
    """Decode, several query tokens, prompts, and keys that are gathered, over TOKEN_LENS."""
    lens = torch.tensor(TOKEN_LENS, dtype=torch.int32, device=CUDA)
    counts = {1: [1, 1, 1, 1], 9: [9, 0, 5, 1], 330: [330, 0, 20, 300], 1100: [600, 0, 1, 1100]}
    for most, queries in counts.items():
        starts = torch.tensor([0, *queries], device=CUDA).cumsum(0).int()
        for group in (1, 4) if most < 300 else (4,):
            query = torch.randn(sum(queries), group * heads, head_size, device=CUDA).to(dtype)
            out = vllm_kernels.paged_attention(
                query, key, value, tables, lens, query_start_loc=starts, max_query_len=most,
                **options,
            )  # fmt: skip
            assert out.isfinite().all()


def token_zeros() -> None:
    """int4 caches, with a scale and a zero a token: written, gathered, and read by each kernel of
    paged_attention; scales and zeros of unused slots are NaN."""
    for dtype in DTYPES:
        for head_size, page, heads in (
            (128, 16, 2), (64, 16, 8), (96, 32, 2), (256, 8, 2), (192, 256, 2), (128, 64, 8),
            (128, 4, 1),
        ):  # fmt: skip
            pages = -(-1300 // page)
            tables = torch.randperm(4 * pages, device=CUDA).view(4, pages).int()
            rows = torch.zeros(4 * pages, page, heads, head_size // 2, device=CUDA).byte()
            slots = torch.cat(
                [
                    tables[seq].long().repeat_interleave(page)[:length] * page
                    + torch.arange(length, device=CUDA) % page
                    for seq, length in enumerate(TOKEN_LENS)
                ]
            )
            given = torch.randn(2, len(slots), heads, head_size, device=CUDA).to(dtype)
            for layout, (key, value) in rows_by_layout(rows).items():
                scales = torch.full((4, 4 * pages, heads, page), float("nan"), device=CUDA)
                value = value.clone()
                for of_call in (slots[:40], slots):
                    vllm_kernels.reshape_and_cache_per_token_quant(
                        *given[:, : len(of_call)], key, value, scales[0], scales[1], of_call,
                        layout, key_zeros=scales[2], value_zeros=scales[3],
                    )  # fmt: skip
                starts = torch.tensor([0, *TOKEN_LENS], device=CUDA).cumsum(0).int()
                gathered = torch.empty_like(given)
                vllm_kernels.gather_paged_kv(
                    *gathered, key, value, tables, starts, layout=layout, k_scale=scales[0],
                    v_scale=scales[1], k_zero=scales[2], v_zero=scales[3],
                )  # fmt: skip
                assert (gathered - given).abs().max() < 1
                attend_by_tokens(
                    dtype, heads, head_size, key, value, tables, layout=layout,
                    k_token_scales=scales[0], v_token_scales=scales[1],
                    k_token_zeros=scales[2], v_token_zeros=scales[3],
                )  # fmt: skip


def token_scales() -> None:
    """paged_attention over int8 with a scale a token: decode, several query tokens, prompts, and
    keys that are gathered; scales of unused slots are NaN."""
    for dtype in DTYPES:
        for head_size, page, heads in (
            (128, 16, 2), (64, 16, 8), (48, 32, 2), (256, 8, 2), (80, 16, 2), (192, 256, 2),
            (128, 64, 8), (128, 4, 1),
        ):  # fmt: skip
            pages = -(-1300 // page)
            tables = torch.randperm(4 * pages, device=CUDA).view(4, pages).int()
            rows = torch.randint(-99, 99, (4 * pages, page, heads, head_size), device=CUDA).char()
            scales = torch.rand(2, 4 * pages, heads, page, device=CUDA) / 32
            for seq, length in enumerate(TOKEN_LENS):
                scales[:, tables[seq, -(-length // page) :].long()] = float("nan")
            for layout, (key, value) in rows_by_layout(rows).items():
                attend_by_tokens(
                    dtype, heads, head_size, key, value, tables, layout=layout,
                    k_token_scales=scales[0], v_token_scales=scales[1],
                )  # fmt: skip


def tree_masks() -> None:
    """Trees of new tokens: decode with one and several warps a pipeline, wgmma, and SIMT."""
    lens = torch.tensor([300, 9, 70], dtype=torch.int32, device=CUDA)
    starts = torch.tensor([0, 9, 18, 27], dtype=torch.int32, device=CUDA)
    words = torch.randint(2**31, (27,), device=CUDA)
    for dtype in DTYPES:
        for stored in (dtype, torch.float8_e4m3fn):
            for page, group, head_size in ((16, 1, 64), (16, 8, 128), (16, 8, 256), (2, 4, 64)):
                pages = -(-300 // page)
                tables = torch.randperm(3 * pages, device=CUDA).view(3, pages).int()
                rows = torch.randn(3 * pages, page, 2, head_size, device=CUDA).to(stored)
                query = torch.randn(27, 2 * group, head_size, device=CUDA, dtype=dtype)
                for tree in (words, words.int()):
                    vllm_kernels.paged_attention(
                        query, rows, rows, tables, lens, layout="NHD", query_start_loc=starts,
                        max_query_len=9, tree_mask=tree,
                    )  # fmt: skip


def contiguous_keys() -> None:
    """varlen_attention: causal and not, few and many query tokens, every pair of types."""
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    starts = torch.tensor([0, 290, 291, 380], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        for stored in (dtype, *eight_bits):
            for head_size in (64, 96, 128, 192, 256):
                key = torch.randn(380, 4, head_size, device=CUDA).to(stored)
                for count, options in ((380, {}), (380, {"window": (70, 9)}), (3, {})):
                    query = torch.randn(count, 24, head_size, device=CUDA, dtype=dtype)
                    few = starts if count == 380 else torch.arange(4, device=CUDA).int()
                    for causal in (True, False):
                        vllm_kernels.varlen_attention(
                            query, key, key, few, starts, max_query_len=290, causal=causal,
                            return_lse=True, **options,
                        )  # fmt: skip
                torch.cuda.synchronize()


def decode_steps() -> None:
    """fused_decode_attention: every layout and pair of types, aligned tokens and others."""
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    lens = torch.tensor([300, 0, 33, 1], dtype=torch.int32, device=CUDA)
    positions = torch.tensor([299, 0, 32, 0], device=CUDA)
    for dtype in DTYPES:
        for stored in (dtype, *eight_bits):
            x = 16 // stored.itemsize
            for head_size, page, shift in ((128, 16, 0), (64, 32, 1)):
                pages = -(-300 // page)
                tables = torch.randperm(4 * pages, device=CUDA).view(4, pages).int()
                blocks = tables.gather(1, positions[:, None] // page).squeeze(1)
                slots = torch.where(lens > 0, blocks * page + positions % page, -1)
                cos_sin = torch.randn(300, head_size, device=CUDA, dtype=dtype)
                rows = torch.randn(4 * pages, page, 2, head_size, device=CUDA).to(stored)
                by_layout = {
                    "NHD": (rows, rows.clone()),
                    "HND": tuple(rows.transpose(1, 2).contiguous() for _ in range(2)),
                    "vllm": (
                        rows.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(),
                        rows.permute(0, 2, 3, 1).contiguous(),
                    ),
                }
                width = 12 * head_size
                packed = torch.randn(4, width + shift, device=CUDA, dtype=dtype)
                extras = torch.randn(width + 2 * head_size, device=CUDA, dtype=dtype)
                bias, q_weight, k_weight = extras.split([width, head_size, head_size])
                for layout, caches in by_layout.items():
                    for norms in ({}, {"bias": bias, "q_weight": q_weight, "k_weight": k_weight}):
                        vllm_kernels.fused_decode_attention(
                            packed[:, shift:], positions, cos_sin, *caches, slots, tables, lens,
                            is_neox=not norms, layout=layout, **norms,
                        )  # fmt: skip


def appended_tokens() -> None:
    """attention_with_kvcache, for pages and for rows: the kernel that appends and computes the
    indices, and that of the indices alone, which also serves tokens that are not aligned."""
    lens = torch.tensor([300, 0, -1, 33], dtype=torch.int32, device=CUDA)
    tables = torch.randperm(4 * 20, device=CUDA).view(4, 20).int()
    for dtype in DTYPES:
        pages = torch.randn(2, 4 * 20, 16, 2, 64, device=CUDA).to(dtype)
        for count in (1, 3):
            query = torch.randn(4, count, 8, 64, device=CUDA).to(dtype)
            for caches, table in ((pages, tables), (pages.view(2, 4, 320, 2, 64), None)):
                for new in (None, query[:, :, :2]):
                    vllm_kernels.attention_with_kvcache(
                        query, *caches, lens, block_tables=table, key=new, value=new
                    )
            starts = count * torch.arange(5, dtype=torch.int32, device=CUDA)
            vllm_kernels.attention_with_kvcache(
                query.flatten(0, 1), *pages, 70 * starts, block_tables=tables, cumulative=True,
                query_start_loc=starts, max_query_len=count,
            )  # fmt: skip
            odd = torch.randn(4, count, 2, 65, device=CUDA).to(dtype)[..., 1:]
            wide = 16 // dtype.itemsize
            packed = pages[0].view(80, 2, -1, 16, wide), pages[1].view(80, 2, 64, 16)
            eight = pages.to(torch.float8_e4m3fn)
            for caches, layout in ((packed, "vllm"), (eight, "NHD"), (pages, "NHD")):
                for new in (query[:, :, :2], odd):
                    vllm_kernels.attention_with_kvcache(
                        query, *caches, lens, block_tables=tables, key=new, value=new, layout=layout
                    )


def sampling() -> None:
    for dtype in DTYPES:
        for rows, vocab in ((3, 7), (3, 1000), (2, 40_000)):
            logits = torch.randn(rows, vocab, device=CUDA).to(dtype)
            ones = torch.ones(rows, device=CUDA)
            ints = torch.ones(rows, dtype=torch.int32, device=CUDA)
            lists = (
                torch.arange(rows + 1, dtype=torch.int32, device=CUDA),
                torch.arange(rows, dtype=torch.int32, device=CUDA),
            )
            mask = torch.full((rows, vocab // 32 + 1), -3, dtype=torch.int32, device=CUDA)
            drawn = {"temperature": 0.7 * ones, "uniforms": 0.5 * ones}
            for limits in (
                {},
                {"top_k": 5 * ints, "top_p": 0.9 * ones, "min_p": 0.01 * ones},
                {"top_k": 5000 * ints, "top_p": 0.9 * ones},
                {"top_p": 0.9 * ones, "bitmask": mask, "bias": (*lists, ones)},
                {"token_counts": (*lists, ints), "repetition": 1.2 * ones, "presence": ones},
            ):
                vllm_kernels.sample(logits, **drawn, **limits)
            vllm_kernels.sample(logits)
            vllm_kernels.sample(logits, **drawn, rows=0 * ints)
            vllm_kernels.top_k_top_p_mask_(logits.clone(), 3 * ints, 0.5 * ones)
            tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
            vllm_kernels.token_logprobs(logits, tokens, 20)
            vllm_kernels.softmax(logits, 0.7 * ones)
            vllm_kernels.apply_token_bitmask_(logits.clone(), mask)
            seen = logits > 0
            vllm_kernels.apply_repetition_penalties(logits.clone(), seen, seen, ones)
    lists = torch.full((2, 600), -1, dtype=torch.int32, device=CUDA)
    lengths = torch.tensor([250, 0], dtype=torch.int32, device=CUDA)
    ends = torch.tensor([0, 300, 600], dtype=torch.int32, device=CUDA)
    for token in (7, 7, 9):
        new = torch.full((2,), token, device=CUDA)
        vllm_kernels.append_token_counts(lists[0], lists[1], lengths, ends, new, new, 0 * new)
    probs = torch.randn(4, 3, 1000, device=CUDA).softmax(-1)
    draft = torch.randint(1000, (4, 2), device=CUDA)
    vllm_kernels.spec_verify(draft, torch.randint(1000, (4, 3), device=CUDA))
    vllm_kernels.spec_verify(
        draft, target_probs=probs, draft_probs=probs[:, 1:].contiguous(),
        uniforms=torch.rand(4, 3, 2, device=CUDA),
    )  # fmt: skip


def main() -> None:
    groups = (
        general_attention,
        token_scales,
        token_zeros,
        tree_masks,
        prompts,
        contiguous_keys,
        decode_steps,
        appended_tokens,
        sampling,
        norms,
        rotary_and_activations,
        scaled_quant,
        fused_rope,
        cache,
        per_token_quant,
        int4_caches,
        gathers,
        pages,
        mla,
        attention,
    )
    for group in [group for group in groups if group.__name__ in ASKED] or groups:
        group()
        torch.cuda.synchronize()
        print(group.__name__, "done", flush=True)


if __name__ == "__main__":
    main()
