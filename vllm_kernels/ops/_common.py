"""What the Python calls of all ops share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

library_ops = torch.ops.vllm_kernels

ONE_OR_EACH_HEAD = "one element or [num_kv_heads]"


def inference_only(op: str, *tensors: object) -> None:
    """The stable C ABI cannot ask requires_grad, so the rule is kept here."""
    if is_grad_enabled():
        for tensor in tensors:
            # The op's schema refuses anything but a tensor, by name.
            if getattr(tensor, "requires_grad", False):
                raise RuntimeError(f"{op}: inference only: use torch.no_grad()")


def refuse_numbers(op: str, of: str = "one element", **scales: object) -> None:
    """Raises an error that names the dtype and the shapes of a scale. Call it only after the op's
    schema has refused the call, so that correct calls pay nothing."""
    for name, scale in scales.items():
        if not isinstance(scale, Tensor | None):  # None: the op has its own error
            raise RuntimeError(
                f"{op}: {name}: expected a float32 tensor of {of}, got {scale!r:.40}"
            ) from None


def entry_points(op: str) -> tuple[Any, Callable[..., None]]:
    """The op as torch.compile knows it, and what its __call__ calls. Without that, a call costs
    0.3 us less."""
    traced = getattr(library_ops, op).default
    return traced, getattr(traced, "_op", traced)


def calls(ops: Iterable[str], **scales_of: str) -> SimpleNamespace:
    """A function for each op, which takes the op's arguments by position.

    It refuses tensors that require grad, and numbers in place of scales.

    Args:
        scales_of: by op, the shapes of its scales; the others' have one element.
    """
    return SimpleNamespace(**{op: _call(op, scales_of.get(op, "one element")) for op in ops})


def _call(op: str, scales_of: str) -> Callable[..., None]:
    traced, direct = entry_points(op)
    tensors = {
        argument.name: place
        for place, argument in enumerate(traced._schema.arguments)
        if "Tensor" in str(argument.type)
    }
    scales = [name for name in tensors if name.endswith(("scale", "scale_ub"))]
    places = list(tensors.values())

    def call(*arguments: object) -> None:
        if is_grad_enabled():
            for place in places:
                # The op's schema refuses anything but a tensor, by name.
                if getattr(arguments[place], "requires_grad", False):
                    raise RuntimeError(f"{op}: inference only: use torch.no_grad()")
        try:
            (traced if is_dynamo_compiling() else direct)(*arguments)
        except RuntimeError:
            refuse_numbers(op, scales_of, **{name: arguments[tensors[name]] for name in scales})
            raise

    return call
