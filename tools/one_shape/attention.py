"""Attention over pages and over contiguous keys: one call per kernel."""

from __future__ import annotations

import torch

import vllm_kernels

from .common import CUDA, DTYPES, in_vllm_layout, rows_by_layout


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
            for head_size, page in (
                (128, 16), (64, 16), (48, 32), (256, 8), (96, 64), (80, 16), (112, 8), (192, 256),
                (128, 1), (160, 32), (224, 16),
            ):  # fmt: skip
                pages, heads = -(-700 // page) + 8, 2
                tables = torch.randint(0, pages, (4, -(-700 // page)), device=CUDA).int()
                rows = torch.randn(pages, page, heads, head_size, device=CUDA).to(stored)
                for layout, (key, value) in rows_by_layout(rows).items():
                    query = torch.randn(4, 8, head_size, device=CUDA, dtype=dtype)
                    call = vllm_kernels.paged_attention
                    call(query, key, value, tables, lens, layout=layout, return_lse=True)
                    query = torch.randn(15, 8, head_size, device=CUDA, dtype=dtype)
                    call(query, key, value, tables, lens, layout=layout, query_start_loc=starts)
                    if dtype == torch.bfloat16 and page == 16:
                        query = torch.randn(4, 32, head_size, device=CUDA, dtype=dtype)
                        call(query, key, value, tables, lens, layout=layout, fixed_split_size=64)
                        call(query, key, value, tables, lens, layout=layout, kv_ready=True)
                    if layout == "vllm" and page == 256:  # a batch of many query tiles
                        query = torch.randn(16, 8, head_size, device=CUDA, dtype=dtype)
                        call(query, key, value, tables.repeat(4, 1), lens.repeat(4), layout=layout)
                    torch.cuda.synchronize()  # racecheck fails with hundreds of launches in flight


def lines_of_heads() -> None:
    """paged_attention of one token over NHD in 8 bits, where a work tile has several KV heads."""
    page, pages = 16, 60
    for dtype in {*DTYPES} - {torch.float32}:
        for stored in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            for head_size, heads, seqs in (
                (64, 2, 24), (80, 8, 24), (96, 4, 24), (112, 8, 24), (160, 4, 32), (192, 2, 32),
                (224, 4, 32), (96, 4, 150), (128, 8, 256),
            ):  # fmt: skip
                tables = torch.randint(0, pages, (seqs, 70), device=CUDA).int()
                lens = torch.randint(0, 100, (seqs,), device=CUDA).int()
                lens[3] = 1100
                rows = torch.randn(2, pages, page, heads, head_size, device=CUDA).to(stored)
                query = torch.randn(seqs, 4 * heads, head_size, device=CUDA, dtype=dtype)
                vllm_kernels.paged_attention(query, *rows, tables, lens, layout="NHD")
                torch.cuda.synchronize()


def ragged_batches() -> None:
    """paged_attention of one token a sequence: one wave, several, and CTAs of half an SM."""
    page, heads = 16, 8
    short, long = [500, 490] + [10] * 9, [4100] * 9
    for dtype in {*DTYPES} - {torch.float32}:
        for stored in (dtype, torch.float8_e4m3fn):
            batches = ((64, 32, short), (128, 32, short), (128, 300, short), (128, 300, long))
            for head_size, columns, seq_lens in batches:
                lens = torch.tensor(seq_lens, device=CUDA).int()
                tables = torch.randint(0, 60, (len(lens), columns), device=CUDA).int()
                rows = torch.randn(2, 60, page, heads, head_size, device=CUDA).to(stored)
                query = torch.randn(len(lens), 4 * heads, head_size, device=CUDA, dtype=dtype)
                vllm_kernels.paged_attention(query, *rows, tables, lens, layout="NHD")
                caches = in_vllm_layout(rows[0])
                vllm_kernels.paged_attention(query, *caches, tables, lens, layout="vllm")
                torch.cuda.synchronize()


def prompts() -> None:
    """paged_attention of prompts beside decodes: every head size, layout and kind of score."""
    page = 16
    lens = torch.tensor([300, 47, 333], dtype=torch.int32, device=CUDA)
    starts = torch.tensor([0, 290, 291, 380], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        # 3 tiles of 128 rows of 24 heads are enough for the kernel of many rows. float32 has none.
        heads = 1 if dtype == torch.float32 else 24
        for head_size in (64, 96, 128, 192, 256):
            tables = torch.randperm(3 * 21, device=CUDA).view(3, 21).int()
            rows = torch.randn(3 * 21, page, heads, head_size, device=CUDA, dtype=dtype)
            query = torch.randn(380, heads, head_size, device=CUDA, dtype=dtype)
            eight = rows.to(torch.float8_e4m3fn)
            pages = {
                "NHD": (rows, rows),
                "vllm": in_vllm_layout(rows),
                "HND": (eight.transpose(1, 2),) * 2,
            }
            for layout, (key, value) in pages.items():
                for options in ({}, {"sliding_window": 70}, {"softcap": 2.0}, {"causal": False}):
                    vllm_kernels.paged_attention(
                        query, key, value, tables, lens, layout=layout, query_start_loc=starts,
                        max_query_len=290, return_lse=True, **options,
                    )  # fmt: skip
                    torch.cuda.synchronize()


def eight_bit_queries() -> None:
    """e4m3 queries: multiplied in 8 bits, with a decode beside, and upcast."""
    heads, page = 8, 16  # 2320 query rows a KV head: multiplied in 8 bits
    lens = torch.tensor([300, 47, 0, 333], dtype=torch.int32, device=CUDA)
    starts = torch.tensor([0, 290, 291, 300, 434], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        if dtype == torch.float32:
            continue
        for head_size in (64, 80, 128, 256):
            tables = torch.randperm(4 * 21, device=CUDA).view(4, 21).int()
            rows = torch.randn(4 * 21, page, heads, head_size, device=CUDA).to(torch.float8_e4m3fn)
            query = torch.randn(434, 8 * heads, head_size, device=CUDA).to(torch.float8_e4m3fn)
            out = torch.empty(query.shape, device=CUDA, dtype=dtype)
            scale = torch.rand(heads, device=CUDA) + 0.5
            small = rows.view(8 * 21, 8, heads, head_size)  # K is copied
            halves = torch.randperm(8 * 21, device=CUDA).view(4, 42).int()
            caches = (
                ("NHD", tables, (rows, rows)), ("vllm", tables, in_vllm_layout(rows)),
                ("NHD", halves, (small, small)),
            )  # fmt: skip
            for layout, ids, (key, value) in caches:
                for options in ({}, {"sliding_window": 70}, {"softcap": 2.0}, {"causal": False}):
                    vllm_kernels.paged_attention(
                        query, key, value, ids, lens, layout=layout, query_start_loc=starts,
                        max_query_len=290, q_scale=scale, k_scale=scale, out=out, **options,
                    )  # fmt: skip
                    torch.cuda.synchronize()
            keys = torch.randn(434, heads, head_size, device=CUDA).to(torch.float8_e4m3fn)
            vllm_kernels.varlen_attention(
                query, keys, keys, starts, starts, max_query_len=290, q_scale=scale, out=out
            )


def split_prompts() -> None:
    """Few query rows, many keys: CTAs share work tiles. Of 9 tokens a warpgroup has all rows."""
    lens = torch.tensor([4100, 700], dtype=torch.int32, device=CUDA)
    key_starts = torch.tensor([0, 4100, 4800], dtype=torch.int32, device=CUDA)
    e4m3 = torch.float8_e4m3fn
    for dtype in DTYPES:
        if dtype == torch.float32:
            continue
        for asked, stored, head_size, page, tokens in (
            (dtype, dtype, 64, 16, 64), (dtype, dtype, 128, 16, 64), (dtype, dtype, 112, 64, 9),
            (dtype, dtype, 64, 64, 9), (dtype, e4m3, 64, 16, 64), (dtype, e4m3, 128, 16, 64),
            (e4m3, e4m3, 64, 16, 64), (e4m3, e4m3, 128, 16, 64),
        ):  # fmt: skip
            pages = -(-4100 // page)
            tables = torch.randperm(2 * pages, device=CUDA).view(2, pages).int()
            rows = torch.randn(2 * pages, page, 2, head_size, device=CUDA).to(stored)
            query = torch.randn(2 * tokens, 8, head_size, device=CUDA).to(asked)
            starts = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32, device=CUDA)
            out = torch.empty(query.shape, device=CUDA, dtype=dtype)
            options = {"max_query_len": tokens, "out": out, "return_lse": True}
            for layout, (key, value) in rows_by_layout(rows).items():
                vllm_kernels.paged_attention(
                    query, key, value, tables, lens, layout=layout, query_start_loc=starts,
                    **options,
                )  # fmt: skip
                torch.cuda.synchronize()
            keys = torch.randn(4800, 2, head_size, device=CUDA).to(stored)
            vllm_kernels.varlen_attention(query, keys, keys, starts, key_starts, **options)
            torch.cuda.synchronize()


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


def shards() -> None:
    """A shard of each sequence: the same kernels as for trees."""
    lens = torch.tensor([300, 9, 70], dtype=torch.int32, device=CUDA)
    totals, starts = 2 * lens, torch.tensor([0, 9, 18, 27], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        for page, group, head_size in ((16, 1, 64), (16, 8, 128), (16, 8, 256), (2, 4, 64)):
            pages = -(-300 // page)
            tables = torch.randperm(3 * pages, device=CUDA).view(3, pages).int()
            rows = torch.randn(3 * pages, page, 2, head_size, device=CUDA, dtype=dtype)
            query = torch.randn(27, 2 * group, head_size, device=CUDA, dtype=dtype)
            for window in (0, 100):
                vllm_kernels.paged_attention(
                    query, rows, rows, tables, lens, layout="NHD", query_start_loc=starts,
                    max_query_len=9, sliding_window=window, total_seq_lens=totals, shards=2,
                    shard=1, interleave=4,
                )  # fmt: skip


def contiguous_keys() -> None:
    """varlen_attention: causal and not, few and many query tokens, every pair of types."""
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    starts = torch.tensor([0, 290, 291, 380], dtype=torch.int32, device=CUDA)
    for dtype in DTYPES:
        for stored in (dtype, *eight_bits):
            for head_size in (64, 96, 128, 192, 256):
                heads = 1 if dtype == torch.float32 else 4  # no kernel of many rows
                key = torch.randn(380, heads, head_size, device=CUDA).to(stored)
                for count, options in ((380, {}), (380, {"window": (70, 9)}), (3, {})):
                    query = torch.randn(count, 6 * heads, head_size, device=CUDA, dtype=dtype)
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
                    "vllm": in_vllm_layout(rows),
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
