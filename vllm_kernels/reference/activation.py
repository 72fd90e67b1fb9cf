"""Activations."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def silu_and_mul_split(gate: Tensor, up: Tensor) -> Tensor:
    return _product(silu(gate), up)


def fatrelu_and_mul(input: Tensor, threshold: float) -> Tensor:
    gate, up = input.chunk(2, dim=-1)
    return _product(gate.where(~(gate.float() <= threshold), 0), up)


def silu_and_mul_with_clamp(input: Tensor, limit: float) -> Tensor:
    gate, up = input.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated = (gate * torch.sigmoid(gate)).to(input.dtype)
    return (activated.double() * up).to(input.dtype)


def swigluoai_and_mul(input: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """[..., 2 d] -> [..., d]: gate and up alternate; rounded once."""
    gate, up = input.double()[..., ::2], input.double()[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(input.dtype)
