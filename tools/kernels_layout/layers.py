"""Layers for ``kernels.kernelize``: their forwards run on a model's own modules."""

import torch
from torch import Tensor, nn

from .ops import rms_norm, silu_and_mul


class RMSNorm(nn.Module):
    """For modules with ``weight`` [hidden] and ``variance_epsilon``."""

    can_torch_compile = True
    has_backward = False
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., hidden] -> the same shape."""
        hidden_states = hidden_states.contiguous()
        out = torch.empty_like(hidden_states)
        rms_norm(out, hidden_states, self.weight, self.variance_epsilon)
        return out


class SiluAndMul(nn.Module):
    """[..., 2 * size], gate before up -> [..., size]."""

    can_torch_compile = True
    has_backward = False

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        silu_and_mul(out, x.contiguous())
        return out
