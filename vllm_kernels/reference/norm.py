"""Norms."""

from __future__ import annotations

import torch
from torch import Tensor


def _normalized(input: Tensor, epsilon: float) -> Tensor:
    x = input.double()
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return x * inverse.nan_to_num(posinf=0.0, nan=torch.nan)  # 0 stays 0 without an epsilon


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] -> [..., hidden]: normalized, rounded to the dtype, then times weight."""
    normalized = _normalized(input, epsilon).to(input.dtype)
    return (normalized.double() * weight.double()).to(input.dtype)


def rms_norm_weightless(input: Tensor, epsilon: float) -> Tensor:
    return _normalized(input, epsilon).to(input.dtype)


def gemma_rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] -> [..., hidden]: normalized, times 1 + weight, rounded once."""
    return (_normalized(input, epsilon) * (1 + weight.double())).to(input.dtype)


def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Two [..., hidden] -> (normed sum, sum), the sum rounded to the dtype before it is normed."""
    total = (input.double() + residual.double()).to(input.dtype)
    return rms_norm(total, weight, epsilon), total


def fused_add_rms_norm_weightless(
    input: Tensor, residual: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = (input.double() + residual.double()).to(input.dtype)
    return rms_norm_weightless(total, epsilon), total


def gemma_fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = (input.double() + residual.double()).to(input.dtype)
    return gemma_rms_norm(total, weight, epsilon), total
