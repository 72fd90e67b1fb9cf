"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import write_tokens
from .norm import rms_norm


def rotary_embedding(
    positions: Tensor, x: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> Tensor:
    """Query or key, [..., heads * head_size] or [..., heads, head_size] -> rotated, same shape."""
    cos, sin = cos_sin_cache.double()[positions].unsqueeze(-2).chunk(2, dim=-1)
    num_heads = x.shape[positions.dim() :].numel() // head_size
    heads = x.double().reshape(*positions.shape, num_heads, head_size)
    rotated, rest = heads.split([2 * cos.size(-1), head_size - 2 * cos.size(-1)], dim=-1)
    if is_neox:
        a, b = rotated.chunk(2, dim=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    new_a, new_b = a * cos - b * sin, b * cos + a * sin
    if is_neox:
        rotated = torch.cat([new_a, new_b], dim=-1)
    else:
        rotated = torch.stack([new_a, new_b], dim=-1).flatten(-2)
    return torch.cat([rotated, rest], dim=-1).reshape(x.shape).to(x.dtype)


def batched_rotary_embedding(
    positions: Tensor,
    x: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    cos_sin_cache_offsets: Tensor,
) -> Tensor:
    """As rotary_embedding, with offsets [tokens] added to the positions."""
    rows = positions + cos_sin_cache_offsets.view(positions.shape)
    return rotary_embedding(rows, x, head_size, cos_sin_cache, is_neox)


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
) -> Tensor:
    """[tokens, (q + k + v heads) * head_dim] afterwards: rms_norm, then rotary_embedding."""
    counts = [num_heads_q, num_heads_k, num_heads_v]
    heads = qkv.unflatten(-1, (sum(counts), head_dim)).split(counts, dim=1)
    rotated = [
        rotary_embedding(
            position_ids, rms_norm(part, weight, eps), head_dim, cos_sin_cache, is_neox
        )
        for part, weight in zip(heads, (q_weight, k_weight))
    ]
    return torch.cat([*rotated, heads[2]], dim=1).reshape(qkv.shape)


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
    layout: str = "vllm",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key cache and value cache afterwards."""

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x if weight is None else rms_norm(x, weight, epsilon)
        return rotary_embedding(positions, x, x.size(-1), cos_sin_cache, is_neox)

    caches = (
        write_tokens(key_cache, rotated(key, k_weight), slot_mapping, layout, k_scale),
        write_tokens(value_cache, value, slot_mapping, layout, v_scale),
    )
    return rotated(query, q_weight), *caches
