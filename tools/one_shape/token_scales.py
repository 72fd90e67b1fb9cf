"""Attention over caches whose tokens have scales, or scales and zeros."""

from __future__ import annotations

import torch

import vllm_kernels

from .common import CUDA, DTYPES, rows_by_layout

TOKEN_LENS = (700, 0, 33, 1300)


def attend_by_tokens(
    dtype: torch.dtype, heads: int, head_size: int, key: torch.Tensor, value: torch.Tensor,
    tables: torch.Tensor, **options: object,
) -> None:  # fmt: skip
    """Decode, several query tokens, prompts, and keys that are gathered, over TOKEN_LENS.

    float32 has one kernel. Long prompts would keep it busy for minutes under racecheck.
    """
    lens = torch.tensor(TOKEN_LENS, dtype=torch.int32, device=CUDA)
    counts = {1: [1, 1, 1, 1], 9: [9, 0, 5, 1], 330: [330, 0, 20, 300], 1100: [600, 0, 1, 1100]}
    if dtype == torch.float32:
        counts = {1: [1, 1, 1, 1], 9: [9, 0, 5, 1]}
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
