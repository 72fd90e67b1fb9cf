"""RMS norms, SiLU and rotary embedding for vLLM, by vLLM's own doors."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from ..._ops import library_ops
from . import count

PROVIDER = "vllm_kernels"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _normalizes(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    return (
        variance_size is None and x.dtype in _DTYPES and (weight is None or weight.dtype == x.dtype)
    )


def rms_norm_fits(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _normalizes(x, weight, variance_size)


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    count("rms_norm")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if weight is None:
        library_ops.rms_norm_weightless(out, x, epsilon)
    else:
        library_ops.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm_fits(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _normalizes(x, weight, variance_size) and x_residual.dtype == x.dtype


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    count("fused_add_rms_norm")
    if weight is None:
        library_ops.fused_add_rms_norm_weightless(x, x_residual, epsilon)
    else:
        library_ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


class KernelSiluAndMul(SiluAndMul):
    def forward_cuda(self, x: Tensor) -> Tensor:
        count("silu_and_mul")
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        library_ops.silu_and_mul(out, x)
        return out

    forward_cpu = forward_cuda


class KernelRotaryEmbedding(RotaryEmbedding):
    def forward_cuda(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        count("rotary_embedding")
        table = self._match_cos_sin_cache_dtype(query)
        library_ops.rotary_embedding(
            positions, query, key, self.head_size, table, self.is_neox_style
        )
        return query, key

    forward_cpu = forward_cuda


def register_small_ops() -> None:
    """A second call does nothing. Another plugin's class of the same name stays."""
    for op, impl, fits, inplace in (
        (ir.ops.rms_norm, rms_norm, rms_norm_fits, False),
        (ir.ops.fused_add_rms_norm, fused_add_rms_norm, fused_add_rms_norm_fits, True),
    ):
        if PROVIDER not in op.impls:
            op.register_impl(PROVIDER, supports_args=fits, inplace=inplace)(impl)
    for theirs, ours in (
        (SiluAndMul, KernelSiluAndMul),
        (RotaryEmbedding, KernelRotaryEmbedding),
    ):
        if theirs.__name__ not in op_registry_oot:
            name = theirs.name
            theirs.register_oot(ours)
            ours.name = name  # custom_ops=["+silu_and_mul"] goes on to mean this class
