"""Rotary position embedding, alone and fused with its neighbours in a layer."""

from __future__ import annotations

from torch import Tensor

from .._types import Layout
from ._common import ONE_OR_EACH_HEAD, calls

__all__ = [
    "batched_rotary_embedding",
    "fused_qk_norm_rope",
    "rope_and_cache",
    "rotary_embedding",
]

call = calls(__all__, rope_and_cache=ONE_OR_EACH_HEAD)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Rotary position embedding of query and key, in place.

    The first ``rotary_size`` elements of each head are rotated in pairs by the angle of the token's
    position: ``(x, y) -> (x cos - y sin, y cos + x sin)``, in float32 and rounded once (Su et al.
    2021, arXiv:2104.09864). The rest of the head stays as it is.

    Args:
        positions: [tokens] or [batch, seq], int64; sequences may be strided (or one, expanded).
        query: [positions' dimensions, heads * head_size] or [..., heads, head_size], written;
            float32, float16 or bfloat16. Tokens and heads may be strided.
        key: like ``query`` with its own number of heads, or None.
        head_size: elements a head.
        cos_sin_cache: [max_position, rotary_size], any floating dtype: the cosines of the angles,
            then their sines. ``rotary_size`` is even and at most ``head_size``.
        is_neox: pairs ``(i, i + rotary_size / 2)``; otherwise ``(2 i, 2 i + 1)`` as in GPT-J.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. A position outside of ``cos_sin_cache`` is an error on a CPU; on
            a GPU its token is left unchanged.

    Example:
        >>> angle = torch.tensor([0.0, torch.pi])  # of positions 0 and 1
        >>> cos_sin_cache = torch.stack([angle.cos(), angle.sin()], dim=1)
        >>> query = torch.ones(2, 2)  # one head of size 2
        >>> vllm_kernels.rotary_embedding(torch.tensor([0, 1]), query, None, 2, cos_sin_cache, True)
        >>> query.round()
        tensor([[ 1.,  1.],
                [-1., -1.]])
    """
    call.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)


def batched_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rot_dim: int,
    cos_sin_cache_offsets: Tensor,
) -> None:
    """:func:`rotary_embedding` with one of several tables of angles per token.

    The tables stand one below the other in ``cos_sin_cache``. A token's angles are in row
    ``position + offset``. It served LoRA adapters with scaled positions.

    Args:
        positions, query, key, head_size, is_neox: as :func:`rotary_embedding`.
        cos_sin_cache: [rows of all tables, rot_dim], any floating dtype: cosines, then sines.
        rot_dim: the last dimension of ``cos_sin_cache``.
        cos_sin_cache_offsets: [tokens] int64, contiguous, for positions [batch, seq] row by row:
            the first row of the token's table.

    Raises:
        InvalidArgument: for a dtype or shape other than above, or tensors that overlap.
        InvalidIndex: on a CPU, for a row outside of ``cos_sin_cache``. On a GPU its token is left
            unchanged. VLLM_KERNELS_CHECK=1 reports a bad position or offset, but not a bad sum.

    Example:
        >>> angles = torch.tensor([0.0, torch.pi])  # two tables of one position
        >>> tables = torch.stack([angles.cos(), angles.sin()], dim=1)
        >>> query, positions = torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)
        >>> vllm_kernels.batched_rotary_embedding(
        ...     positions, query, None, 2, tables, True, 2, torch.tensor([0, 1])
        ... )
        >>> query.round().tolist()
        [[1.0, 1.0], [-1.0, -1.0]]

    Source: vLLM's op of this name, which vLLM dropped in September 2025.
    """
    call.batched_rotary_embedding(
        positions, query, key, head_size, cos_sin_cache, is_neox, rot_dim, cos_sin_cache_offsets
    )


def fused_qk_norm_rope(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    position_ids: Tensor,
) -> None:
    """RMS norm of every query and key head, then rotary embedding, in place (as Qwen3 does).

    The signature is that of vLLM's op. Rounded where ``rms_norm`` and ``rotary_embedding`` round,
    so that it replaces the two of them.

    Args:
        qkv: [num_tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim], written (query and
            key); float32, float16 or bfloat16. Tokens may be strided.
        num_heads_q, num_heads_k, num_heads_v: heads of query, key and value in ``qkv``.
        head_dim: elements a head, at most 256.
        eps: finite, >= 0.
        q_weight, k_weight: [head_dim], dtype of ``qkv``.
        cos_sin_cache, is_neox: as ``rotary_embedding`` has them; partial rotary too.
        position_ids: [num_tokens] int64.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. A position outside of ``cos_sin_cache`` is an error on a CPU; on
            a GPU its token is left unchanged.

    Example:
        >>> angle = torch.zeros(1, 32)  # of position 0
        >>> cos_sin_cache = torch.cat([angle.cos(), angle.sin()], dim=1)
        >>> qkv, weight = torch.full((1, 3 * 64), 5.0), torch.ones(64)
        >>> vllm_kernels.fused_qk_norm_rope(
        ...     qkv, 1, 1, 1, 64, 1e-6, weight, weight, cos_sin_cache, True, torch.tensor([0])
        ... )
        >>> qkv[0, ::64].round()  # the first element of query, key and value
        tensor([1., 1., 5.])
    """
    call.fused_qk_norm_rope(
        qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight,
        cos_sin_cache, is_neox, position_ids,
    )  # fmt: skip


def rope_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    layout: Layout = "vllm",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    epsilon: float = 1e-6,
) -> None:
    """A layer's step from its QKV product to attention, on a GPU in one launch.

    Query is rotated in place; key is rotated and stored, with value, in the paged cache:
    ``rotary_embedding`` and ``reshape_and_cache`` in one, with the RMS norm of query and key heads
    before them if weights are given. Equal to these ops in sequence, except that ``key`` is not
    written. (With layout "vllm" and norms two launches from two tokens on.)

    Args:
        positions: [num_tokens] int64.
        query: [num_tokens, num_heads, head_size], written; float32, float16 or bfloat16; head_size
            at most 256. Here and in key and value the strides of tokens and heads are free, so that
            they may be slices of one packed tensor.
        key, value: [num_tokens, num_kv_heads, head_size], dtype of ``query``.
        cos_sin_cache, is_neox: as ``rotary_embedding`` has them.
        key_cache, value_cache: written; shapes, dtypes and strides as ``paged_attention`` has them
            for ``layout``.
        slot_mapping: [n] int64, n <= num_tokens: block * block_size + position in the block, as
            ``reshape_and_cache`` has it; -1 leaves a token out, and tokens past n are not stored.
            If a slot occurs more than once, the last token is stored, with whole rows.
        layout: "vllm", "NHD" or "HND".
        k_scale, v_scale: for 8-bit caches, float32 of one element or one a KV head; None for 1.
        q_weight, k_weight: [head_size], dtype of ``query``, of the RMS norm of every head; or None.
        epsilon: of the norm, finite, >= 0.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. A position or slot out of range is an error on a CPU. On a GPU a
            position out of range leaves the token's query unchanged and its key unstored, a slot
            out of range stores nothing.

    Example:
        >>> angle = torch.zeros(1, 32)
        >>> cos_sin_cache = torch.cat([angle.cos(), angle.sin()], dim=1)
        >>> query, key, value = torch.ones(3, 1, 1, 64)
        >>> key_cache, value_cache = torch.zeros(2, 4, 16, 1, 64)
        >>> vllm_kernels.rope_and_cache(
        ...     torch.tensor([0]), query, key, value, cos_sin_cache, True, key_cache, value_cache,
        ...     torch.tensor([17]), layout="NHD",
        ... )
        >>> key_cache[1, 1].sum().item()  # slot 17: block 1, token 1
        64.0
    """
    call.rope_and_cache(
        positions, query, key, value, cos_sin_cache, is_neox, key_cache, value_cache,
        slot_mapping, layout, k_scale, v_scale, q_weight, k_weight, epsilon,
    )  # fmt: skip
