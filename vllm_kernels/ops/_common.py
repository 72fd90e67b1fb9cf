"""What every op's Python call shares."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

library_ops = torch.ops.vllm_kernels

ONE_OR_EACH_HEAD = "one element or [num_kv_heads]"


def inference_only(op: str, *tensors: Tensor | None) -> None:
    """The stable C ABI cannot ask requires_grad, so the rule is kept here."""
    if is_grad_enabled():
        for tensor in tensors:
            # What is not a tensor is refused by the op's schema, with its name.
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                raise RuntimeError(f"{op}: inference only: use torch.no_grad()")


def refuse_numbers(op: str, of: str = "one element", **scales: object) -> None:
    """Says what a scale is, and of which shapes the op takes it. To be called where the op's schema
    has refused the call, so that what is right costs nothing."""
    for name, scale in scales.items():
        if not isinstance(scale, Tensor | None):  # None: the op says what it thinks of it
            raise RuntimeError(
                f"{op}: {name}: expected a float32 tensor of {of}, got {scale!r:.40}"
            ) from None
