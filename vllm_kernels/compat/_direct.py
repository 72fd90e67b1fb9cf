"""Calls that one op serves as they are, without a torch function before it: a check of Python's
costs more than all of the op's.

The op checks its arguments itself, before it writes. What it refuses, None here, goes the general
way of _attention, which serves more and has the errors with the names of the caller.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, is_grad_enabled
from torch._C import DisableTorchFunction
from torch.compiler import is_dynamo_compiling

from ..ops._common import entry_points, may_skip_modes, modes_are_on

_, _with_kvcache = entry_points("attention_with_kvcache")
_, _varlen = entry_points("varlen_attention", "result")

Window = Any  # (left, right) of ints or None; -1: all


def _may_be_direct(*tensors: Tensor | None) -> bool:
    """Whether the tensors are torch's own, outside of tracing, and no gradient is asked for."""
    if is_dynamo_compiling():
        return False
    with_grad = is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) is not Tensor or (with_grad and tensor.requires_grad)
        ):
            return False
    return True


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: Tensor,
    table: Tensor | None,
    scale: float | None,
    causal: bool,
    window: Window,
    softcap: float,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cumulative: bool = False,
) -> Tensor | None:
    """:func:`vllm_kernels.attention_with_kvcache`, or None.

    lengths [batch] int32; cumulative: [batch + 1], and the differences count.
    """
    if modes_are_on() and may_skip_modes():
        with DisableTorchFunction():  # by position: 0.5 us less than by name
            return with_kvcache(
                q, k_cache, v_cache, k, v, lengths, table, scale, causal, window, softcap, sinks,
                cu_seqlens_q, max_seqlen_q, cumulative,
            )  # fmt: skip
    try:
        if not _may_be_direct(q, k_cache, v_cache, k, v, sinks):
            return None
        if cu_seqlens_q is None and q.ndim != 4:
            return None
        left, right = window
        more: tuple[object, ...] = ()  # every argument costs 0.1 us
        if softcap or sinks is not None or cumulative:
            more = (softcap, None if sinks is None else sinks.float(), cumulative)
        return _with_kvcache(
            q, k_cache, v_cache, lengths, table, k, v, cu_seqlens_q, max_seqlen_q or 0, scale,
            left + 1 if left >= 0 else 0, 0 if causal else right if right >= 0 else -1, *more,
        )  # fmt: skip
    except (RuntimeError, TypeError, ValueError):
        return None


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    scale: float | None,
    causal: bool,
    window: Window,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor | None:
    """:func:`vllm_kernels.varlen_attention`, or None."""
    if modes_are_on() and may_skip_modes():
        with DisableTorchFunction():
            return varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal,
                window, softcap, sinks,
            )  # fmt: skip
    try:
        if not _may_be_direct(q, k, v, sinks):
            return None
        left, right = window
        longest = max_seqlen_k if type(max_seqlen_k) is int else 0
        return _varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, scale, left if left >= 0 else -1,
            0 if causal else right if right >= 0 else -1, softcap,
            None if sinks is None else sinks.float(), longest,
        )  # fmt: skip
    except (RuntimeError, TypeError, ValueError):
        return None
