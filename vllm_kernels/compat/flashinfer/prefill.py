"""FlashInfer's attention of several query tokens a sequence: paged caches, ragged keys, prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import varlen_attention
from ...ops._common import refuse_8_bit_query
from .._checks import check_tensors, refuse
from ._common import KvLayout, PagedKvCache, Scores, Wrapper, check_layout, finish, same_dtype
from ._pages import PagedWrapper, Pages, Starts

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: KvLayout = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Attention of the query tokens of one sequence, which are its last ones.

    Args:
        q: [qo_len, num_qo_heads, head_dim].
        k, v: [kv_len, num_kv_heads, head_dim], or [num_kv_heads, kv_len, head_dim] in HND.
        causal: whether keys after a token's own position are invisible to it.
        window_left: tokens visible before a token's position; -1: all.
        use_fp16_qk_reduction, backend, rope_scale, rope_theta: ignored.

    Returns:
        out like q, or (out, lse) with lse [qo_len, num_qo_heads] in base 2.

    Raises:
        Unsupported: for masks, scales of fp8 queries, or a pos_encoding_mode other than NONE.
        InvalidArgument: for a shape, dtype or layout that does not fit, by name.

    Example:
        >>> from vllm_kernels.compat.flashinfer import single_prefill_with_kv_cache
        >>> q, k, v = torch.randn(3, 4, 64), torch.randn(9, 2, 64), torch.ones(9, 2, 64)
        >>> single_prefill_with_kv_cache(q, k, v, causal=True).shape
        torch.Size([3, 4, 64])

    Source: flashinfer.single_prefill_with_kv_cache.
    """
    name = "single_prefill_with_kv_cache"
    check_layout(name, kv_layout)
    check_tensors(name, q=q, k=k, v=v)
    refuse_8_bit_query(name, "q", q)
    same_dtype(name, "o_dtype", o_dtype, q)
    scores = Scores.read(
        name, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v,
    )  # fmt: skip
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    starts = torch.tensor([[0, q.shape[0]], [0, k.shape[0]]], dtype=torch.int32, device=q.device)
    result = varlen_attention(
        q, k, v, starts[0], starts[1], window=(window_left, -1), causal=causal,
        return_lse=return_lse, **scores.options(q),
    )  # fmt: skip
    return finish(result)


def single_prefill_with_kv_cache_return_lse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """:func:`single_prefill_with_kv_cache` with return_lse.

    Raises:
        InvalidArgument: as that function does, for a tensor that does not fit, by name.

    Example:
        >>> from vllm_kernels.compat.flashinfer import single_prefill_with_kv_cache_return_lse
        >>> q = torch.randn(3, 2, 64)
        >>> out, lse = single_prefill_with_kv_cache_return_lse(q, q, q, causal=True)
        >>> lse.shape
        torch.Size([3, 2])

    Source: flashinfer.single_prefill_with_kv_cache_return_lse.
    """
    return single_prefill_with_kv_cache(q, k, v, **options, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of several query tokens a sequence over a paged cache.

    It serves prompts, chunks of prompts, verification and mixed batches: a sequence's query tokens
    are its last ones. As with the decode wrapper, plan() copies nothing to the host. Give it
    qo_indptr on the CPU or max_token_per_sequence: kernels are chosen by the longest query.

    Args:
        float_workspace_buffer: names the device; it is not used otherwise.
        kv_layout: of the pages, "NHD" or "HND".
        use_cuda_graph: whether the table and qo_indptr live in the four buffers.
        qo_indptr_buf, paged_kv_indptr_buf: int32 [batch_size + 1].
        paged_kv_indices_buf: int32, as long as the longest list of pages.
        paged_kv_last_page_len_buf: int32 [batch_size].
        backend: ignored; the kernel is chosen by the shape.

    Example:
        >>> from vllm_kernels.compat.flashinfer import BatchPrefillWithPagedKVCacheWrapper
        >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
        >>> cache = torch.ones(8, 2, 16, 2, 64)  # [pages, keys and values, page_size, heads, 64]
        >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), "NHD")
        >>> wrapper.plan(ints(0, 3), ints(0, 2), ints(3, 5), ints(4), 4, 2, 64, 16, causal=True)
        >>> wrapper.run(torch.randn(3, 4, 64), cache).shape  # the last 3 of 20 tokens
        torch.Size([3, 4, 64])

    Source: flashinfer.BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        check_layout(name, kv_layout)
        refuse(name, custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf,
               jit_args=jit_args, jit_kwargs=jit_kwargs)  # fmt: skip
        self.device = float_workspace_buffer.device
        self._layout: KvLayout = kv_layout
        if use_cuda_graph:
            check_tensors(name, qo_indptr_buf=qo_indptr_buf)
        self._queries = Starts(self.device, qo_indptr_buf if use_cuda_graph else None)
        self._pages = Pages(
            name, self.device, use_cuda_graph, paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
        )  # fmt: skip
        self._causal = False

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Keeps the table, the query tokens' starts and the options of the next run() calls.

        Args:
            qo_indptr: int32 [batch_size + 1], where each sequence's query tokens start.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: the table in CSR form, int32,
                on any device.
            causal: whether keys after a token's own position are invisible to it.
            max_token_per_sequence: the most query tokens of a sequence, if known.

        The other arguments are as :meth:`BatchDecodeWithPagedKVCacheWrapper.plan` has them.

        Raises:
            Unsupported: for masks, multi-item scoring, a head_dim_vo other than head_dim_qk, or a
                pos_encoding_mode other than NONE.
            InvalidArgument: for a table that does not fit the buffers.
        """
        name = f"{type(self).__name__}.plan"
        refuse(
            name, head_dim_vo=head_dim_vo if head_dim_vo != head_dim_qk else None,
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask,
            prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        self._scores = Scores.read(name, pos_encoding_mode, sm_scale, window_left, logits_soft_cap)
        self._causal, self._o_dtype = causal, o_data_type
        self._queries.set(name, "qo_indptr", qo_indptr, max_token_per_sequence)
        self._pages.set(name, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedKvCache,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attention of the query tokens q [tokens, num_qo_heads, head_dim].

        The arguments and the result are those of :meth:`BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        return self._attend(
            q, paged_kv_cache, args, (q_scale, k_scale, v_scale), window_left, lse, sinks=sinks,
            out=out, return_lse=return_lse, query_start_loc=self._queries.starts,
            max_query_len=self._queries.longest, causal=self._causal,
        )  # fmt: skip

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedKvCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """:meth:`run` with other options than those of :meth:`plan`, which they replace."""
        self._replan(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        self._causal = causal
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Attention of sequences whose keys and values lie one after the other, without a cache.

    Args:
        float_workspace_buffer: names the device; it is not used otherwise.
        kv_layout: "NHD": keys and values [tokens, num_kv_heads, head_dim].
        use_cuda_graph: whether qo_indptr and kv_indptr live in the two buffers.
        qo_indptr_buf, kv_indptr_buf: int32 [batch_size + 1].
        backend: ignored; the kernel is chosen by the shape.

    Example:
        >>> from vllm_kernels.compat.flashinfer import BatchPrefillWithRaggedKVCacheWrapper
        >>> starts = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0))
        >>> wrapper.plan(starts, starts, 4, 2, 64, causal=True)
        >>> wrapper.run(torch.randn(5, 4, 64), *torch.randn(2, 5, 2, 64)).shape
        torch.Size([5, 4, 64])

    Source: flashinfer.BatchPrefillWithRaggedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        check_layout(name, kv_layout)
        refuse(name, kv_layout=kv_layout if kv_layout != "NHD" else None,
               custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf,
               jit_args=jit_args, jit_kwargs=jit_kwargs)  # fmt: skip
        self.device = float_workspace_buffer.device
        if use_cuda_graph:
            check_tensors(name, qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
        self._fixed = use_cuda_graph
        self._queries = Starts(self.device, qo_indptr_buf if use_cuda_graph else None)
        self._keys = Starts(self.device, kv_indptr_buf if use_cuda_graph else None)
        self._causal = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._fixed

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        """Keeps the starts and the options of the next run() calls.

        Args:
            qo_indptr, kv_indptr: int32 [batch_size + 1], where each sequence's query tokens and
                keys start, on any device.

        The other arguments are as :meth:`BatchPrefillWithPagedKVCacheWrapper.plan` has them.

        Raises:
            Unsupported: for masks, multi-item scoring, a head_dim_vo other than head_dim_qk, or a
                pos_encoding_mode other than NONE.
        """
        name = f"{type(self).__name__}.plan"
        refuse(
            name, head_dim_vo=head_dim_vo if head_dim_vo != head_dim_qk else None,
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask,
            prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        self._scores = Scores.read(name, pos_encoding_mode, sm_scale, window_left, logits_soft_cap)
        self._causal, self._o_dtype = causal, o_data_type
        self._queries.set(name, "qo_indptr", qo_indptr, max_token_per_sequence)
        self._keys.set(name, "kv_indptr", kv_indptr, None)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Attention of q [tokens, num_qo_heads, head_dim] to k, v [keys, num_kv_heads, head_dim].

        The scales and the result are those of :meth:`BatchDecodeWithPagedKVCacheWrapper.run`.

        Raises:
            Unsupported: for an o_scale other than 1, and for kv_cache_sf.
            InvalidArgument: before plan(), or for tensors that do not fit, by name.
        """
        scores = self._planned(args, q=q, k=k, v=v)
        name = f"{type(self).__name__}.run"
        refuse(name, o_scale=None if o_scale == 1 else o_scale, kv_cache_sf=kv_cache_sf)
        assert self._queries.starts is not None and self._keys.starts is not None
        result = varlen_attention(
            q, k, v, self._queries.starts, self._keys.starts, out=out, causal=self._causal,
            max_query_len=self._queries.longest, max_key_len=self._keys.longest,
            window=(scores.window_left, -1), return_lse=return_lse,
            **scores.options(q, q_scale, k_scale),
        )  # fmt: skip
        return finish(result, v_scale, lse)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """:meth:`run` with other options than those of :meth:`plan`, which they replace."""
        self._replan(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        self._causal = causal
        return self.run(q, k, v, return_lse=return_lse)
