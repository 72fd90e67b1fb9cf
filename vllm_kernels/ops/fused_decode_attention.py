"""From the packed QKV product of a decode step to its attention."""

from __future__ import annotations

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .._types import Layout
from ._common import (
    ONE_OR_EACH_HEAD,
    entry_points,
    inference_only,
)
from ._refusals import refused

__all__ = ["fused_decode_attention"]

_traced, _direct = entry_points("fused_decode_attention")


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
        seq_lens: [num_seqs] int32, in tokens, the new one included.
        bias: [(num_heads + 2 * num_kv_heads) * head_size], dtype of qkv; added and rounded first.
        q_weight, k_weight: [head_size], dtype of qkv, of the RMS norm of every head; or None.
        epsilon: of the norm, finite, >= 0.
        scale, alibi_slopes, sliding_window, softcap, sinks: as :func:`paged_attention` has them.
        k_scale, v_scale, layout, workspace, fixed_split_size: likewise.
        out: [num_seqs, num_heads, head_size], written; the stride between sequences is free. None:
            a new tensor.

    Warning:
        On CUDA a call may never end if seq_lens change while it runs, or if another call uses its
        workspace at the same time.

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
    op = _traced if is_dynamo_compiling() else _direct
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
