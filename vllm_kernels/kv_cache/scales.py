"""The scales of an 8-bit cache: a factor per layer, or per layer and head."""

from __future__ import annotations

from reprlib import repr as short_repr

import torch
from torch import Tensor

from ..errors import InvalidArgument
from .shape import KVShape

__all__ = ["has_layer_scales", "layer_scales"]


def has_layer_scales(shape: KVShape) -> bool:
    """Whether the cache has 8 bits an element, and its tokens have no scales of their own."""
    return shape.cache_dtype != "auto" and not shape.has_token_scales


def layer_scales(
    shape: KVShape, name: str, scale: Tensor | float, layers: int, device: torch.device
) -> list[Tensor]:
    """A tensor a layer: [num_kv_heads]."""
    heads = shape.num_kv_heads
    scales = torch.as_tensor(scale, dtype=torch.float32)
    if not has_layer_scales(shape) and not bool((scales == 1).all()):
        kind = shape.cache_dtype if shape.has_token_scales else str(shape.stored_dtype)
        raise InvalidArgument(
            f"KVCache: {name}: expected 1.0 (only 8-bit caches have one scale, this one is "
            f"{kind}), got {short_repr(scale)}"
        )
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise InvalidArgument(
            f"KVCache: {name}: expected more than 0 and finite, got {short_repr(scale)}"
        )
    if scales.ndim == 0:
        scales = scales.expand(layers)
    if scales.shape not in ((layers,), (layers, heads)):
        raise InvalidArgument(
            f"KVCache: {name}: expected a number, [{layers}] or [{layers}, {heads}], got "
            f"{list(scales.shape)}"
        )
    scales = scales.reshape(layers, -1).expand(layers, heads)
    return list(scales.to(device).contiguous())
