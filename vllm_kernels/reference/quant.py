"""8-bit results and their scales, in the float32 arithmetic that the ops promise, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

_E4M3, _INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {_E4M3: 448.0, _INT8: 127.0}
MIN_SCALE = {_E4M3: 1 / (448 * 512), _INT8: 2.0**-23}


def to_8_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> 8 bits: to nearest even, saturating; a NaN stays one in e4m3 and is 0 in int8."""
    if dtype == _INT8:
        return values.nan_to_num(nan=0.0).round().clamp(-128, 127).to(_INT8)
    return values.clamp(-448, 448).to(_E4M3)


def quantize(values: Tensor, scale: Tensor, dtype: torch.dtype, divide: bool) -> Tensor:
    """Elements of `values` over a scale that broadcasts: divided by it, or times its inverse."""
    values, scale = values.float(), scale.float()
    if not divide:
        return to_8_bits(values * (1 / scale), dtype)
    return to_8_bits(values / scale.where(scale.isfinite(), torch.nan), dtype)


def scale_of(values: Tensor, dtype: torch.dtype, magnitude_bound: Tensor | None = None) -> Tensor:
    """[..., n] -> [..., 1]: the scale from the largest magnitude; NaN where there is a NaN."""
    magnitude = values.float().abs().amax(-1, keepdim=True)
    if magnitude_bound is not None:
        magnitude = magnitude.clamp(max=magnitude_bound.item())
    largest = torch.full_like(magnitude, LARGEST[dtype])  # by a number, CUDA takes its inverse
    return (magnitude / largest).clamp(min=MIN_SCALE[dtype])


def quantize_rows(
    values: Tensor, dtype: torch.dtype, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[..., n] -> ([..., n] of `dtype`, scales [..., 1])."""
    scale = scale_of(values, dtype, scale_ub)
    return quantize(values, scale, dtype, divide=dtype == _E4M3), scale


def quantize_groups(
    values: Tensor, dtype: torch.dtype, group_size: int, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[..., n] -> ([..., n] of `dtype`, scales [..., n / group_size])."""
    elements, scales = quantize_rows(values.unflatten(-1, (-1, group_size)), dtype, scale_ub)
    return elements.flatten(-2), scales.squeeze(-1)


def quantize_product_groups(
    products: Tensor, dtype: torch.dtype, group_size: int, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As silu_and_mul_per_block_quant: the bound is one of the scale, both dtypes are divided."""
    parts = products.unflatten(-1, (-1, group_size))
    scale = scale_of(parts, dtype)
    if scale_ub is not None:
        scale = scale.clamp(max=scale_ub.item()).clamp(min=MIN_SCALE[dtype])
    return quantize(parts, scale, dtype, divide=True).flatten(-2), scale.squeeze(-1)
