"""What each op means, in plain PyTorch. Tests and benchmarks import it; nothing here is fast.

Functions return their result instead of writing it, and compute in float64 where the op's own
rounding steps allow, so that a comparison measures the kernel's error and not the reference's.
"""

from __future__ import annotations

import torch
from torch import Tensor


# --- norms


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] -> [..., hidden]: normalised, rounded to the dtype, then times weight."""
    x = input.double()
    normalised = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normalised.to(input.dtype).double() * weight.double()).to(input.dtype)


# --- rotary and activations


# --- cache


# --- attention
