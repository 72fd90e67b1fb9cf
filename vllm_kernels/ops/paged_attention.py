"""Attention over the paged KV cache."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch._C import DisableTorchFunction
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._types import Layout
from ..errors import InvalidArgument
from ._common import (
    ONE_OR_EACH_HEAD,
    check_tensors,
    empty_out,
    entry_points,
    inference_only,
    may_skip_modes,
    modes_are_on,
    without_modes,
)
from ._refusals import refused
from .pages import attend_by_kv_head

__all__ = ["paged_attention", "paged_attention_workspace"]

# Called directly, once a layer and token: a function of `call` costs up to 0.3 us more.
_traced, _direct = entry_points("paged_attention")
_, _result = entry_points("paged_attention", "result")

_E4M3 = torch.float8_e4m3fn
_SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}


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
    k_token_scales: Tensor | None = ...,
    v_token_scales: Tensor | None = ...,
    tree_mask: Tensor | None = ...,
    k_token_zeros: Tensor | None = ...,
    v_token_zeros: Tensor | None = ...,
    total_seq_lens: Tensor | None = ...,
    shards: int = ...,
    shard: int = ...,
    interleave: int = ...,
    q_scale: Tensor | None = ...,
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
    k_token_scales: Tensor | None = ...,
    v_token_scales: Tensor | None = ...,
    tree_mask: Tensor | None = ...,
    k_token_zeros: Tensor | None = ...,
    v_token_zeros: Tensor | None = ...,
    total_seq_lens: Tensor | None = ...,
    shards: int = ...,
    shard: int = ...,
    interleave: int = ...,
    q_scale: Tensor | None = ...,
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
    k_token_scales: Tensor | None = ...,
    v_token_scales: Tensor | None = ...,
    tree_mask: Tensor | None = ...,
    k_token_zeros: Tensor | None = ...,
    v_token_zeros: Tensor | None = ...,
    total_seq_lens: Tensor | None = ...,
    shards: int = ...,
    shard: int = ...,
    interleave: int = ...,
    q_scale: Tensor | None = ...,
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
    k_token_scales: Tensor | None = None,
    v_token_scales: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_token_zeros: Tensor | None = None,
    v_token_zeros: Tensor | None = None,
    total_seq_lens: Tensor | None = None,
    shards: int = 1,
    shard: int = 0,
    interleave: int = 1,
    q_scale: Tensor | None = None,
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
    V should be finite: on CUDA, but not in float32, a tile of query tokens is multiplied with V at
    once, with weight 0 for invisible tokens, and 0 * NaN is NaN. So NaN or infinity in V of
    a later query token may reach earlier ones of the same sequence and KV head, and nothing else.

    A float8_e4m3fn query may be multiplied in 8 bits, as FlashAttention-3 does (Shah et al. 2024,
    arXiv:2407.08608): large prompts on Hopper, under the conditions of docs/attention.md. Then
    Q K^T multiplies e4m3, and weights are rounded to e4m3. The relative error is about 2.5e-2 where
    rows see many keys, instead of 1.3e-3. All other calls first convert the query to the 16 bits of
    out.

    Args:
        query: [num_tokens, num_heads, head_size], float32, float16, bfloat16 or float8_e4m3fn; the
            stride between tokens is free. head_size: a multiple of 8 (of 16 for an 8-bit cache)
            from 32 to 256. int4: a multiple of 32.
        key_cache, value_cache: dtype of query, float8_e4m3fn, float8_e5m2 or int8; float8_e4m3fn
            for such a query. By layout:

            - "vllm": K [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 bytes'
              worth, V [num_blocks, num_kv_heads, head_size, block_size]; a head's page contiguous
            - "NHD": [num_blocks, block_size, num_kv_heads, head_size]; last dimension contiguous
            - "HND": [num_blocks, num_kv_heads, block_size, head_size]; last dimension contiguous

            int4: uint8, of head_size / 2 elements in place of head_size, with k_token_zeros.
            All other strides are free: slices of a packed tensor need no copy. block_size is a
            power of two from 1 to 256; num_heads is a multiple of num_kv_heads.
        block_tables: [num_seqs, max_blocks_per_seq] int32; ids of invisible blocks (past the
            sequence's end, before its window) are ignored. [num_seqs, num_kv_heads,
            max_blocks_per_seq]: a table for each KV head, for one query token a sequence and a
            contiguous out. seq_lens may be [num_seqs, num_kv_heads] then. It goes without windows,
            ALiBi, sinks, trees, shards and scales a KV head, and in layout "NHD" without scales a
            token.
        seq_lens: [num_seqs] int32, in tokens, the query tokens included. A length above 0 but less
            than the sequence's query tokens is an error if causal, or if window_right is 0. CUDA
            reports it only with VLLM_KERNELS_CHECK=1; otherwise the tokens of negative positions
            give 0.
        scale: of the product, finite; head_size ** -0.5 by default.
        query_start_loc: [num_seqs + 1] int32, where each sequence's query tokens start in query;
            None: one a sequence. Tokens that no sequence owns get 0 and lse -inf; a given out stays
            as it is there. Padded rows of 0 tokens and 0 query tokens, as BatchBuffers has them,
            are fine.
        max_query_len: a bound on a sequence's query tokens, num_tokens by default. CUDA chooses the
            kernel by it, so give it wherever a batch has several tokens. Where it is too low, a CPU
            raises, and on CUDA no sequence owns the tokens past it.
        alibi_slopes: [num_heads] float32.
        sliding_window: tokens visible to a query token, itself included; 0: all.
        softcap: bound on the scaled product; 0: none.
        sinks: [num_heads] float32.
        k_scale, v_scale: for an 8-bit cache, whose elements stand for element * scale: float32,
            finite and > 0, one element or [num_kv_heads]; None stands for 1. (CUDA reports others
            only with VLLM_KERNELS_CHECK=1.)
        layout: "vllm", "NHD" or "HND". NHD taken for HND is no error where head numbers fit.
        out: like query, but float16 or bfloat16 for an 8-bit one; written; the stride between
            tokens is free. None: a new tensor, bfloat16 for an 8-bit query.
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
        k_token_scales, v_token_scales: of an int8 or int4 cache that has a scale a token and KV
            head, as :func:`reshape_and_cache_per_token_quant` writes it: float32 [num_blocks,
            num_kv_heads, block_size], the two outer strides are free. Both or neither, and then
            k_scale and v_scale are None. They may be any floats: a scale that is NaN makes NaN of
            the query tokens that see its token.
        tree_mask: [num_tokens] int32, uint32, int64 or uint64, for a tree of draft tokens. Bit j of
            a query token's word says whether it sees the query token j of its sequence; later ones
            it never sees. It sees itself and all tokens before the query tokens in any case. The
            positions that ALiBi counts are those of the cache. max_query_len is at most the bits of
            a word; causal, without a window. (Tree attention: Miao et al. 2024, arXiv:2305.09781.)
        k_token_zeros, v_token_zeros: of an int4 cache, as its scales and with their strides. They
            say that the bytes of a uint8 cache are int4: an element is ``(n - 8) * scale + zero``.
            They may be any floats, as scales.
        total_seq_lens: [num_seqs] int32, for a cache that has only one shard of each sequence, as
            :class:`vllm_kernels.distributed.ContextParallel` deals them. Token t of a sequence is
            in shard ``t // interleave % shards``. They count the tokens of all shards. seq_lens
            counts those of this one that are in the cache. The mask, windows and ALiBi then go by
            positions in the whole sequence. The query tokens are its last ones, whether this shard
            has them or not. Not with tree_mask or kv_indptr. On CUDA prompts run on the decode
            kernels.
        shards, shard, interleave: with total_seq_lens: the number of shards up to 65,536, the index
            of this one, and how many tokens in a row are in the same shard, a power of two up to
            16,384.
        q_scale: of a float8_e4m3fn query alone, whose elements stand for element * q_scale of their
            KV head. As k_scale is.

    Warning:
        On CUDA a call may never end if seq_lens or query_start_loc change while it runs, or if
        another call uses its workspace at the same time.

    Returns:
        out, or (out, lse) with lse [num_tokens, num_heads] float32, natural logarithm.
        (:func:`combine_attn_partials` takes it as it is, :func:`merge_attn_states` its transpose,
        contiguous.)

    Raises:
        Unsupported: for an option that a table for each KV head excludes.
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
        >>> tables = torch.tensor([[[3, 5], [7, 1]]], dtype=torch.int32)  # one for each KV head
        >>> vllm_kernels.paged_attention(query, keys, values, tables, length, layout="NHD").shape
        torch.Size([1, 4, 64])
        >>> pages = {"kv_indptr": [0, 2], "kv_indices": [3, 5], "last_page_len": [4]}  # the same
        >>> pages = {name: torch.tensor(x, dtype=torch.int32) for name, x in pages.items()}
        >>> csr = vllm_kernels.paged_attention(query, keys, values, **pages, layout="NHD")
        >>> torch.equal(out, csr)
        True
        >>> tree = torch.tensor([0b001, 0b011, 0b101], dtype=torch.int32)  # 1 and 2 follow 0
        >>> out = vllm_kernels.paged_attention(
        ...     query.expand(3, -1, -1), keys, values, table, length, layout="NHD",
        ...     query_start_loc=torch.tensor([0, 3], dtype=torch.int32), tree_mask=tree,
        ... )
        >>> eight = [x.to(torch.float8_e4m3fn) for x in (query, keys, values)]
        >>> scale = torch.tensor([0.5])
        >>> out = vllm_kernels.paged_attention(
        ...     *eight, table, length, layout="NHD", q_scale=scale
        ... )
        >>> out.dtype
        torch.bfloat16
    """
    if (
        out is None and query_start_loc is None and max_query_len is None and return_lse is False
        and alibi_slopes is None and sinks is None and k_scale is None and v_scale is None
        and workspace is None and causal and not (fixed_split_size or kv_ready)
        and kv_indptr is None and k_token_scales is None and v_token_scales is None
        and tree_mask is None and k_token_zeros is None and v_token_zeros is None
        and total_seq_lens is None and shards == 1 and shard == 0 and interleave == 1
        and q_scale is None and not is_dynamo_compiling()
    ):  # fmt: skip
        try:  # fewer arguments, and an op that makes its result: 3 us less
            if (
                not modes_are_on() and block_tables is not None and block_tables.dim() != 3
                and query.dtype is not _E4M3
            ):  # fmt: skip
                if is_grad_enabled():
                    inference_only("paged_attention", query, key_cache, value_cache)
                return _result(
                    query, key_cache, value_cache, block_tables, seq_lens, scale, layout,
                    sliding_window, softcap,
                )  # fmt: skip
            if not is_grad_enabled() and may_skip_modes():  # 1 us less than without_modes()
                with DisableTorchFunction():
                    if query.dtype is not _E4M3:
                        return _result(
                            query, key_cache, value_cache, block_tables, seq_lens, scale, layout,
                            sliding_window, softcap,
                        )  # fmt: skip
        except (RuntimeError, TypeError, IndexError, AttributeError):
            pass  # the general call has the error's text
    if modes_are_on() and may_skip_modes():
        return without_modes(paged_attention, locals())
    if is_grad_enabled():
        inference_only(
            "paged_attention",
            out, query, key_cache, value_cache, alibi_slopes, sinks, k_scale, v_scale,
            k_token_scales, v_token_scales, k_token_zeros, v_token_zeros, q_scale,
        )  # fmt: skip
    if not isinstance(query, Tensor):
        raise refused("paged_attention", TypeError(), {"query": query})
    last: tuple[object, ...] = ()  # arguments that most calls do not need
    max_pages = -1 if max_pages is None else max_pages
    if kv_indptr is not None:
        if block_tables is not None or seq_lens is not None:
            raise InvalidArgument(
                "paged_attention: kv_indptr: expected no block_tables and seq_lens, got some"
            )
        check_tensors("paged_attention", kv_indices=kv_indices, last_page_len=last_page_len)
        block_tables, seq_lens = kv_indices, last_page_len
        last = kv_indptr, max_pages
    if k_token_scales is not None or v_token_scales is not None:
        last = kv_indptr, max_pages, k_token_scales, v_token_scales
    if tree_mask is not None:
        check_tensors("paged_attention", tree_mask=tree_mask)
    op = _traced if is_dynamo_compiling() else _direct
    try:
        if kv_indptr is None and isinstance(block_tables, Tensor) and block_tables.dim() == 3:
            # locals() breaks the graph of torch 2.11's Dynamo.
            given = {
                "query": query, "key_cache": key_cache, "value_cache": value_cache,
                "block_tables": block_tables, "seq_lens": seq_lens, "out": out,
                "query_start_loc": query_start_loc, "alibi_slopes": alibi_slopes,
                "sliding_window": sliding_window, "sinks": sinks, "tree_mask": tree_mask,
                "total_seq_lens": total_seq_lens, "scale": scale, "softcap": softcap,
                "k_scale": k_scale, "v_scale": v_scale, "layout": layout,
                "return_lse": return_lse, "workspace": workspace,
                "fixed_split_size": fixed_split_size, "causal": causal,
                "window_right": window_right, "shards": shards,
                "k_token_scales": k_token_scales, "v_token_scales": v_token_scales,
                "k_token_zeros": k_token_zeros, "v_token_zeros": v_token_zeros, "q_scale": q_scale,
            }  # fmt: skip
            return attend_by_kv_head(paged_attention, given)
        if tree_mask is not None:
            tree_mask = tree_mask.view(_SIGNED.get(tree_mask.dtype, tree_mask.dtype))
        zero_unowned = out is None and query_start_loc is not None
        has_zeros = k_token_zeros is not None or v_token_zeros is not None
        takes_all = q_scale is not None or total_seq_lens is not None
        takes_all = takes_all or (shards, shard, interleave) != (1, 0, 1)
        if tree_mask is not None or zero_unowned or has_zeros or takes_all:
            last = kv_indptr, max_pages, k_token_scales, v_token_scales, tree_mask, zero_unowned
        if has_zeros or takes_all:
            last = *last, k_token_zeros, v_token_zeros
        if takes_all:
            last = *last, total_seq_lens, shards, shard, interleave, q_scale
        if scale is None:
            scale = max(1, query.shape[-1]) ** -0.5
        if max_query_len is None:
            max_query_len = 1 if query_start_loc is None else query.shape[0]
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
        if out is None:
            out = empty_out(query)
        op(
            out, lse, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale,
            alibi_slopes, sliding_window, softcap, sinks, k_scale, v_scale, layout, max_query_len,
            workspace, fixed_split_size, kv_ready, 0 if causal else window_right,
            *last,
        )  # fmt: skip
    except (RuntimeError, TypeError, IndexError) as error:
        raise refused("paged_attention", error, locals(), ONE_OR_EACH_HEAD) from None
    return out if lse is None else (out, lse)


def paged_attention_workspace(device: torch.device | str | int) -> Tensor:
    """Scratch on a CUDA device: uint8, 40 MiB, zeros.

    For one :func:`paged_attention` or :func:`fused_decode_attention` at a time. Every call leaves
    the relevant bytes zero, so one allocation is enough.

    Args:
        device: where the calls run.

    Warning:
        Two calls that share it at the same time give wrong results, or never end. A CUDA graph has
        that of the stream it was captured on: replays that overlap need one each.

    Raises:
        RuntimeError: for a device that torch cannot allocate on.

    Example:
        >>> vllm_kernels.paged_attention_workspace("cpu").nbytes >> 20
        40
    """
    return torch.zeros(_C.paged_attention_workspace_bytes, dtype=torch.uint8, device=device)
