"""FlashInfer's decode attention: one query token a sequence over a paged cache in CSR form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops import varlen_attention
from ...ops._common import refuse_8_bit_query
from .._checks import check_tensors, refuse
from ._common import KvLayout, PagedKvCache, Scores, check_layout, finish
from ._pages import PagedWrapper, Pages

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: KvLayout = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one query token to the keys of its sequence.

    Args:
        q: [num_qo_heads, head_dim].
        k, v: [kv_len, num_kv_heads, head_dim], or [num_kv_heads, kv_len, head_dim] in HND.
        use_tensor_cores: ignored; the kernel is chosen by the shape.
        q_scale, k_scale: factors of the scores. v_scale: factor of the result.
        window_left: tokens visible before the query's position; -1: all.
        rope_scale, rope_theta: ignored, as pos_encoding_mode must be NONE.

    Returns:
        out like q, or (out, lse) with lse [num_qo_heads] in base 2.

    Raises:
        Unsupported: for a pos_encoding_mode other than NONE.
        InvalidArgument: for a shape, dtype or layout that does not fit, by name.

    Example:
        >>> from vllm_kernels.compat.flashinfer import single_decode_with_kv_cache
        >>> q, k, v = torch.randn(4, 64), torch.randn(9, 2, 64), torch.ones(9, 2, 64)
        >>> out, lse = single_decode_with_kv_cache(q, k, v, return_lse=True)
        >>> torch.allclose(out, torch.ones(4, 64)), lse.shape
        (True, torch.Size([4]))

    Source: flashinfer.single_decode_with_kv_cache.
    """
    name = "single_decode_with_kv_cache"
    check_layout(name, kv_layout)
    check_tensors(name, q=q, k=k, v=v)
    refuse_8_bit_query(name, "q", q)
    scores = Scores.read(name, pos_encoding_mode, sm_scale, window_left, logits_soft_cap)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    starts = torch.tensor([[0, 1], [0, k.shape[0]]], dtype=torch.int32, device=q.device)
    result = finish(
        varlen_attention(
            q[None], k, v, starts[0], starts[1], window=(window_left, -1), return_lse=return_lse,
            **scores.options(q, q_scale, k_scale),
        ),
        v_scale,
    )  # fmt: skip
    return (result[0][0], result[1][0]) if return_lse else result[0]


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decode attention of a batch over a paged cache: plan() once a step, run() once a layer.

    plan() keeps the page table. It computes nothing and copies nothing to the host, so that a call
    never waits for the GPU. With use_cuda_graph the table is copied into the given buffers, and a
    captured run() replays with the table of the last plan().

    Args:
        float_workspace_buffer: names the device; it is not used otherwise.
        kv_layout: of the pages, "NHD" or "HND".
        use_cuda_graph: whether the table lives in the three buffers.
        use_tensor_cores, backend: ignored; the kernel is chosen by the shape.
        paged_kv_indptr_buffer: int32 [batch_size + 1].
        paged_kv_indices_buffer: int32, as long as the longest list of pages.
        paged_kv_last_page_len_buffer: int32 [batch_size].

    Example:
        >>> from vllm_kernels.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper
        >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
        >>> cache = torch.ones(8, 2, 16, 2, 64)  # [pages, keys and values, page_size, heads, 64]
        >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), "NHD")
        >>> wrapper.plan(ints(0, 2), ints(3, 5), ints(4), 4, 2, 64, 16)  # 20 tokens
        >>> wrapper.run(torch.randn(1, 4, 64), cache).shape
        torch.Size([1, 4, 64])

    Source: flashinfer.BatchDecodeWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: KvLayout = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        name = type(self).__name__
        check_layout(name, kv_layout)
        refuse(name, jit_args=jit_args)
        self.device = float_workspace_buffer.device
        self._layout: KvLayout = kv_layout
        self._pages = Pages(
            name, self.device, use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )  # fmt: skip

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Keeps the page table and the options of the next run() calls.

        Args:
            indptr, indices, last_page_len: the table in CSR form, int32, on any device. Sequence i
                has the pages indices[indptr[i] : indptr[i + 1]].
            num_qo_heads, num_kv_heads, head_dim, page_size: of the calls; run() reads them from its
                tensors.
            window_left: tokens visible before the last one; -1: all.
            sm_scale: None: head_dim ** -0.5.
            o_data_type: must be that of the query.

        The other arguments are hints that change no result. They are ignored.

        Raises:
            Unsupported: for a pos_encoding_mode other than NONE.
            InvalidArgument: for a table that does not fit the buffers.
        """
        name = f"{type(self).__name__}.plan"
        self._scores = Scores.read(name, pos_encoding_mode, sm_scale, window_left, logits_soft_cap)
        self._o_dtype = o_data_type
        self._pages.set(name, indptr, indices, last_page_len)

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
        q_len_per_req: int | None = 1,
    ) -> Any:
        """Attention of each sequence's last token.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim]. Several tokens of a sequence
                are its last ones, and causal among themselves.
            paged_kv_cache: see :class:`BatchDecodeWithPagedKVCacheWrapper`; or (keys, values).
            q_scale, k_scale: factors of the scores. v_scale: factor of the result.
            out, lse: written, if given.
            sinks: float32 [num_qo_heads], logits that only join the sum.
            enable_pdl: ignored; kernels always overlap their launches.

        Returns:
            out, or (out, lse) with lse [tokens, num_qo_heads] in base 2.

        Raises:
            InvalidArgument: before plan(), or for tensors that do not fit, by name.
        """
        options: dict[str, Any] = {}
        if q_len_per_req is not None and q_len_per_req > 1:
            batch = self._pages.batch_size
            starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * q_len_per_req
            options = {"query_start_loc": starts, "max_query_len": q_len_per_req}
        return self._attend(
            q, paged_kv_cache, args, (q_scale, k_scale, v_scale), window_left, lse, sinks=sinks,
            out=out, return_lse=return_lse, **options,
        )  # fmt: skip

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedKvCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            return_lse=return_lse,
        )  # fmt: skip


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """:class:`BatchDecodeWithPagedKVCacheWrapper` with use_cuda_graph.

    Example:
        >>> from vllm_kernels.compat.flashinfer import CUDAGraphBatchDecodeWithPagedKVCacheWrapper
        >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
        >>> wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        ...     torch.empty(0), ints(0, 0), ints(0, 0, 0), ints(0))
        >>> wrapper.is_cuda_graph_enabled
        True

    Source: flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: KvLayout = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer,
            last_page_len_buffer,
        )  # fmt: skip
