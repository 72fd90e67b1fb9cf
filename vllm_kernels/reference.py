"""What each op means, in plain PyTorch. Tests and benchmarks import it; nothing here is fast.

Functions return their result instead of writing it, and compute in float64 where the op's own
rounding steps allow, so that a comparison measures the kernel's error and not the reference's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# --- norms


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] -> [..., hidden]: normalised, rounded to the dtype, then times weight."""
    x = input.double()
    normalised = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normalised.to(input.dtype).double() * weight.double()).to(input.dtype)


def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Two [..., hidden] -> (normed sum, sum), the sum rounded to the dtype before it is normed."""
    total = (input.double() + residual.double()).to(input.dtype)
    return rms_norm(total, weight, epsilon), total


# --- rotary and activations


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


def silu(x: Tensor) -> Tensor:
    return (x.double() * torch.sigmoid(x.double())).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """By erfc, which keeps its digits where 1 + erf cancels."""
    return (x.double() * 0.5 * torch.erfc(-x.double() / math.sqrt(2))).to(x.dtype)


def gelu_new(x: Tensor) -> Tensor:
    """(1 + tanh(a)) / 2 written as sigmoid(2 a)."""
    a = math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double() ** 3)
    return (x.double() * torch.sigmoid(2 * a)).to(x.dtype)


gelu_fast = gelu_new


def gelu_quick(x: Tensor) -> Tensor:
    return (x.double() * torch.sigmoid(1.702 * x.double())).to(x.dtype)


def _product(activated: Tensor, other: Tensor) -> Tensor:
    return (activated.double() * other.double()).to(other.dtype)


def silu_and_mul(input: Tensor) -> Tensor:
    """[..., 2 d] -> [..., d]: the activation of the first half, rounded, times the second."""
    gate, up = input.chunk(2, dim=-1)
    return _product(silu(gate), up)


def mul_and_silu(input: Tensor) -> Tensor:
    """[..., 2 d] -> [..., d]: the first half times the rounded activation of the second."""
    up, gate = input.chunk(2, dim=-1)
    return _product(silu(gate), up)


def gelu_and_mul(input: Tensor) -> Tensor:
    gate, up = input.chunk(2, dim=-1)
    return _product(gelu(gate), up)


def gelu_tanh_and_mul(input: Tensor) -> Tensor:
    gate, up = input.chunk(2, dim=-1)
    return _product(gelu_new(gate), up)


# --- cache


# --- attention
