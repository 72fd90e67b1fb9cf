"""What the Python calls of all ops share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    DisableTorchFunction,
    _get_function_stack_at,
    _is_torch_function_mode_enabled,
    _len_torch_function_stack,
)
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext

from .. import _log
from .._ops import library_ops
from ..errors import InvalidArgument, InvalidType
from ._refusals import refused

ONE_OR_EACH_HEAD = "one element or [num_kv_heads]"


modes_are_on = _is_torch_function_mode_enabled
"""Whether torch functions pass through a mode."""


def may_skip_modes() -> bool:
    """Whether all modes that torch functions pass through are default devices.

    torch.set_default_device is such a mode. It costs 1 us a torch function, and it changes only
    functions that make tensors from nothing. The ops here name their devices.
    """
    if is_dynamo_compiling() or not modes_are_on():
        return False
    for index in range(_len_torch_function_stack()):
        if type(_get_function_stack_at(index)) is not DeviceContext:
            return False
    return True


def without_modes(function: Callable[..., Any], arguments: Mapping[str, object]) -> Any:
    """Calls the function where torch functions pass through no mode."""
    with DisableTorchFunction():
        return function(**arguments)


def shape_of(op: str, name: str, tensor: Tensor, *sizes: str) -> torch.Size:
    """The shape that outputs are made from. The op checks all else."""
    try:
        shape = tensor.shape
    except (AttributeError, RuntimeError) as error:
        raise refused(op, error, {name: tensor}) from None
    if len(shape) != len(sizes):
        expected = ", ".join(sizes)
        raise InvalidArgument(f"{op}: {name}: expected shape [{expected}], got shape {list(shape)}")
    return shape


def empty_out(query: Tensor) -> Tensor:
    """Memory for the result of attention: like query, but bfloat16 for an 8-bit one."""
    is_8_bit = query.dtype == torch.float8_e4m3fn
    return query.new_empty(query.shape, dtype=torch.bfloat16 if is_8_bit else None)


def check_tensors(function: str, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            kind = "None" if value is None else type(value).__name__
            raise InvalidType(f"{function}: {name}: expected a tensor, got {kind}")


def refuse_8_bit_query(function: str, name: str, query: Tensor) -> None:
    """For functions that do not take queries in 8 bits, though an op behind them does."""
    if query.dtype.itemsize == 1:
        got = str(query.dtype).removeprefix("torch.")
        raise InvalidArgument(
            f"{function}: {name}: expected float32, float16 or bfloat16, got {got}"
        )


def require_list(op: str, name: str, caches: object) -> None:
    if not isinstance(caches, list | tuple):
        got = (
            f"a tensor of shape {list(caches.shape)}"
            if isinstance(caches, Tensor)
            else type(caches).__name__
        )
        raise InvalidType(f"{op}: {name}: expected a list of tensors, one a layer, got {got}")


def inference_only(op: str, *tensors: object) -> None:
    """The stable C ABI cannot ask requires_grad, so the rule is kept here. Errors have the name
    of the caller's variable."""
    if is_grad_enabled():
        for tensor in tensors:
            # The op's schema refuses anything but a tensor, by name.
            if getattr(tensor, "requires_grad", False):
                raise needs_no_grad(op, _name_of(tensor, sys._getframe(1).f_locals))


def _name_of(tensor: object, variables: Mapping[str, object]) -> str:
    for name, value in variables.items():
        if any(one is tensor for one in (value if isinstance(value, list | tuple) else [value])):
            return name
    return "tensors"


def needs_no_grad(op: str, name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{op}: {name}: requires grad, and the op is inference only: use torch.no_grad()"
    )


def entry_points(op: str, overload: str = "default") -> tuple[Any, Callable[..., Any]]:
    """The op as torch.compile knows it, and what its __call__ calls. Without that, a call costs
    0.3 us less."""
    traced = getattr(getattr(library_ops, op), overload)
    direct = getattr(traced, "_op", traced)
    if _log.calls_are_logged:
        names = [argument.name for argument in traced._schema.arguments]
        direct = _log.logged(op, names, direct)
    return traced, direct


def calls(ops: Iterable[str], **scales_of: str) -> SimpleNamespace:
    """A function for each op, which takes the op's arguments by position.

    It refuses tensors that require grad, and numbers in place of scales.

    Args:
        scales_of: by op, the shapes of its scales; the others' have one element.
    """
    return SimpleNamespace(**{op: _call(op, scales_of.get(op, "one element")) for op in ops})


def _call(op: str, scales_of: str) -> Callable[..., None]:
    traced, direct = entry_points(op)
    arguments_of_op = traced._schema.arguments
    names = [argument.name for argument in arguments_of_op]
    places = [
        place
        for place, argument in enumerate(arguments_of_op)
        if "Tensor" in str(argument.type) and "List" not in str(argument.type)
    ]

    def call(*arguments: object) -> None:
        if is_grad_enabled():
            for place in places:
                # The op's schema refuses anything but a tensor, by name.
                if getattr(arguments[place], "requires_grad", False):
                    raise needs_no_grad(op, names[place])
        try:
            (traced if is_dynamo_compiling() else direct)(*arguments)
        except RuntimeError as error:
            raise refused(op, error, dict(zip(names, arguments)), scales_of) from None

    return call
