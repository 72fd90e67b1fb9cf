"""Helpers that the Python calls of all ops share."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

library_ops = torch.ops.vllm_kernels

ONE_OR_EACH_HEAD = "one element or [num_kv_heads]"


def inference_only(op: str, *tensors: Tensor | None) -> None:
    """The stable C ABI cannot ask requires_grad, so the rule is kept here."""
    if is_grad_enabled():
        for tensor in tensors:
            # The op's schema refuses anything but a tensor, by name.
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise RuntimeError(f"{op}: inference only: use torch.no_grad()")


def refuse_numbers(op: str, of: str = "one element", **scales: object) -> None:
    """Raises an error that names the dtype and the shapes of a scale. Call it only after the op's
    schema has refused the call, so that correct calls pay nothing."""
    for name, scale in scales.items():
        if not isinstance(scale, Tensor | None):  # None: the op has its own error
            raise RuntimeError(
                f"{op}: {name}: expected a float32 tensor of {of}, got {scale!r:.40}"
            ) from None
