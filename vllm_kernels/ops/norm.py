"""Norms."""

from __future__ import annotations

from torch import Tensor

from vllm_kernels.ops._common import inference_only, library_ops

__all__ = [
    "fused_add_rms_norm",
    "rms_norm",
]


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Root-mean-square norm: ``out = round(x / sqrt(mean(x²) + epsilon)) * weight``, row by row.

    The mean is taken in float32; the normalised value is rounded to the dtype before the product,
    as in vLLM's op of the same name and in Llama (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        out: [..., hidden_size], written; may be ``input`` itself. Rows may be strided.
        input: [..., hidden_size], float32, float16 or bfloat16. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        epsilon: >= 0.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    inference_only("rms_norm", out, input, weight)
    library_ops.rms_norm.default(out, input, weight, epsilon)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """Adds to the residual stream and norms it: both arguments are replaced.

    ``residual = round(residual + input)``, then ``input = rms_norm(residual)`` with the rounding
    of ``rms_norm``.

    Args:
        input: [..., hidden_size], float32, float16 or bfloat16, written. Rows may be strided.
        residual: shape and dtype of ``input``, written, apart from it. Rows may be strided.
        weight: [hidden_size], dtype of ``input``.
        epsilon: >= 0.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    inference_only("fused_add_rms_norm", input, residual, weight)
    library_ops.fused_add_rms_norm.default(input, residual, weight, epsilon)
