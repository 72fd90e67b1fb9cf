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
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> vllm_kernels.rms_norm(x, x, torch.ones(2), 1e-6)
        >>> x
        tensor([[0.8485, 1.1314]])
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
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
        >>> vllm_kernels.fused_add_rms_norm(x, residual, torch.ones(2), 1e-6)
        >>> x, residual
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    call.fused_add_rms_norm(input, residual, weight, epsilon)


def rms_norm_weightless(out: Tensor, input: Tensor, epsilon: float) -> None:
    """``out = round(x / sqrt(mean(x²) + epsilon))``, row by row: vLLM's op of the same name.

    Shapes as ``rms_norm``, without a weight.

    Raises:
        RuntimeError: as :func:`rms_norm`.

    Example:
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> vllm_kernels.rms_norm_weightless(x, x, 1e-6)
        >>> x
        tensor([[0.8485, 1.1314]])
    """
    call.rms_norm_weightless(out, input, epsilon)


def fused_add_rms_norm_weightless(input: Tensor, residual: Tensor, epsilon: float) -> None:
    """``residual = round(residual + input)``, then ``input = rms_norm_weightless(residual)``.

    Shapes as ``fused_add_rms_norm``.

    Raises:
        RuntimeError: as :func:`fused_add_rms_norm`.

    Example:
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
        >>> vllm_kernels.fused_add_rms_norm_weightless(x, residual, 1e-6)
        >>> x, residual
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    call.fused_add_rms_norm_weightless(input, residual, epsilon)


def gemma_rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Gemma's norm: ``out = round(x / sqrt(mean(x²) + epsilon) * (1 + weight))``, row by row.

    All in float32 and rounded once, as in Hugging Face's ``GemmaRMSNorm``, whose weights are stored
    as their difference from 1.

    Shapes as ``rms_norm``.

    Raises:
        RuntimeError: as :func:`rms_norm`.

    Example:
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> vllm_kernels.gemma_rms_norm(x, x, torch.tensor([0.0, 1.0]), 1e-6)
        >>> x
        tensor([[0.8485, 2.2627]])
    """
    call.gemma_rms_norm(out, input, weight, epsilon)


def gemma_fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> None:
    """``residual = round(residual + input)``, then ``input = gemma_rms_norm(residual)``.

    Shapes as ``fused_add_rms_norm``.

    Raises:
        RuntimeError: as :func:`fused_add_rms_norm`.

    Example:
        >>> x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
        >>> vllm_kernels.gemma_fused_add_rms_norm(x, residual, torch.zeros(2), 1e-6)
        >>> x, residual
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    call.gemma_fused_add_rms_norm(input, residual, weight, epsilon)
