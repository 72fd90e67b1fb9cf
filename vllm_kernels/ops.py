"""The ops as typed Python calls.

Names and argument order are those of vLLM's ``_custom_ops``, so a call site moves over by changing
the import. Every op runs on CPU and CUDA tensors, writes into tensors the caller owns, and is for
inference only: under grad mode a tensor that requires grad is refused.

``torch.ops.vllm_kernels.<op>`` are the same ops without the grad check.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kernels import _library

_ops = torch.ops.vllm_kernels


def _inference_only(op: str, *tensors: Tensor | None) -> None:
    """The stable C ABI cannot ask requires_grad, so the rule is kept here."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(f"{op}: inference only: use torch.no_grad()")


# --- norms


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
    _inference_only("rms_norm", out, input, weight)
    _ops.rms_norm.default(out, input, weight, epsilon)


# --- rotary and activations


# --- cache


# --- attention


OPS = [
    # norms
    "rms_norm",
    # rotary and activations
    #
    # cache
    #
    # attention
]
"""Every op of the library."""


__all__ = list(OPS)


def _register_fakes() -> None:
    """All ops write into their arguments and return nothing, so one fake kernel serves them all."""
    for name in OPS:
        torch.library.register_fake(f"vllm_kernels::{name}")(lambda *args, **kwargs: None)


_register_fakes()
_library.explain_missing_cuda(OPS)
