"""Cache writers, copies, gathers and the MLA cache: one call per kernel."""

from __future__ import annotations

import itertools

import torch

import vllm_kernels
from vllm_kernels.kv_cache.tensors import KVCache, KVShape

from .common import CUDA, DTYPES, in_vllm_layout, rows_by_layout


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
                    by_layout["vllm"] = in_vllm_layout(rows[0])
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
            for head_size, unaligned in ((128, 0), (48, 1)):
                pages = torch.randn(12, 16, 2, head_size, device=CUDA).to(stored)
                out = torch.zeros(2, 75, 2, head_size + unaligned, device=CUDA, dtype=dtype)
                key, value = out[..., unaligned:]
                scales = (
                    [None, None] if stored == dtype else [torch.rand(12, 2, 16, device=CUDA)] * 2
                )
                for layout, (keys, values) in rows_by_layout(pages).items():
                    vllm_kernels.gather_paged_kv(
                        key, value, keys, values, table, cu, seq_starts=starts,
                        k_scale=scales[0], v_scale=scales[1], layout=layout,
                    )  # fmt: skip


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
