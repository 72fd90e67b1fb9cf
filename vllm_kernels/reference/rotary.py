"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    positions: Tensor, x: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> Tensor:
    """Query or key, [..., heads * head_size] or [..., heads, head_size] -> turned, same shape."""
    cos, sin = cos_sin_cache.double()[positions].unsqueeze(-2).chunk(2, dim=-1)
    heads = x.double().reshape(*positions.shape, -1, head_size)
    turned, rest = heads.split([2 * cos.size(-1), head_size - 2 * cos.size(-1)], dim=-1)
    if is_neox:
        a, b = turned.chunk(2, dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
    new_a, new_b = a * cos - b * sin, b * cos + a * sin
    if is_neox:
        turned = torch.cat([new_a, new_b], dim=-1)
    else:
        turned = torch.stack([new_a, new_b], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1).reshape(x.shape).to(x.dtype)
