"""Attention over contiguous keys and values."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ._common import (
    ONE_OR_EACH_HEAD,
    empty_out,
    entry_points,
    inference_only,
    may_skip_modes,
    modes_are_on,
    without_modes,
)
from ._refusals import refused

__all__ = ["varlen_attention"]

_traced, _direct = entry_points("varlen_attention")


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    max_query_len: int | None = ...,
    max_key_len: int | None = ...,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    workspace: Tensor | None = ...,
    q_scale: Tensor | None = ...,
    fixed_split_size: int = ...,
) -> Tensor: ...


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    max_query_len: int | None = ...,
    max_key_len: int | None = ...,
    out: Tensor | None = ...,
    return_lse: Literal[True],
    workspace: Tensor | None = ...,
    q_scale: Tensor | None = ...,
    fixed_split_size: int = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float | None = ...,
    causal: bool = ...,
    window: tuple[int, int] = ...,
    alibi_slopes: Tensor | None = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    max_query_len: int | None = ...,
    max_key_len: int | None = ...,
    out: Tensor | None = ...,
    return_lse: bool,
    workspace: Tensor | None = ...,
    q_scale: Tensor | None = ...,
    fixed_split_size: int = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_query_len: int | None = None,
    max_key_len: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
    q_scale: Tensor | None = None,
    fixed_split_size: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences with contiguous keys and values, without a cache.

    Sequence s has the query tokens ``query_start_loc[s] .. query_start_loc[s + 1]`` and the keys
    ``key_start_loc[s] .. key_start_loc[s + 1]``, ``n`` and ``m`` of them; either may be none. The
    ends are aligned: query token i has the position ``p = i + m - n`` among the keys, negative
    where n > m, and attends to the keys t with ``p - left <= t <= p + right``, where right is 0 if
    causal. Scores, softcap, ALiBi, sinks and lse are those of :func:`paged_attention`; a query
    token without visible keys gives 0 and -inf (its sink). As there, values that are not finite
    reach only query tokens of their own sequence and KV head.
    (FlashAttention: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691.)

    Args:
        query: [num_tokens, num_heads, head_size], float32, float16, bfloat16 or float8_e4m3fn; the
            stride between tokens is free. head_size: a multiple of 8 (of 16 for 8-bit keys) from 32
            to 256.
        key, value: [num_keys, num_kv_heads, head_size], dtype of query, float8_e4m3fn,
            float8_e5m2 or int8; float8_e4m3fn for such a query; the strides of tokens and heads are
            free (slices of a packed QKV product need no copy). num_heads is a multiple of
            num_kv_heads.
        query_start_loc, key_start_loc: [num_seqs + 1] int32, where each sequence starts and the
            last one ends. Query tokens that no sequence owns get 0 and lse -inf; a given out stays
            as it is there.
        causal: whether keys after a query token's position are invisible to it.
        window: (left, right): visible keys before and after the position; -1: all.
        k_scale, v_scale: for 8-bit keys and values, as :func:`paged_attention` has them.
        scale, alibi_slopes, softcap, sinks, max_query_len, out, return_lse, workspace, q_scale:
            likewise. That also says in which precision an 8-bit query is multiplied.
        max_key_len: the most keys of a sequence, if known. With a wrong one results differ by
            rounding at most. On CUDA it helps few query tokens on keys of unequal lengths.
        fixed_split_size: 0: the batch decides whether parts of a GPU share the keys of a sequence.
            Otherwise none do, and a sequence gives the same bits in every batch with the same
            max_query_len (:func:`paged_attention` has it with a number of tokens).

    Warning:
        On CUDA a call may never end if the starts change while it runs, or if another call uses its
        workspace at the same time.

    Returns:
        out, or (out, lse), as :func:`paged_attention` does.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. On the CPU also for a start out of range, before anything is
            written; on CUDA such a row is contained.

    Example:
        >>> qkv = torch.randn(7, 3, 2, 64)  # two sequences, of 3 and 4 tokens
        >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> out = vllm_kernels.varlen_attention(*qkv.unbind(1), starts, starts)
        >>> torch.allclose(out[0], qkv[0, 2])  # the first token sees only itself
        True
        >>> eight = [x.to(torch.float8_e4m3fn) for x in qkv.unbind(1)]
        >>> vllm_kernels.varlen_attention(*eight, starts, starts, q_scale=torch.ones(2)).dtype
        torch.bfloat16
    """
    if modes_are_on() and may_skip_modes():
        return without_modes(varlen_attention, locals())
    if is_grad_enabled():
        inference_only(
            "varlen_attention",
            out, query, key, value, alibi_slopes, sinks, k_scale, v_scale, q_scale,
        )  # fmt: skip
    if not isinstance(query, Tensor):
        raise refused("varlen_attention", TypeError(), {"query": query})
    op = _traced if is_dynamo_compiling() else _direct
    try:
        if len(window) != 2:
            raise TypeError
        if scale is None:
            scale = max(1, query.shape[-1]) ** -0.5
        if max_query_len is None:
            max_query_len = query.shape[0]
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
        zero_unowned = out is None
        if out is None:
            out = empty_out(query)
        is_plain = q_scale is None and fixed_split_size == 0 and max_key_len is None
        if max_key_len is None:
            max_key_len = 0
        # Fewer arguments cost less.
        rest = () if is_plain else (q_scale, fixed_split_size, max_key_len)
        op(
            out, lse, query, key, value, query_start_loc, key_start_loc, scale, alibi_slopes,
            window[0], 0 if causal else window[1], softcap, sinks, k_scale, v_scale, max_query_len,
            workspace, zero_unowned, *rest,
        )  # fmt: skip
    except (RuntimeError, TypeError, IndexError) as error:
        raise refused("varlen_attention", error, locals(), ONE_OR_EACH_HEAD) from None
    return out if lse is None else (out, lse)
