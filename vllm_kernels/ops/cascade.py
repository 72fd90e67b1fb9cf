"""Attention of sequences that begin with the same blocks, which are then read once."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._types import Layout
from ..errors import Error, InvalidArgument, InvalidType
from ._common import check_tensors, refuse_8_bit_query, shape_of
from ._refusals import renamed
from .merge_attn_states import combine_attn_partials
from .paged_attention import paged_attention

__all__ = ["CascadePlan", "cascade_attention", "cascade_pays", "cascade_plan"]

NAME = "cascade_attention"
MIN_SPLIT_TOKENS = 512
ROWS_OF_A_CTA = 128  # query rows of a KV head that a CTA of the CUDA kernel computes

MIN_SAVED_BYTES = {"cuda": 300_000_000, "cpu": 2_000_000}
"""By device: the bytes of K and V per layer that a cascade must save to be worthwhile. On an H200
these bytes come mostly from L2, at about 12 TB/s. A cascade costs 18 us (copies of the queries, a
launch with many rows, the combination), and it cannot use the fused decode step (4 to 6 us)."""


def cascade_pays(num_seqs: int, num_common: int, token_bytes: int, device: torch.device) -> bool:
    """Whether :func:`cascade_attention` is faster than :func:`paged_attention` for sequences of one
    query token each. It saves reads of ``(num_seqs - 1) * num_common * token_bytes`` bytes and
    costs more launches.

    Args:
        num_seqs: sequences of the batch.
        num_common: tokens that all of them share.
        token_bytes: K and V of a token in one layer.
        device: of the cache.

    Returns:
        Whether it saves at least 300 MB on a GPU, 2 MB on a CPU.

    Raises:
        AttributeError: for a device that is no torch.device.

    Example:
        >>> vllm_kernels.cascade_pays(2, 16, 4096, torch.device("cpu"))
        False
    """
    return (num_seqs - 1) * num_common * token_bytes >= MIN_SAVED_BYTES.get(device.type, math.inf)


ONE_MIXED_BATCH = ("cuda",)
"""Devices that compute both levels in one mixed batch. (On a CPU a separate call for single tokens
is faster.)"""


@dataclass(frozen=True)
class CascadePlan:
    """The tables, lengths and starts of :func:`cascade_attention`, made by :func:`cascade_plan`.

    The first ``num_splits`` sequences are splits of the common blocks, each with all query tokens.
    Then comes the rest of each sequence.

    Example:
        >>> tables = torch.tensor([[3, 1], [3, 2]]).int()  # block 3 is common
        >>> lens = torch.tensor([20, 25]).int()
        >>> plan = vllm_kernels.cascade_plan(
        ...     tables, lens, 1, block_size=16, num_heads=8, num_kv_heads=2
        ... )
        >>> plan.seq_lens.tolist()  # the common block, then the rest of both
        [16, 4, 9]
    """

    num_splits: int
    block_tables: Tensor  # int32 [num_splits + num_seqs, blocks]
    seq_lens: Tensor  # int32 [num_splits + num_seqs]
    query_start_loc: Tensor  # int32 [num_splits + num_seqs + 1], over num_splits + 1 query copies


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
    """Makes the plan of one pass for :func:`cascade_attention`; all layers share it. It contains
    tables and lengths, so each pass needs a new plan. (A CUDA graph recomputes it in each replay.)

    Args:
        block_tables, seq_lens, query_start_loc: as for :func:`cascade_attention`.
        num_common_blocks: a number, or an int32 tensor of one element on the device. With a tensor,
            one CUDA graph serves any number, including 0.
        block_size: tokens of a block.
        num_heads, num_kv_heads: of the query and of the cache, on this rank.
        num_tokens: query tokens, required with query_start_loc; num_seqs by default.

    Returns:
        The plan, a few tensors on block_tables' device.

    Raises:
        InvalidArgument: for block_tables without two dimensions.
        InvalidType: for what is no tensor.

    Example:
        >>> tables = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)  # block 0 is common
        >>> lengths = torch.tensor([20, 18], dtype=torch.int32)
        >>> plan = vllm_kernels.cascade_plan(
        ...     tables, lengths, 1, block_size=16, num_heads=4, num_kv_heads=2
        ... )
        >>> plan.seq_lens.tolist()  # the common tokens, then the rest of each sequence
        [16, 4, 2]
    """
    check_tensors("cascade_plan", block_tables=block_tables, seq_lens=seq_lens)
    if query_start_loc is not None:
        check_tensors("cascade_plan", query_start_loc=query_start_loc)
    num_seqs, columns = shape_of(
        "cascade_plan", "block_tables", block_tables, "num_seqs", "max_blocks_per_seq"
    )
    if num_tokens is None:
        num_tokens = num_seqs
    options: dict[str, Any] = {"dtype": torch.int32, "device": block_tables.device}
    common = num_common_blocks
    if not isinstance(common, Tensor):
        common = torch.full((), common, **options)
    min_blocks = max(1, MIN_SPLIT_TOKENS // block_size)  # per split
    max_blocks = columns if isinstance(num_common_blocks, Tensor) else num_common_blocks
    rows = num_tokens * (num_heads // num_kv_heads)
    num_splits = _num_splits(rows, num_kv_heads, block_tables.device)
    num_splits = max(1, min(num_splits, max_blocks // min_blocks))

    common = common.view(())
    each = ((common + num_splits - 1) // num_splits).clamp_min(min_blocks)  # blocks per split
    begin = torch.arange(num_splits, **options) * each
    first = torch.cat([begin, common.expand(num_seqs)])  # block of each row
    index = first[:, None] + torch.arange(columns, device=block_tables.device)
    tables = torch.cat([block_tables[:1].expand(num_splits, columns), block_tables])
    split_lens = torch.minimum((common - begin).clamp_min(0), each) * block_size
    own = (seq_lens - common * block_size).clamp_min(0)
    copied = num_splits * num_tokens
    if query_start_loc is None:
        starts = torch.arange(copied, copied + num_seqs + 1, **options)
    else:
        starts = query_start_loc + copied
    return CascadePlan(
        num_splits,
        tables.gather(1, index.clamp_(max=columns - 1)),
        torch.cat([split_lens, own]),
        torch.cat([torch.arange(num_splits, **options) * num_tokens, starts]),
    )


def _num_splits(rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Splits of the common tokens that give every SM of a GPU work."""
    if device.type != "cuda":
        return 1
    ctas = num_kv_heads * -(-rows // ROWS_OF_A_CTA)
    return torch.cuda.get_device_properties(device).multi_processor_count // max(1, ctas)


@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_common_blocks: int | Tensor | CascadePlan,
    *,
    scale: float | None = ...,
    query_start_loc: Tensor | None = ...,
    max_query_len: int | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_common_blocks: int | Tensor | CascadePlan,
    *,
    scale: float | None = ...,
    query_start_loc: Tensor | None = ...,
    max_query_len: int | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    num_common_blocks: int | Tensor | CascadePlan,
    *,
    scale: float | None = ...,
    query_start_loc: Tensor | None = ...,
    max_query_len: int | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    layout: Layout = "vllm",
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`paged_attention`, causal, where all tables begin with the same blocks.

    All query tokens attend to the common blocks as one sequence, not causally. So these blocks are
    read once, not once per sequence. Each sequence then attends to the rest of its own blocks, and
    :func:`combine_attn_partials` combines both by their log-sum-exp (Ye et al. 2024, cascade
    inference in FlashInfer; Juravsky et al. 2024, arXiv:2402.05099). The result equals
    :func:`paged_attention` up to rounding. With one query token per sequence and no sinks, a GPU
    computes both levels concurrently, in one mixed batch; :func:`cascade_pays` says when this is
    faster. Chunks of prompts gain little: they are bound by matrix products, not by memory.

    Args:
        num_common_blocks: leading blocks that all rows of block_tables share, as
            :meth:`KVCacheManager.num_common_prefix_blocks` counts them; 0: a plain call. All query
            tokens must attend to all tokens of these blocks: every sequence has at least
            num_common_blocks * block_size - 1 tokens before its first query token. (A computed
            prefix and at least one new token.) Lengths are on the device, so this is not checked; a
            padded row with a query token attends to the common blocks. Or an int32 tensor, as for
            :func:`cascade_plan`. Or the plan that it made of the same tables, lengths and starts,
            which several layers can share.
        The others: as for :func:`paged_attention`. ALiBi and windows are not supported.

    Warning:
        On CUDA a call may never end if lengths, starts or the plan change while it runs, or if
        another call uses the stream's workspace at the same time.

    Returns:
        out, or (out, lse), as :func:`paged_attention` does.

    Raises:
        RuntimeError: as :func:`paged_attention` does, and if num_common_blocks is negative or
            more than the columns of block_tables.

    Example:
        >>> query, (key_cache, value_cache) = torch.randn(2, 4, 64), torch.randn(2, 8, 16, 2, 64)
        >>> tables = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)  # block 0 is common
        >>> lengths = torch.tensor([20, 18], dtype=torch.int32)
        >>> arguments = (query, key_cache, value_cache, tables, lengths)
        >>> out = vllm_kernels.cascade_attention(*arguments, 1, layout="NHD")
        >>> want = vllm_kernels.paged_attention(*arguments, layout="NHD")
        >>> torch.allclose(out, want, atol=1e-5)
        True
    """
    shared: dict[str, Any] = {"scale": scale, "softcap": softcap, "layout": layout}
    shared |= {"k_scale": k_scale, "v_scale": v_scale}
    own: dict[str, Any] = {
        "query_start_loc": query_start_loc,
        "max_query_len": max_query_len,
        "sinks": sinks,
    }
    check_tensors(
        NAME,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
    )
    if not isinstance(num_common_blocks, (Tensor, CascadePlan)):
        try:
            num_common_blocks = operator.index(num_common_blocks)
        except TypeError:
            raise InvalidType(
                "cascade_attention: num_common_blocks: expected an int, a tensor or a CascadePlan, "
                f"got {num_common_blocks!r:.40}"
            ) from None
    refuse_8_bit_query(NAME, "query", query)
    try:
        no_common = isinstance(num_common_blocks, int) and num_common_blocks == 0
        if block_tables.shape[0] == 0 or no_common:
            return paged_attention(
                query, key_cache, value_cache, block_tables, seq_lens, out=out,
                return_lse=return_lse, **own, **shared,
            )  # fmt: skip
        _refuse_other_plans(num_common_blocks, block_tables)
        num_tokens, num_heads, _ = shape_of(
            NAME, "query", query, "num_tokens", "num_heads", "head_size"
        )
        if not isinstance(num_common_blocks, CascadePlan):
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
        else:
            plan = num_common_blocks
        partials = query.new_empty(plan.num_splits + 1, *query.shape)
        lses = _both_levels(query, key_cache, value_cache, plan, partials, own, shared)
        result = torch.empty_like(partials[0]) if out is None else out
        lse = torch.empty_like(lses[:num_tokens]) if return_lse else None
        lses = lses.view(plan.num_splits + 1, num_tokens, num_heads)
        combine_attn_partials(result, partials, lses, lse)
    except Error as error:
        raise renamed(error, NAME, {"output": "out"}) from None
    if query_start_loc is not None and (out is None or lse is not None):
        nobody = torch.arange(num_tokens, device=query.device) >= query_start_loc[-1]
        if out is None:
            result.masked_fill_(nobody[:, None, None], 0)
        if lse is not None:
            lse.masked_fill_(nobody[:, None], -torch.inf)
    return result if lse is None else (result, lse)


def _refuse_other_plans(
    num_common_blocks: int | Tensor | CascadePlan, block_tables: Tensor
) -> None:
    """Raises RuntimeError for a plan or a number that does not fit the tables."""
    plan = num_common_blocks if isinstance(num_common_blocks, CascadePlan) else None
    if isinstance(num_common_blocks, int) and not 0 < num_common_blocks <= block_tables.shape[1]:
        raise InvalidArgument(
            f"cascade_attention: num_common_blocks: expected 0 to {block_tables.shape[1]} (the "
            f"columns of block_tables), got {num_common_blocks}"
        )
    if plan is not None and plan.seq_lens.shape[0] - plan.num_splits != block_tables.shape[0]:
        raise InvalidArgument(
            f"cascade_attention: plan: expected one of {block_tables.shape[0]} sequences (from "
            f"block_tables), got one of {plan.seq_lens.shape[0] - plan.num_splits}"
        )


def _both_levels(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CascadePlan,
    partials: Tensor,
    own: dict[str, Any],
    shared: dict[str, Any],
) -> Tensor:
    """Writes partials [num_splits + 1, num_tokens, num_heads, head_size]: the common tokens' in
    splits, then each sequence's own. Returns their lse [(num_splits + 1) * num_tokens, num_heads].

    Args:
        own: arguments of :func:`paged_attention` for the sequences' own tokens.
        shared: for all.
    """
    num_splits = plan.num_splits
    num_tokens = len(query)
    if (
        own["query_start_loc"] is None
        and own["sinks"] is None
        and query.device.type in ONE_MIXED_BATCH
    ):
        # One query token is the last of its sequence: causal or not, the result is the same.
        _, lses = paged_attention(
            query.repeat(num_splits + 1, 1, 1), key_cache, value_cache, plan.block_tables,
            plan.seq_lens, query_start_loc=plan.query_start_loc, max_query_len=num_tokens,
            causal=False, out=partials.flatten(0, 1), return_lse=True, **shared,
        )  # fmt: skip
    else:
        _, common_lses = paged_attention(
            query.repeat(num_splits, 1, 1), key_cache, value_cache, plan.block_tables[:num_splits],
            plan.seq_lens[:num_splits], query_start_loc=plan.query_start_loc[: num_splits + 1],
            max_query_len=num_tokens, causal=False, out=partials[:num_splits].flatten(0, 1),
            return_lse=True, **shared,
        )  # fmt: skip
        _, own_lses = paged_attention(
            query, key_cache, value_cache, plan.block_tables[num_splits:],
            plan.seq_lens[num_splits:], out=partials[num_splits], return_lse=True, **own, **shared,
        )  # fmt: skip
        lses = torch.cat([common_lses, own_lses])
    return lses
