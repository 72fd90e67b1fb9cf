"""The fake kernels: what torch.compile and calls with meta tensors run. They check arguments as the
ops do, by the same C++ code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .._ops import NAMESPACE, library_checks, library_ops
from ..errors import InvalidArgument

__all__ = ["register_fakes"]

MAPPING = "block_mapping"  # may be on the CPU, wherever the caches are
SELECTS_DEVICE = "on"  # of swap_blocks_batch: decides where the call runs


class _UnknownSizeError(Exception):
    """A size depends on data. Only the call itself can check it."""


def register_fakes(ops: Iterable[str]) -> None:
    """Registers a fake kernel for each op."""
    for op in ops:
        for overload in getattr(library_ops, op).overloads():
            name = op if overload == "default" else f"{op}.{overload}"
            torch.library.register_fake(f"{NAMESPACE}::{name}")(_fake(op, overload))


def _fake(op: str, overload: str) -> Callable[..., Tensor | None]:
    """Checks a call. An op writes into its arguments and returns nothing, or a tensor like query.
    torch calls it for a call with any meta tensor, too."""
    schema = getattr(getattr(library_ops, op), overload)._schema
    names = [argument.name for argument in schema.arguments]
    checks = getattr(getattr(library_checks, op), overload)

    def fake(*args: object, **kwargs: object) -> Tensor | None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        _require_one_device(op, given)
        with _disable_current_modes():
            try:
                known = {name: _without_memory(value) for name, value in given.items()}
            except _UnknownSizeError:
                pass
            else:
                checks(**known)
        if not schema.returns:
            return None
        query = given["query"]
        assert isinstance(query, Tensor)
        return torch.empty_like(query, memory_format=torch.contiguous_format)

    return fake


def _require_one_device(op: str, given: dict[str, object]) -> None:
    """Raises InvalidArgument for tensors on several devices, in the words of the C++ checks."""
    tensors = [
        (name, tensor)
        for name, value in given.items()
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, Tensor)
    ]
    free = (MAPPING, SELECTS_DEVICE)
    others = [(name, tensor.device) for name, tensor in tensors if name not in free]
    first, home = next(
        ((name, device) for name, device in others if device.type != "meta"), ("", None)
    )
    for name, device in others:
        mixed = device.type == "meta" if op == "swap_blocks" else device != home
        if home is not None and mixed:
            raise InvalidArgument(
                f"{op}: {name}: expected a tensor on {home} (from {first}), got {device}"
            )
    mapping = given.get(MAPPING)
    if isinstance(mapping, Tensor) and mapping.is_meta and home is not None:
        raise InvalidArgument(f"{op}: {MAPPING}: expected a tensor on cpu, got meta")


def _without_memory(value: Any) -> Any:
    """The argument with meta tensors for tensors, and example values for symbols: torch.compile
    traces dynamic shapes with one, and asking for it adds no guard."""
    if isinstance(value, Tensor):
        sizes, strides = (
            [_without_memory(number) for number in numbers]
            for numbers in (value.shape, value.stride())
        )
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        if value.node.hint is None:
            raise _UnknownSizeError
        return value.node.hint
    if isinstance(value, (list, tuple)):
        return [_without_memory(element) for element in value]
    return value
