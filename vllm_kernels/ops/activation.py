"""Activations."""

from __future__ import annotations

from torch import Tensor

from vllm_kernels.ops._common import inference_only, library_ops

__all__ = [
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "mul_and_silu",
    "silu_and_mul",
]


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """SwiGLU's product: ``out = round(silu(gate)) * up`` (Shazeer 2020, arXiv:2002.05202).

    ``silu(x) = x / (1 + exp(-x))``, in float32 and rounded to the dtype before the product.

    Args:
        out: [..., d], written, apart from ``input``. Rows may be strided.
        input: [..., 2 * d], gate then up; float32, float16 or bfloat16. Rows may be strided.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    inference_only("silu_and_mul", out, input)
    library_ops.silu_and_mul.default(out, input)


def mul_and_silu(out: Tensor, input: Tensor) -> None:
    """``out = up * round(silu(gate))``: up is the first half of ``input``, gate the second.

    Shapes and errors as ``silu_and_mul``.
    """
    inference_only("mul_and_silu", out, input)
    library_ops.mul_and_silu.default(out, input)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    """GeGLU's product: ``out = round(gelu(gate)) * up``, gelu(x) = x (1 + erf(x / sqrt 2)) / 2.

    Shapes and errors as ``silu_and_mul``.
    """
    inference_only("gelu_and_mul", out, input)
    library_ops.gelu_and_mul.default(out, input)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """``out = round(gelu(gate)) * up`` with the tanh form of gelu, as ``gelu_new``.

    Shapes and errors as ``silu_and_mul``.
    """
    inference_only("gelu_tanh_and_mul", out, input)
    library_ops.gelu_tanh_and_mul.default(out, input)


def gelu_new(out: Tensor, input: Tensor) -> None:
    """gelu by tanh: ``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2`` (arXiv:1606.08415).

    Computed in float32 and rounded once.

    Args:
        out: [..., d], written; may be ``input`` itself. Rows may be strided.
        input: [..., d], float32, float16 or bfloat16. Rows may be strided.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    inference_only("gelu_new", out, input)
    library_ops.gelu_new.default(out, input)


def gelu_fast(out: Tensor, input: Tensor) -> None:
    """The function of ``gelu_new``, under the other name that Hugging Face models give it."""
    inference_only("gelu_fast", out, input)
    library_ops.gelu_fast.default(out, input)


def gelu_quick(out: Tensor, input: Tensor) -> None:
    """gelu by sigmoid: ``x / (1 + exp(-1.702 x))`` (arXiv:1606.08415). Shapes as ``gelu_new``."""
    inference_only("gelu_quick", out, input)
    library_ops.gelu_quick.default(out, input)
