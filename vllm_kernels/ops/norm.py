"""Norms."""

from __future__ import annotations

from torch import Tensor

from ._common import calls

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_weightless",
    "gemma_fused_add_rms_norm",
    "gemma_rms_norm",
    "rms_norm",
    "rms_norm_weightless",
]

call = calls(__all__)


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Root-mean-square norm: ``out = round(x / sqrt(mean(x²) + epsilon)) * weight``, row by row.

    The mean is taken in float32; the normalized value is rounded to the dtype before the product,
    as in vLLM's op of the same name and in Llama (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        out: [..., hidden_size], written; may be ``input`` itself. Rows may be strided.
        input: [..., hidden_size], float32, float16 or bfloat16. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        epsilon: finite, >= 0.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    call.rms_norm(out, input, weight, epsilon)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """Adds to the residual stream and norms it: both arguments are replaced.

    ``residual = round(residual + input)``, then ``input = rms_norm(residual)`` with the rounding
    of ``rms_norm``.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16, written. Rows may be strided.
        residual: shape and dtype of ``input``, written, apart from it. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        epsilon: finite, >= 0.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    call.fused_add_rms_norm(input, residual, weight, epsilon)


def rms_norm_weightless(out: Tensor, input: Tensor, epsilon: float) -> None:
    """``out = round(x / sqrt(mean(x²) + epsilon))``, row by row: vLLM's op of the same name.

    Shapes and errors as ``rms_norm``, without a weight.
    """
    call.rms_norm_weightless(out, input, epsilon)


def fused_add_rms_norm_weightless(input: Tensor, residual: Tensor, epsilon: float) -> None:
    """``residual = round(residual + input)``, then ``input = rms_norm_weightless(residual)``.

    Shapes and errors as ``fused_add_rms_norm``.
    """
    call.fused_add_rms_norm_weightless(input, residual, epsilon)


def gemma_rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Gemma's norm: ``out = round(x / sqrt(mean(x²) + epsilon) * (1 + weight))``, row by row.

    All in float32 and rounded once, as in Hugging Face's ``GemmaRMSNorm``, whose weights are stored
    as their difference from 1.

    Shapes and errors as ``rms_norm``.
    """
    call.gemma_rms_norm(out, input, weight, epsilon)


def gemma_fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> None:
    """``residual = round(residual + input)``, then ``input = gemma_rms_norm(residual)``.

    Shapes and errors as ``fused_add_rms_norm``.
    """
    call.gemma_fused_add_rms_norm(input, residual, weight, epsilon)
