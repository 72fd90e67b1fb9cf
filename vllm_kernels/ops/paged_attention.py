"""Attention over the paged KV cache, and over contiguous keys."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._types import KVCacheDType, Layout
from ..errors import InvalidArgument
from ._common import (
    ONE_OR_EACH_HEAD,
    calls,
    check_tensors,
    entry_points,
    inference_only,
    may_skip_modes,
    modes_are_on,
    without_modes,
)
from ._refusals import refused

__all__ = [
    "fused_decode_attention",
    "combine_attn_partials",
    "merge_attn_states",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_attention_workspace",
    "varlen_attention",
]

call = calls(["merge_attn_states", "combine_attn_partials"])

# Called directly, once a layer and token: a function of `call` costs up to 0.3 us more.
_traced_v1, _direct_v1 = entry_points("paged_attention_v1")
_traced_v2, _direct_v2 = entry_points("paged_attention_v2")
_traced, _direct = entry_points("paged_attention")
_, _result = entry_points("paged_attention", "result")
_traced_varlen, _direct_varlen = entry_points("varlen_attention")
_traced_fused, _direct_fused = entry_points("fused_decode_attention")


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: KVCacheDType,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Decode attention over a paged KV cache, by the kernels of :func:`paged_attention`.

    ``out[s, h] = softmax(scale * q[s, h] . K) V`` over the ``seq_lens[s]`` tokens that
    ``block_tables[s]`` names (Kwon et al. 2023, arXiv:2309.06180; vLLM's op of the same name).
    A sequence of length 0 gives 0. Every page is read once per KV head, not once per query head.
    On CUDA the stream's workspace of 40 MiB holds partials, and a result may vary with the batch by
    rounding.

    Args:
        out: [num_seqs, num_heads, head_size], contiguous, written.
        query: [num_seqs, num_heads, head_size], float32, float16 or bfloat16; the stride between
            sequences is free.
        key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 bytes' worth.
        value_cache: [num_blocks, num_kv_heads, head_size, block_size].
        num_kv_heads: a divisor of num_heads.
        scale: of the product, usually head_size ** -0.5.
        block_tables: [num_seqs, max_blocks_per_seq] int32; ids past a sequence's end are ignored.
        seq_lens: [num_seqs] int32, in tokens.
        block_size: 8, 16 or 32 tokens.
        max_seq_len: a bound on seq_lens; needs no memory, so it may be any length.
        alibi_slopes: [num_heads] float32; adds slope * (t - seq_len + 1) to the logit of token t.
        kv_cache_dtype: "auto" (query's dtype), "fp8" or "fp8_e4m3", "fp8_e5m2" (uint8 tensors).
        k_scale, v_scale: one float32 on the same device; 8-bit elements stand for element * scale.
        tp_rank ... blocksparse_head_sliding_step: vLLM's block-sparse pattern, on when
            blocksparse_vert_stride > 1 (csrc/ops/paged_attention.h).

    Head sizes: multiples of 8 from 32 to 256 (of 16 for 8-bit caches).

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. On the CPU also for a length or block id out of range; on CUDA
            such a row is contained (clamped, skipped).

    Example:
        >>> query, out = torch.randn(1, 4, 64), torch.empty(1, 4, 64)
        >>> key_cache, value_cache = torch.zeros(2, 2, 16, 16, 4), torch.ones(2, 2, 64, 16)
        >>> table = torch.tensor([[1]], dtype=torch.int32)
        >>> length, one = torch.tensor([5], dtype=torch.int32), torch.ones(1)
        >>> vllm_kernels.paged_attention_v1(
        ...     out, query, key_cache, value_cache, 2, 0.125, table, length, 16, 5, None, "auto",
        ...     one, one,
        ... )
        >>> torch.allclose(out, torch.ones(1, 4, 64))
        True
    """
    if is_grad_enabled():
        try:  # asked here first: a call of inference_only() costs 0.5 us
            asks_for_grad = (
                out.requires_grad
                or query.requires_grad
                or key_cache.requires_grad
                or value_cache.requires_grad
                or k_scale.requires_grad
                or v_scale.requires_grad
                or (alibi_slopes is not None and alibi_slopes.requires_grad)
            )
        except AttributeError:  # no tensor: the op's schema refuses it by name
            asks_for_grad = False
        if asks_for_grad:
            inference_only(
                "paged_attention_v1",
                out, query, key_cache, value_cache, k_scale, v_scale, alibi_slopes,
            )  # fmt: skip
    op = _traced_v1 if is_dynamo_compiling() else _direct_v1
    try:
        if blocksparse_vert_stride <= 1:  # the pattern is off; every argument costs 0.1 us
            op(
                out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
                block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
            )  # fmt: skip
        else:
            op(
                out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
                block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank,
                blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
                blocksparse_head_sliding_step,
            )  # fmt: skip
    except (RuntimeError, TypeError) as error:
        raise refused("paged_attention_v1", error, locals()) from None


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: KVCacheDType,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """:func:`paged_attention_v1` with vLLM's scratch arguments, which are checked and not used.

    Both run :func:`paged_attention`'s kernels. The contents of the scratch are unspecified.
    The other arguments are those of v1.

    Args:
        exp_sum: [num_seqs, num_heads, partitions] float32.
        max_logits: [num_seqs, num_heads, partitions] float32.
        tmp_out: [num_seqs, num_heads, partitions, head_size] in out's dtype. partitions must be at
            least ceil(max_seq_len / 512).

    Raises:
        RuntimeError: as :func:`paged_attention_v1`, and for scratch of another dtype or shape, or
            with fewer partitions.

    Example:
        >>> query, out = torch.randn(1, 4, 64), torch.empty(1, 4, 64)
        >>> exp_sum, max_logits, tmp_out = (torch.empty(1, 4, 1, *d) for d in ((), (), (64,)))
        >>> key_cache, value_cache = torch.zeros(2, 2, 16, 16, 4), torch.ones(2, 2, 64, 16)
        >>> table = torch.tensor([[1]], dtype=torch.int32)
        >>> length, one = torch.tensor([5], dtype=torch.int32), torch.ones(1)
        >>> vllm_kernels.paged_attention_v2(
        ...     out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, 2, 0.125, table,
        ...     length, 16, 5, None, "auto", one, one,
        ... )
        >>> torch.allclose(out, torch.ones(1, 4, 64))
        True
    """
    if is_grad_enabled():
        inference_only(
            "paged_attention_v2", out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache,
            alibi_slopes, k_scale, v_scale,
        )  # fmt: skip
    op = _traced_v2 if is_dynamo_compiling() else _direct_v2
    try:
        if blocksparse_vert_stride <= 1:  # the pattern is off; every argument costs 0.1 us
            op(
                out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads,
                scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes,
                kv_cache_dtype, k_scale, v_scale,
            )  # fmt: skip
        else:
            op(
                out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads,
                scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes,
                kv_cache_dtype, k_scale, v_scale, tp_rank, blocksparse_local_blocks,
                blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step,
            )  # fmt: skip
    except (RuntimeError, TypeError) as error:
        raise refused("paged_attention_v2", error, {"exp_sums": exp_sum, **locals()}) from None


@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor | None = None,
    seq_lens: Tensor | None = None,
    *,
    scale: float | None = ...,
    query_start_loc: Tensor | None = ...,
    max_query_len: int | None = ...,
    alibi_slopes: Tensor | None = ...,
    sliding_window: int = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    workspace: Tensor | None = ...,
    fixed_split_size: int = ...,
    kv_ready: bool = ...,
    causal: bool = ...,
    window_right: int = ...,
    kv_indptr: Tensor | None = ...,
    kv_indices: Tensor | None = ...,
    last_page_len: Tensor | None = ...,
    max_pages: int | None = ...,
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor | None = None,
    seq_lens: Tensor | None = None,
    *,
    scale: float | None = ...,
    query_start_loc: Tensor | None = ...,
    max_query_len: int | None = ...,
    alibi_slopes: Tensor | None = ...,
    sliding_window: int = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: Literal[True],
    workspace: Tensor | None = ...,
    fixed_split_size: int = ...,
    kv_ready: bool = ...,
    causal: bool = ...,
    window_right: int = ...,
    kv_indptr: Tensor | None = ...,
    kv_indices: Tensor | None = ...,
    last_page_len: Tensor | None = ...,
    max_pages: int | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor | None = None,
    seq_lens: Tensor | None = None,
    *,
    scale: float | None = ...,
    query_start_loc: Tensor | None = ...,
    max_query_len: int | None = ...,
    alibi_slopes: Tensor | None = ...,
    sliding_window: int = ...,
    softcap: float = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: bool,
    workspace: Tensor | None = ...,
    fixed_split_size: int = ...,
    kv_ready: bool = ...,
    causal: bool = ...,
    window_right: int = ...,
    kv_indptr: Tensor | None = ...,
    kv_indices: Tensor | None = ...,
    last_page_len: Tensor | None = ...,
    max_pages: int | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor | None = None,
    seq_lens: Tensor | None = None,
    *,
    scale: float | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Layout = "vllm",
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
    fixed_split_size: int = 0,
    kv_ready: bool = False,
    causal: bool = True,
    window_right: int = -1,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    last_page_len: Tensor | None = None,
    max_pages: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of any query tokens to the pages of their sequences, causal by default.

    A sequence's query tokens are its last ones: of ``n`` query tokens, token i has the position
    ``p = seq_len - n + i`` and attends to the tokens t with ``p - sliding_window < t <= p``. That
    serves decoding (n = 1), speculative verification, chunked prefill and prefill. With::

        s(t) = cap(scale * q . k[t]) - slope * |t - p|,   cap(x) = softcap * tanh(x / softcap)

    the result is ``out = sum exp(s(t)) v[t] / (sum exp(s(t)) + exp(sink))`` and
    ``lse = log(sum exp(s(t)) + exp(sink))``, without exp(sink) if there are no sinks. A query
    token without visible tokens gives 0 and -inf (its sink); with causal=True, one of negative
    position too. ``return_lse`` changes no bit of out. (Pages: Kwon et al. 2023,
    arXiv:2309.06180; ALiBi: Press et al. 2022, arXiv:2108.12409; softcap: Gemma 2,
    arXiv:2408.00118; sinks: Xiao et al. 2024, arXiv:2309.17453, as logits of gpt-oss.)

    Slots that are visible to no query token of the sequence may hold anything. The visible ones of
    V should be finite: in 16 bits on CUDA a tile of query tokens is multiplied with V at once, with
    weight 0 for invisible tokens, and 0 * NaN is NaN. So NaN or infinity in V of
    a later query token may reach earlier ones of the same sequence and KV head, and nothing else.

    Args:
        query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; the stride between
            tokens is free. head_size: a multiple of 8 (of 16 for an 8-bit cache) from 32 to 256.
        key_cache, value_cache: dtype of query, float8_e4m3fn, float8_e5m2 or int8. By layout:

            - "vllm": K [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 bytes'
              worth, V [num_blocks, num_kv_heads, head_size, block_size]; a head's page contiguous
            - "NHD": [num_blocks, block_size, num_kv_heads, head_size]; last dimension contiguous
            - "HND": [num_blocks, num_kv_heads, block_size, head_size]; last dimension contiguous

            All other strides are free: slices of a packed tensor need no copy. block_size is a
            power of two from 1 to 256; num_heads is a multiple of num_kv_heads.
        block_tables: [num_seqs, max_blocks_per_seq] int32; ids of invisible blocks (past the
            sequence's end, before its window) are ignored.
        seq_lens: [num_seqs] int32, in tokens, the query tokens included. A length above 0 but less
            than the sequence's query tokens is an error if causal, or if window_right is 0. CUDA
            reports it only with VLLM_KERNELS_CHECK=1; otherwise the tokens of negative positions
            give 0. On CUDA a call whose seq_lens or query_start_loc change while it runs may not
            end.
        scale: of the product, finite; head_size ** -0.5 by default.
        query_start_loc: [num_seqs + 1] int32, where each sequence's query tokens start in query;
            None: one a sequence. Tokens that no sequence owns get 0 and lse -inf; a given out stays
            as it is there. Padded rows of 0 tokens and 0 query tokens, as BatchBuffers has them,
            are fine.
        max_query_len: a bound on a sequence's query tokens, num_tokens by default. CUDA chooses the
            kernel by it, so give it wherever a batch has several tokens. Where it is too low, a CPU
            raises and CUDA leaves a sequence's tokens past it out.
        alibi_slopes: [num_heads] float32.
        sliding_window: tokens visible to a query token, itself included; 0: all.
        softcap: bound on the scaled product; 0: none.
        sinks: [num_heads] float32.
        k_scale, v_scale: for an 8-bit cache, whose elements stand for element * scale: float32,
            finite and > 0, one element or [num_kv_heads]; None stands for 1. (CUDA reports others
            only with VLLM_KERNELS_CHECK=1.)
        layout: "vllm", "NHD" or "HND". NHD taken for HND is no error where head numbers fit.
        out: like query, written; the stride between tokens is free. None: a new tensor.
        return_lse: whether to return the log-sum-exp as well.
        workspace: scratch for CUDA from :func:`paged_attention_workspace`; not used on a CPU. None:
            one that belongs to the current stream. Calls that run at the same time need one each,
            as the default gives them, but for graphs captured on one stream and replayed on two.
        fixed_split_size: 0 chooses the splits of sequences to suit the batch. Otherwise a split has
            at most about this many tokens (2048, say), regardless of the rest of the batch: a
            sequence's result is then bit-identical in every batch called with the same
            max_query_len (batch-invariant mode). On CUDA the workspace bounds the splits: slice
            block_tables to the longest sequence. A CPU then does not split sequences.
        kv_ready: lets CUDA read tables, lengths, starts and pages before the kernels before it
            have ended. Only for callers who know that nothing that may still be running writes any
            of them: not after the cache writer of the same layer. A call whose lengths
            or starts still change may not end. (This library's kernels let the next kernel start
            early, so several consecutive ones may be running; a copy or one of torch's own kernels
            ends such a chain.) By default results depend on nothing that is read before all of them
            have ended: indices of up to 256 sequences are read early to load pages
            speculatively, and validated afterwards; a wrong speculation only costs time.
        causal: False: tokens after its position p are visible too, up to p + window_right.
        window_right: of causal = False only; -1: all of the sequence.
        kv_indptr, kv_indices, last_page_len: in place of block_tables and seq_lens, the table in
            CSR form as FlashInfer has it, int32 [num_seqs + 1], [num_page_ids] and [num_seqs].
            Sequence i has the pages kv_indices[kv_indptr[i] : kv_indptr[i + 1]], and
            last_page_len[i] tokens in the last one. Without pages it gives 0. Ids of no sequence
            are ignored.
        max_pages: a bound on a sequence's pages in CSR form; None: num_page_ids.

    Returns:
        out, or (out, lse) with lse [num_tokens, num_heads] float32, natural logarithm.
        (:func:`combine_attn_partials` takes it as it is, :func:`merge_attn_states` its transpose,
        contiguous.)

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. On the CPU also for a length, block id, query_start_loc or scale
            out of range, before anything is written; on CUDA such a row is contained (clamped,
            skipped).

    Example:
        >>> query = torch.randn(1, 4, 64)  # one new token
        >>> keys, values = torch.randn(8, 16, 2, 64), torch.ones(8, 16, 2, 64)
        >>> table = torch.tensor([[3, 5]], dtype=torch.int32)
        >>> length = torch.tensor([20], dtype=torch.int32)
        >>> out = vllm_kernels.paged_attention(query, keys, values, table, length, layout="NHD")
        >>> torch.allclose(out, torch.ones(1, 4, 64))
        True
        >>> pages = {"kv_indptr": [0, 2], "kv_indices": [3, 5], "last_page_len": [4]}  # the same
        >>> pages = {name: torch.tensor(x, dtype=torch.int32) for name, x in pages.items()}
        >>> csr = vllm_kernels.paged_attention(query, keys, values, **pages, layout="NHD")
        >>> torch.equal(out, csr)
        True
    """
    if modes_are_on() and may_skip_modes():
        return without_modes(paged_attention, locals())
    if is_grad_enabled():
        inference_only(
            "paged_attention",
            out, query, key_cache, value_cache, alibi_slopes, sinks, k_scale, v_scale,
        )  # fmt: skip
    if (
        out is None and query_start_loc is None and max_query_len is None and not return_lse
        and alibi_slopes is None and sinks is None and k_scale is None and v_scale is None
        and workspace is None and causal and not (fixed_split_size or kv_ready)
        and kv_indptr is None
        and not is_dynamo_compiling()
    ):  # fmt: skip
        plain = query, key_cache, value_cache, block_tables, seq_lens, scale, layout
        try:  # fewer arguments, and an op that makes its result: 3 us less
            return _result(*plain, sliding_window, softcap)
        except (RuntimeError, TypeError, IndexError):
            pass  # the general call has the error's text
    if not isinstance(query, Tensor):
        raise refused("paged_attention", TypeError(), {"query": query})
    list_of_pages: tuple[object, ...] = ()
    max_pages = -1 if max_pages is None else max_pages
    if kv_indptr is not None:
        if block_tables is not None or seq_lens is not None:
            raise InvalidArgument(
                "paged_attention: kv_indptr: expected no block_tables and seq_lens, got some"
            )
        check_tensors("paged_attention", kv_indices=kv_indices, last_page_len=last_page_len)
        block_tables, seq_lens = kv_indices, last_page_len
        list_of_pages = kv_indptr, max_pages
    op = _traced if is_dynamo_compiling() else _direct
    try:
        if scale is None:
            scale = max(1, query.shape[-1]) ** -0.5
        if max_query_len is None:
            max_query_len = 1 if query_start_loc is None else query.shape[0]
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
        if query_start_loc is not None:
            out = _owned_by_nobody(query, out, lse)
        elif out is None:
            out = query.new_empty(query.shape)
        op(
            out, lse, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale,
            alibi_slopes, sliding_window, softcap, sinks, k_scale, v_scale, layout, max_query_len,
            workspace, fixed_split_size, kv_ready, 0 if causal else window_right,
            *list_of_pages,
        )  # fmt: skip
    except (RuntimeError, TypeError, IndexError) as error:
        raise refused("paged_attention", error, locals(), ONE_OR_EACH_HEAD) from None
    return out if lse is None else (out, lse)


def _owned_by_nobody(query: Tensor, out: Tensor | None, lse: Tensor | None) -> Tensor:
    """Sets what tokens keep that no sequence owns: lse -inf, and 0 in an out that is made here."""
    if lse is not None:
        lse.fill_(-torch.inf)
    return query.new_zeros(query.shape) if out is None else out


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
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    workspace: Tensor | None = ...,
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
    out: Tensor | None = ...,
    return_lse: Literal[True],
    workspace: Tensor | None = ...,
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
    out: Tensor | None = ...,
    return_lse: bool,
    workspace: Tensor | None = ...,
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
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
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
        query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; the stride between
            tokens is free. head_size: a multiple of 8 (of 16 for 8-bit keys) from 32 to 256.
        key, value: [num_keys, num_kv_heads, head_size], dtype of query, float8_e4m3fn,
            float8_e5m2 or int8; the strides of tokens and heads are free (slices of a packed QKV
            product need no copy). num_heads is a multiple of num_kv_heads.
        query_start_loc, key_start_loc: [num_seqs + 1] int32, where each sequence starts and the
            last one ends. Query tokens that no sequence owns get 0 and lse -inf; a given out stays
            as it is there.
        causal: whether keys after a query token's position are invisible to it.
        window: (left, right): visible keys before and after the position; -1: all.
        k_scale, v_scale: for 8-bit keys and values, as :func:`paged_attention` has them.
        scale, alibi_slopes, softcap, sinks, max_query_len, out, return_lse, workspace: likewise.

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
    """
    if modes_are_on() and may_skip_modes():
        return without_modes(varlen_attention, locals())
    if is_grad_enabled():
        inference_only(
            "varlen_attention", out, query, key, value, alibi_slopes, sinks, k_scale, v_scale
        )
    if not isinstance(query, Tensor):
        raise refused("varlen_attention", TypeError(), {"query": query})
    op = _traced_varlen if is_dynamo_compiling() else _direct_varlen
    try:
        if scale is None:
            scale = max(1, query.shape[-1]) ** -0.5
        if max_query_len is None:
            max_query_len = query.shape[0]
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
        out = _owned_by_nobody(query, out, lse)
        op(
            out, lse, query, key, value, query_start_loc, key_start_loc, scale, alibi_slopes,
            window[0], 0 if causal else window[1], softcap, sinks, k_scale, v_scale, max_query_len,
            workspace,
        )  # fmt: skip
    except (RuntimeError, TypeError, IndexError) as error:
        raise refused("varlen_attention", error, locals(), ONE_OR_EACH_HEAD) from None
    return out if lse is None else (out, lse)


def fused_decode_attention(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    is_neox: bool = True,
    scale: float | None = None,
    bias: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    epsilon: float = 1e-6,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Layout = "vllm",
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    fixed_split_size: int = 0,
) -> Tensor:
    """A decode step from the QKV product to the result of attention, one token a sequence.

    The bias is added to the token's heads of ``qkv``; query and key are normalized (if weights are
    given) and rotated; key and value go to the token's slot of the paged cache; then the query
    attends to the pages of its sequence, the new token among them. As the decoder masked multi-head
    attention of FasterTransformer and RTP-LLM, and equal to the ops apart: an addition of the bias,
    :func:`rope_and_cache` and :func:`paged_attention`. On CUDA, in layout
    "vllm", one launch for a float16, bfloat16 or fp8 e4m3 cache, up to 8 query heads a KV head,
    head sizes up to 128 and pages of up to 16 tokens; else the launches of the two ops (which in
    the other layouts take as long).

    The new token's slot must be the one that tables and lengths give for the last token::

        slot_mapping[s] = block_tables[s, (seq_lens[s] - 1) // block_size] * block_size
                        + (seq_lens[s] - 1) % block_size

    in a block that no other sequence of the batch reads. The caller must ensure this; it is
    not checked. Attention reads the slot that the tables name. If ``slot_mapping`` names a slot of
    another sequence, it is undefined whether that sequence attends to the old token or the new one.
    A padded row of a CUDA graph has length 0, slot -1 and any valid position, and gives 0.

    Args:
        qkv: [num_seqs, (num_heads + 2 * num_kv_heads) * head_size], the heads of query, then of
            key, then of value; float32, float16 or bfloat16; tokens may be strided. The query's
            part is scratch: it holds nothing of use afterwards. Key's and value's are only read.
        positions: [num_seqs] int64, of the new tokens.
        cos_sin_cache, is_neox: as :func:`rotary_embedding` has them; partial rotary too.
        key_cache, value_cache: written; as :func:`paged_attention` has them. num_kv_heads and
            head_size are theirs.
        slot_mapping: [num_seqs] int64; -1: the token is not stored, and attention reads the
            old contents of the slot.
        block_tables: [num_seqs, max_blocks_per_seq] int32.
        seq_lens: [num_seqs] int32, in tokens, the new one included. On CUDA a call whose seq_lens
            change while it runs may not end.
        bias: [(num_heads + 2 * num_kv_heads) * head_size], dtype of qkv; added and rounded first.
        q_weight, k_weight: [head_size], dtype of qkv, of the RMS norm of every head; or None.
        epsilon: of the norm, finite, >= 0.
        scale, alibi_slopes, sliding_window, softcap, sinks: as :func:`paged_attention` has them.
        k_scale, v_scale, layout, workspace, fixed_split_size: likewise.
        out: [num_seqs, num_heads, head_size], written; the stride between sequences is free. None:
            a new tensor.

    Returns:
        out.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. On the CPU also for a position, slot, length or block id out of
            range, before anything is written. On CUDA such a row is contained: with a bad slot the
            token is not stored; with a bad position its key is not, and its result means nothing;
            lengths are clamped, blocks skipped.

    Example:
        >>> qkv = torch.randn(1, (4 + 2 * 2) * 64)  # 4 query heads, 2 KV heads
        >>> cos_sin_cache = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=1)
        >>> key_cache, value_cache = torch.zeros(2, 8, 16, 2, 64)
        >>> zero, one = torch.tensor([0]), torch.ones(1, dtype=torch.int32)
        >>> value = qkv[0, 6 * 64 :].view(2, 64)
        >>> out = vllm_kernels.fused_decode_attention(
        ...     qkv, zero, cos_sin_cache, key_cache, value_cache, zero, zero[None].int(), one,
        ...     layout="NHD",
        ... )
        >>> torch.allclose(out[0], value.repeat_interleave(2, dim=0))
        True
    """
    if is_grad_enabled():
        inference_only(
            "fused_decode_attention",
            out, qkv, bias, cos_sin_cache, key_cache, value_cache, q_weight, k_weight, alibi_slopes,
            sinks, k_scale, v_scale,
        )  # fmt: skip
    if not (isinstance(qkv, Tensor) and isinstance(value_cache, Tensor)):
        given = {"qkv": qkv, "value_cache": value_cache}
        raise refused("fused_decode_attention", TypeError(), given)
    op = _traced_fused if is_dynamo_compiling() else _direct_fused
    try:
        shape = _heads_of_query(qkv, value_cache, layout)
        if scale is None:
            scale = max(1, shape[2]) ** -0.5
        if out is None:
            out = qkv.new_empty(shape)
        op(
            out, qkv, bias, positions, cos_sin_cache, is_neox, key_cache, value_cache, slot_mapping,
            block_tables, seq_lens, scale, layout, k_scale, v_scale, q_weight, k_weight, epsilon,
            alibi_slopes, sliding_window, softcap, sinks, workspace, fixed_split_size,
        )  # fmt: skip
    except (RuntimeError, TypeError, IndexError) as error:
        raise refused("fused_decode_attention", error, locals(), ONE_OR_EACH_HEAD) from None
    return out


def _heads_of_query(qkv: Tensor, value_cache: Tensor, layout: Layout) -> tuple[int, int, int]:
    """[num_seqs, num_heads, head_size]; zeros for shapes that the op refuses before it checks
    out."""
    if qkv.dim() != 2 or value_cache.dim() != 4:
        return 0, 0, 0
    head_size = value_cache.shape[2 if layout == "vllm" else 3]
    num_kv_heads = value_cache.shape[2 if layout == "NHD" else 1]
    if head_size == 0 or qkv.shape[1] // head_size < 2 * num_kv_heads:
        return 0, 0, 0
    return qkv.shape[0], qkv.shape[1] // head_size - 2 * num_kv_heads, head_size


def paged_attention_workspace(device: torch.device | str | int) -> Tensor:
    """Scratch on a CUDA device: uint8, 40 MiB, zeros.

    For one :func:`paged_attention` or :func:`fused_decode_attention` at a time; two that share it
    at once give wrong results, or wait for each other for ever. (A CUDA graph has that of the
    stream it was captured on: replays that overlap need one each.) Every call leaves the relevant
    bytes zero, so one allocation is enough.

    Raises:
        RuntimeError: for a device that torch cannot allocate on.

    Example:
        >>> vllm_kernels.paged_attention_workspace("cpu").nbytes >> 20
        40
    """
    return torch.zeros(_C.paged_attention_workspace_bytes, dtype=torch.uint8, device=device)


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Merges attention over two disjoint sets of keys by their log-sum-exp.

    The registered op has output_lse second; this order is that of vLLM's wrapper. (Merging partial
    softmax results: Milakov and Gimelshein 2018, arXiv:1805.02867.)

    Args:
        output: [num_tokens, num_heads, head_size], written; may be prefix_output or suffix_output.
        prefix_output, suffix_output: the same shape and dtype; the strides of tokens and heads are
            free in all three.
        prefix_lse, suffix_lse: [num_heads, num_tokens] float32, contiguous, natural logarithm. -inf
            (and +inf) marks a part without keys, whose output is not read.
        output_lse: [num_heads, num_tokens] float32, written; may be prefix_lse or suffix_lse.

    Where both parts are empty the output is 0 and its lse -inf.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> prefix, suffix = torch.zeros(1, 1, 8), torch.ones(1, 1, 8)  # [tokens, heads, head_size]
        >>> lse, out = torch.zeros(1, 1), torch.empty(1, 1, 8)
        >>> vllm_kernels.merge_attn_states(out, prefix, lse, suffix, lse)
        >>> out[0, 0, 0].item()
        0.5
    """
    call.merge_attn_states(output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse)


def combine_attn_partials(
    output: Tensor,
    out_partial: Tensor,
    lse_partial: Tensor,
    output_lse: Tensor | None = None,
    *,
    base2: bool = False,
) -> None:
    """Combines attention over disjoint sets of keys, in one launch.

    It takes partial results as :func:`paged_attention` gives them and weighs them by their
    log-sum-exp. It is :func:`merge_attn_states` for any number of partial results, as FlashInfer's
    merge_states and FlashAttention-3's flash_attn_combine. The registered op has output_lse second.

    Args:
        output: [num_tokens, num_heads, head_size], written; the dtype of out_partial. The strides
            of tokens and heads are free.
        out_partial: [num_partials, num_tokens, num_heads, head_size], float32, float16 or bfloat16.
            All strides but the last are free.
        lse_partial: [num_partials, num_tokens, num_heads] float32, contiguous, natural logarithm.
            -inf (and +inf) marks a partial result without keys. Its out_partial is not read.
        output_lse: [num_tokens, num_heads] float32, written.
        base2: Whether both lse are logarithms to base 2, as FlashInfer has them. They are converted
            outside the kernel, by one more launch each.

    Where all partial results are empty the output is 0 and its lse -inf.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> partials = torch.stack([torch.zeros(1, 1, 8), torch.ones(1, 1, 8)])
        >>> out = torch.empty(1, 1, 8)
        >>> vllm_kernels.combine_attn_partials(out, partials, torch.zeros(2, 1, 1))
        >>> out[0, 0, 0].item()
        0.5
    """
    if base2 and isinstance(lse_partial, Tensor):
        lse_partial = lse_partial * math.log(2)
    call.combine_attn_partials(output, output_lse, out_partial, lse_partial)
    if base2 and output_lse is not None:
        output_lse.div_(math.log(2))
