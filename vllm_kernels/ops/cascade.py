"""Attention of sequences that begin with the same blocks, which are then read once."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kernels.ops.attention import combine_attn_partials, paged_attention

__all__ = ["CascadePlan", "cascade_attention", "cascade_pays", "cascade_plan"]

LEAST_PIECE = 512  # tokens
ROWS_OF_A_BLOCK = 128  # query rows of a KV head that a block of the CUDA kernel works on

LEAST_SAVED = {"cuda": 300_000_000, "cpu": 2_000_000}
"""Bytes of K and V of one layer that must not be read again, for a cascade to pay, by device. On an
H200 they come mostly from the second-level cache, at some 12 TB/s, and a cascade costs 18 us (the
copies of the queries, the launch of many rows, the merge) and the fused decode step, 4 to 6 us."""


def cascade_pays(num_seqs: int, num_common: int, token_bytes: int, device: torch.device) -> bool:
    """Whether :func:`cascade_attention` is faster than :func:`paged_attention` for sequences of one
    query token each: whether ``(num_seqs - 1) * num_common * token_bytes``, what it does not read
    again, is worth its launches.

    Args:
        num_common: tokens that all of them share.
        token_bytes: K and V of a token in one layer.

    Returns:
        Whether it is at least 300 MB on a GPU, 2 MB on a CPU.
    """
    return (num_seqs - 1) * num_common * token_bytes >= LEAST_SAVED.get(device.type, math.inf)


SIDE_BY_SIDE = ("cuda",)
"""Devices that work on both levels of one mixed batch at a time. (A CPU is faster at single tokens
in a call of their own.)"""


@dataclass(frozen=True)
class CascadePlan:
    """What :func:`cascade_attention` reads beside queries and pages: by :func:`cascade_plan`.

    Its sequences are ``pieces`` stretches of the common blocks, each with all query tokens, and
    then what each sequence has of its own.
    """

    pieces: int
    block_tables: Tensor  # int32 [pieces + num_seqs, blocks]
    seq_lens: Tensor  # int32 [pieces + num_seqs]
    query_start_loc: Tensor  # int32 [pieces + num_seqs + 1], in pieces + 1 copies of the queries


def cascade_plan(
    block_tables: Tensor,
    seq_lens: Tensor,
    num_common_blocks: int | Tensor,
    *,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    query_start_loc: Tensor | None = None,
    num_tokens: int | None = None,
) -> CascadePlan:
    """What the layers of a pass have in common: made once, it serves :func:`cascade_attention` in
    each of them. Tables and lengths are in it: make a new one for each pass. (In a CUDA graph it
    is computed again by each replay.)

    Args:
        block_tables, seq_lens, query_start_loc: as :func:`cascade_attention` has them.
        num_common_blocks: a number, or an int32 tensor of one element on the device: so that a CUDA
            graph serves any number, 0 too.
        block_size: tokens of a block.
        num_tokens: query tokens, to be given with query_start_loc; num_seqs by default.

    Returns:
        The plan, a few tensors on block_tables' device.
    """
    num_seqs, columns = block_tables.shape
    if num_tokens is None:
        num_tokens = num_seqs
    options = {"dtype": torch.int32, "device": block_tables.device}
    common = num_common_blocks
    if not isinstance(common, Tensor):
        common = torch.full((), common, **options)
    least = max(1, LEAST_PIECE // block_size)  # blocks
    most = columns if isinstance(num_common_blocks, Tensor) else num_common_blocks
    rows = num_tokens * (num_heads // num_kv_heads)
    pieces = max(1, min(_pieces(rows, num_kv_heads, block_tables.device), most // least))

    common = common.view(())
    each = ((common + pieces - 1) // pieces).clamp_min(least)  # blocks of a piece
    begin = torch.arange(pieces, **options) * each
    first = torch.cat([begin, common.expand(num_seqs)])  # block of each row
    index = first[:, None] + torch.arange(columns, device=block_tables.device)
    tables = torch.cat([block_tables[:1].expand(pieces, columns), block_tables])
    of_pieces = torch.minimum((common - begin).clamp_min(0), each) * block_size
    own = (seq_lens - common * block_size).clamp_min(0)
    copied = pieces * num_tokens
    if query_start_loc is None:
        starts = torch.arange(copied, copied + num_seqs + 1, **options)
    else:
        starts = query_start_loc + copied
    return CascadePlan(
        pieces,
        tables.gather(1, index.clamp_(max=columns - 1)),
        torch.cat([of_pieces, own]),
        torch.cat([torch.arange(pieces, **options) * num_tokens, starts]),
    )


def _pieces(rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Pieces of the common tokens, so that a GPU has work for all of its multiprocessors."""
    if device.type != "cuda":
        return 1
    blocks = num_kv_heads * -(-rows // ROWS_OF_A_BLOCK)
    return torch.cuda.get_device_properties(device).multi_processor_count // max(1, blocks)


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_common_blocks: int | Tensor | CascadePlan,
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
    these are read once and not once a sequence; each sequence attends to the rest of its own; and
    :func:`combine_attn_partials` merges the two by their log-sum-exp (Ye et al. 2024, cascade
    inference in FlashInfer; Juravsky et al. 2024, arXiv:2402.05099). Equal to
    :func:`paged_attention` up to rounding. With one query token a sequence, and no sinks, a GPU
    gets both levels as one mixed batch, and works on them side by side; it pays where
    :func:`cascade_pays` says. Chunks of prompts gain little: they are bound by matrix products,
    not by memory.

    Args:
        num_common_blocks: leading blocks that all rows of block_tables share, as
            :meth:`KVCacheManager.num_common_prefix_blocks` counts them; 0: a plain call. They are
            to hold tokens that all query tokens see: every sequence has at least num_common_blocks
            * block_size - 1 tokens before its first query token. (A prefix that was computed before
            and at least one token that was not.) Lengths are on the device, so this is not looked
            at; a padded row with a query token gives attention to the common blocks. Or an int32
            tensor, as :func:`cascade_plan` has it. Or what that gave for these tables, lengths and
            starts, where several layers have the same.
        The others: as :func:`paged_attention` has them. ALiBi and windows are not for cascades.

    Returns:
        out, or (out, lse), as :func:`paged_attention` does.

    Raises:
        RuntimeError: as :func:`paged_attention` does, and where num_common_blocks is negative or
            more than the columns of block_tables.
    """
    shared = {"scale": scale, "softcap": softcap, "layout": layout}
    shared |= {"k_scale": k_scale, "v_scale": v_scale}
    own = {"query_start_loc": query_start_loc, "max_query_len": max_query_len, "sinks": sinks}
    plan = num_common_blocks if isinstance(num_common_blocks, CascadePlan) else None
    counted = plan is None and not isinstance(num_common_blocks, Tensor)
    if counted:
        num_common_blocks = operator.index(num_common_blocks)
    if block_tables.shape[0] == 0 or (counted and num_common_blocks == 0):
        return paged_attention(
            query, key_cache, value_cache, block_tables, seq_lens, out=out, return_lse=return_lse,
            **own, **shared,
        )  # fmt: skip
    if counted and not 0 < num_common_blocks <= block_tables.shape[1]:
        raise RuntimeError(
            f"cascade_attention: num_common_blocks: expected 0 to {block_tables.shape[1]} (the "
            f"columns of block_tables), got {num_common_blocks}"
        )
    if plan is not None and plan.seq_lens.shape[0] - plan.pieces != block_tables.shape[0]:
        raise RuntimeError(
            f"cascade_attention: plan: expected one of {block_tables.shape[0]} sequences (from "
            f"block_tables), got one of {plan.seq_lens.shape[0] - plan.pieces}"
        )
    num_tokens, num_heads, _ = query.shape
    if plan is None:
        plan = cascade_plan(
            block_tables,
            seq_lens,
            num_common_blocks,
            block_size=value_cache.shape[1 if layout == "NHD" else 2 if layout == "HND" else 3],
            num_heads=num_heads,
            num_kv_heads=key_cache.shape[2 if layout == "NHD" else 1],
            query_start_loc=query_start_loc,
            num_tokens=num_tokens,
        )
    pieces = plan.pieces
    parts = query.new_empty(pieces + 1, *query.shape)
    if query_start_loc is None and sinks is None and query.device.type in SIDE_BY_SIDE:
        # The only query token of a sequence has nothing after it: causal or not is the same to it.
        _, lses = paged_attention(
            query.repeat(pieces + 1, 1, 1), key_cache, value_cache, plan.block_tables,
            plan.seq_lens, query_start_loc=plan.query_start_loc, max_query_len=num_tokens,
            causal=False, out=parts.flatten(0, 1), return_lse=True, **shared,
        )  # fmt: skip
    else:
        _, common_lses = paged_attention(
            query.repeat(pieces, 1, 1), key_cache, value_cache, plan.block_tables[:pieces],
            plan.seq_lens[:pieces], query_start_loc=plan.query_start_loc[: pieces + 1],
            max_query_len=num_tokens, causal=False, out=parts[:pieces].flatten(0, 1),
            return_lse=True, **shared,
        )  # fmt: skip
        _, own_lses = paged_attention(
            query, key_cache, value_cache, plan.block_tables[pieces:], plan.seq_lens[pieces:],
            out=parts[pieces], return_lse=True, **own, **shared,
        )  # fmt: skip
        lses = torch.cat([common_lses, own_lses])
    if out is None:
        out = torch.empty_like(parts[0])
    lse = torch.empty_like(lses[:num_tokens]) if return_lse else None
    combine_attn_partials(out, parts, lses.view(pieces + 1, num_tokens, num_heads), lse)
    return out if lse is None else (out, lse)
