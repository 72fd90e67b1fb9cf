"""Decode attention with the arguments of vLLM's paged_attention_v1 and v2."""

from __future__ import annotations

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .._types import KVCacheDType
from ._common import (
    entry_points,
    inference_only,
)
from ._refusals import refused

__all__ = ["paged_attention_v1", "paged_attention_v2"]

# Called directly, once a layer and token: a function of `call` costs up to 0.3 us more.
_traced_v1, _direct_v1 = entry_points("paged_attention_v1")
_traced_v2, _direct_v2 = entry_points("paged_attention_v2")


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
            blocksparse_vert_stride > 1; otherwise ignored.

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
