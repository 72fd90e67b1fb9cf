"""Norms."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] -> [..., hidden]: normalised, rounded to the dtype, then times weight."""
    x = input.double()
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    normalised = x * inverse.nan_to_num(posinf=0.0, nan=torch.nan)  # 0 stays 0 without an epsilon
    return (normalised.to(input.dtype).double() * weight.double()).to(input.dtype)


def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Two [..., hidden] -> (normed sum, sum), the sum rounded to the dtype before it is normed."""
    total = (input.double() + residual.double()).to(input.dtype)
    return rms_norm(total, weight, epsilon), total
