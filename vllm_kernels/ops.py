"""The ops as typed Python calls.

Names and argument order are those of vLLM's ``_custom_ops``, so a call site moves over by changing
the import. Every op runs on CPU and CUDA tensors, writes into tensors the caller owns, and is for
inference only: under grad mode a tensor that requires grad is refused.

``torch.ops.vllm_kernels.<op>`` are the same ops without the grad check.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kernels import _library

_ops = torch.ops.vllm_kernels


def _inference_only(op: str, *tensors: Tensor | None) -> None:
    """The stable C ABI cannot ask requires_grad, so the rule is kept here."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(f"{op}: inference only: use torch.no_grad()")


# --- norms


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Root-mean-square norm: ``out = round(x / sqrt(mean(x²) + epsilon)) * weight``, row by row.

    The mean is taken in float32; the normalised value is rounded to the dtype before the product,
    as in vLLM's op of the same name and in Llama (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        out: [..., hidden_size], written; may be ``input`` itself. Rows may be strided.
        input: [..., hidden_size], float32, float16 or bfloat16. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        epsilon: >= 0.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    _inference_only("rms_norm", out, input, weight)
    _ops.rms_norm.default(out, input, weight, epsilon)


# --- rotary and activations


# --- cache


# --- attention


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
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Decode attention over a paged KV cache, one pass over each sequence.

    ``out[s, h] = softmax(scale * q[s, h] . K) V`` over the ``seq_lens[s]`` tokens that
    ``block_tables[s]`` names (Kwon et al. 2023, arXiv:2309.06180; vLLM's op of the same name).
    A sequence of length 0 gives 0. Every page is read once per KV head, not once per query head.

    Args:
        out: [num_seqs, num_heads, head_size], contiguous, written.
        query: [num_seqs, num_heads, head_size], float32, float16 or bfloat16; the stride between
            sequences is free.
        key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], x = 16 bytes of elements.
        value_cache: [num_blocks, num_kv_heads, head_size, block_size].
        num_kv_heads: a divisor of num_heads.
        scale: of the product, usually head_size ** -0.5.
        block_tables: [num_seqs, max_blocks_per_seq] int32; entries past a sequence's end are ignored.
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
        RuntimeError: naming the argument, what was expected and what was given. On the CPU also for
            a length or block id out of range; on CUDA such a row is contained (clamped, skipped).
    """
    _inference_only("paged_attention_v1", out, query, key_cache, value_cache)
    _ops.paged_attention_v1.default(
        out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
        block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank,
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
        blocksparse_head_sliding_step,
    )  # fmt: skip


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
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """:func:`paged_attention_v1` with the sequence cut in partitions of 512 tokens, merged after.

    Better than v1 for few long sequences. The scratch holds what vLLM's holds afterwards.

    Args (beside those of v1):
        exp_sum: [num_seqs, num_heads, partitions] float32, written: sum of exp(logit - max_logits).
        max_logits: [num_seqs, num_heads, partitions] float32, written: largest logit.
        tmp_out: [num_seqs, num_heads, partitions, head_size] in out's dtype, written: normalised
            output of each partition. partitions >= ceil(max_seq_len / 512).
    """
    _inference_only("paged_attention_v2", out, query, key_cache, value_cache)
    _ops.paged_attention_v2.default(
        out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale,
        block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale,
        v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
        blocksparse_block_size, blocksparse_head_sliding_step,
    )  # fmt: skip


OPS = [
    # norms
    "rms_norm",
    # rotary and activations
    #
    # cache
    #
    # attention
    "paged_attention_v1",
    "paged_attention_v2",
]
"""Every op of the library."""


__all__ = list(OPS)


def _register_fakes() -> None:
    """All ops write into their arguments and return nothing, so one fake kernel serves them all."""
    for name in OPS:
        torch.library.register_fake(f"vllm_kernels::{name}")(lambda *args, **kwargs: None)


_register_fakes()
_library.explain_missing_cuda(OPS)
