"""Rotary position embedding, alone and fused with its neighbours in a layer."""

from __future__ import annotations

from torch import Tensor

from .._types import Layout
from ._common import ONE_OR_EACH_HEAD, calls

__all__ = ["fused_qk_norm_rope", "rope_and_cache", "rotary_embedding"]

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
        RuntimeError: naming the argument, what was expected and what was given. A position outside
            of ``cos_sin_cache`` is an error on a CPU; on a GPU its token is left unchanged.
    """
    call.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)


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
        RuntimeError: naming the argument, what was expected and what was given. A position outside
            of ``cos_sin_cache`` is an error on a CPU; on a GPU its token is left unchanged.
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
        RuntimeError: naming the argument, what was expected and what was given. A position or slot
            out of range is an error on a CPU. On a GPU a position out of range leaves the token's
            query unchanged and its key unstored, a slot out of range stores nothing.
    """
    call.rope_and_cache(
        positions, query, key, value, cos_sin_cache, is_neox, key_cache, value_cache,
        slot_mapping, layout, k_scale, v_scale, q_weight, k_weight, epsilon,
    )  # fmt: skip
