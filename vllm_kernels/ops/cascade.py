"""Attention of sequences that begin with the same blocks, which are then read once."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kernels.ops.attention import merge_attn_states, paged_attention

__all__ = ["cascade_attention"]


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_common_blocks: int,
    *,
    scale: float | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "vllm",
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`paged_attention`, causal, where all tables begin with the same blocks.

    All query tokens attend to the common blocks as if they were one sequence, not causally, so that
    these are read once and not once a sequence; then each sequence attends to the rest of its own;
    then the two are merged by their log-sum-exp (Ye et al. 2024, cascade inference in FlashInfer;
    Juravsky et al. 2024, arXiv:2402.05099). Equal to :func:`paged_attention` up to rounding. Three
    launches instead of one, so it pays where (sequences - 1) * common tokens is large: from a few
    sequences on a prompt of some thousand tokens.

    Args:
        num_common_blocks: leading blocks that all rows of block_tables share, as
            :meth:`KVCacheManager.num_common_prefix_blocks` counts them; 0: a plain call. They are
            to hold tokens that all query tokens see: every sequence has at least num_common_blocks
            * block_size - 1 tokens before its first query token. (A prefix that was computed before
            and at least one token that was not.) Lengths are on the device, so this is not looked
            at; a padded row with a query token gives attention to the common blocks.
        The others: as :func:`paged_attention` has them. ALiBi and windows are not for cascades.

    Returns:
        out, or (out, lse), as :func:`paged_attention` does.

    Raises:
        RuntimeError: as :func:`paged_attention` does, and where num_common_blocks is negative or
            more than the columns of block_tables.
    """
    shared = {"scale": scale, "softcap": softcap, "layout": layout}
    shared |= {"k_scale": k_scale, "v_scale": v_scale}
    own = {**shared, "query_start_loc": query_start_loc, "max_query_len": max_query_len}
    if num_common_blocks == 0 or block_tables.shape[0] == 0:
        return paged_attention(
            query, key_cache, value_cache, block_tables, seq_lens, sinks=sinks, out=out,
            return_lse=return_lse, **own,
        )  # fmt: skip
    if not 0 < num_common_blocks <= block_tables.shape[1]:
        raise RuntimeError(
            f"cascade_attention: num_common_blocks: expected 0 to {block_tables.shape[1]} (the "
            f"columns of block_tables), got {num_common_blocks}"
        )
    block_size = value_cache.shape[1 if layout == "NHD" else 2 if layout == "HND" else 3]
    common = num_common_blocks * block_size
    prefix, prefix_lse = common_attention(
        query, key_cache, value_cache, block_tables[0, :num_common_blocks], block_size,
        pieces_for(query, key_cache.shape[1 if layout != "NHD" else 2], common), **shared,
    )  # fmt: skip
    rest, rest_lse = paged_attention(
        query, key_cache, value_cache, block_tables[:, num_common_blocks:],
        (seq_lens - common).clamp_min_(0), sinks=sinks, return_lse=True, **own,
    )  # fmt: skip
    if out is None:
        out = torch.empty_like(rest)
    lse = torch.empty_like(rest_lse.t(), memory_format=torch.contiguous_format)
    merge_attn_states(
        out, prefix, prefix_lse.t().contiguous(), rest, rest_lse.t().contiguous(), lse
    )
    return (out, lse.t()) if return_lse else out


ROWS_OF_A_BLOCK = 128  # query rows of a KV head that a block of the CUDA kernel works on
LEAST_PIECE = 512  # tokens


def pieces_for(query: Tensor, num_kv_heads: int, common: int) -> int:
    """Pieces of the common tokens, so that a GPU has work for all of its multiprocessors."""
    if query.device.type != "cuda":
        return 1
    rows = query.shape[0] * (query.shape[1] // num_kv_heads)
    blocks = num_kv_heads * -(-rows // ROWS_OF_A_BLOCK)
    multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return max(1, min(multiprocessors // blocks, common // LEAST_PIECE))


def common_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    blocks: Tensor,
    block_size: int,
    pieces: int,
    **shared,
) -> tuple[Tensor, Tensor]:
    """All query tokens over all of `blocks` [num_blocks]: out, lse [num_tokens, num_heads].

    `pieces` stretches of the blocks are sequences of one call, each with a copy of the queries,
    merged by their log-sum-exp.
    """
    num_tokens, num_blocks = query.shape[0], blocks.shape[0]
    each = -(-num_blocks // pieces)
    pieces = -(-num_blocks // each)
    tables = blocks.new_full((pieces * each,), -1)
    tables[:num_blocks] = blocks
    lens = blocks.new_full((pieces,), each * block_size)
    lens[-1:].fill_((num_blocks - (pieces - 1) * each) * block_size)
    starts = torch.arange(pieces + 1, dtype=blocks.dtype, device=blocks.device) * num_tokens
    out, lse = paged_attention(
        query.repeat(pieces, 1, 1) if pieces > 1 else query, key_cache, value_cache,
        tables.view(pieces, each), lens, query_start_loc=starts, max_query_len=num_tokens,
        causal=False, return_lse=True, **shared,
    )  # fmt: skip
    if pieces == 1:
        return out, lse
    lse = lse.view(pieces, *query.shape[:2])
    weights = torch.softmax(lse, 0).unsqueeze(-1)
    out = (weights * out.view(pieces, *query.shape)).sum(0).to(query.dtype)
    return out, torch.logsumexp(lse, 0)
