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


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(elements, the scale or scales [rows, 1])."""
    if scale is None and use_per_token_if_dynamic:
        elements, scales = quantize_rows(input, _E4M3, scale_ub)
        return elements, scales.reshape(-1, 1)
    if scale is None:
        scale = scale_of(input.flatten(), _E4M3)
    return quantize(input, scale, _E4M3, divide=False), scale


def scaled_int8_quant(
    input: Tensor, scale: Tensor | None = None, azp: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(elements, the scale or scales [rows, 1], the zero points or None)."""
    if scale is not None and azp is None:
        return quantize(input, scale, _INT8, divide=True), scale, None
    if scale is not None and azp is not None:
        return _shifted(input.float(), 1 / scale, azp), scale, azp
    rows = input.float().reshape(-1, input.size(-1))
    magnitude = rows.abs().amax(-1, keepdim=True)
    number = torch.full_like  # by a number, CUDA multiplies by its inverse
    if symmetric:
        usable = (magnitude > 2.0**-119) & magnitude.isfinite()
        inverse = torch.where(usable, number(magnitude, 127.0) / magnitude, 0.0)
        elements = to_8_bits(rows * inverse, _INT8)
        return elements.view(input.shape), magnitude / number(magnitude, 127.0), None
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scales = torch.maximum(magnitude * 2.0**-21, (high - low) / number(magnitude, 255.0))
    scales = scales.where(magnitude.isfinite(), magnitude)
    tiny, usable = scales < 2.0**-126, scales.isfinite()
    inverse = torch.where(usable & ~tiny, 1 / scales, 0.0)
    points = (-128 - low / scales).round().where(usable & ~tiny, torch.where(tiny, -128.0, 0.0))
    zero_points = points.to(torch.int32)
    return _shifted(rows, inverse, zero_points).view(input.shape), scales, zero_points


def _shifted(values: Tensor, inverse: Tensor, zero_point: Tensor) -> Tensor:
    """int8(round(values * inverse) + zero_point); a NaN counts as 0."""
    rounded = (values * inverse).nan_to_num(nan=0.0).round().double()
    return (rounded + zero_point).clamp(-128, 127).to(_INT8)
