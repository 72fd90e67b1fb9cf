"""What is raised in place of torch's errors. It runs only after a call has failed."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from numbers import Real

import torch
from torch import Tensor

from .._ops import library_ops
from ..errors import Error, InvalidArgument, InvalidIndex, InvalidType, Unsupported

_OWN = re.compile(r"[a-z_0-9]+: ")
_INDEX = re.compile(r"[a-z_0-9]+: [a-z_0-9]+\[[^]]*\] = ")
_START = re.compile(r"[a-z_0-9]+: query_start_loc\[(\d+)\] = ")
_NO_MEMORY = re.compile("not enough memory")
_FLOAT_ADVICE = re.compile(r"(expected int\d+, got b?float\w*); cast it with .*$")
"""A cast of lengths or ids that are floats would hide a mistake."""
_SCALES = ("scale", "scale_ub")
_INT64 = range(-(2**63), 2**63)


def refused(
    op: str,
    error: Exception,
    given: Mapping[str, object],
    scales_of: str = "one element",
) -> Exception:
    """The error to raise in place of ``error``.

    Args:
        op: the function that was called, which is also the name of the registered op.
        error: what it raised.
        given: its arguments by the names of the op's schema; other names are ignored.
        scales_of: the shapes that its scales may have.

    Returns:
        An :class:`Error` that names the argument, or ``error`` itself where it says enough: memory
        or CUDA.
    """
    if isinstance(error, Error):
        return type(error)(_blamed(op, str(error), given))
    text = str(error)
    foreign = _OWN.match(text) is None
    no_kernel = _no_kernel(op, given) if foreign else None
    if no_kernel is not None:
        return no_kernel
    query = given.get("query")
    if isinstance(error, IndexError) and isinstance(query, Tensor) and query.dim() == 0:
        return InvalidArgument(
            f"{op}: query: expected shape [num_tokens, num_heads, head_size], got shape []"
        )
    wrong_kind = _wrong_kind(op, given, scales_of)
    if wrong_kind is not None:
        return wrong_kind
    if foreign:
        return torch.OutOfMemoryError(f"{op}: {text}") if _NO_MEMORY.match(text) else error
    if type(error) is not RuntimeError:
        return error
    if text.startswith("vllm_kernels: built for "):
        return Unsupported(text)
    if ": kernel launch refused: " in text:
        return Error(text)
    too_long = _too_many_query_tokens(op, text, given)
    if too_long is not None:
        return too_long
    text = _FLOAT_ADVICE.sub(r"\1", _blamed(op, text, given))
    if text.endswith("got None") and "expected a tensor" in text:
        return InvalidType(text)
    return (InvalidIndex if _INDEX.match(text) else InvalidArgument)(text)


def renamed(error: Error, function: str, words: Mapping[str, str]) -> Error:
    """An error of what ``function`` calls, under its name and those of its own arguments.

    Args:
        words: what it calls its arguments, by the names in the error. "query tokens" stays.
    """
    text = str(error).partition(": ")[2] or str(error)
    text = re.sub(r"\w+\b(?! tokens)", lambda word: words.get(word[0], word[0]), text)
    return type(error)(f"{function}: {text}")


def _wrong_kind(op: str, given: Mapping[str, object], scales_of: str) -> InvalidType | None:
    """The first argument whose Python type the schema does not take."""
    arguments = getattr(library_ops, op).default._schema.arguments
    named = any(argument.name == "window" for argument in arguments)
    if "window" in given and not named and not _is_window(given["window"]):
        return InvalidType(f"{op}: window: expected (left, right), got {short(given['window'])}")
    if isinstance(given.get("return_lse"), Tensor):  # no argument of the op
        return InvalidType(f"{op}: return_lse: expected a bool, got a tensor")
    for argument in arguments:
        if argument.name not in given:
            continue
        value = given[argument.name]
        kind = str(argument.type)
        if kind.startswith("Optional["):
            if value is None:
                continue
            kind = kind.removeprefix("Optional[").removesuffix("]")
        fits, expected = _KINDS[kind]
        if fits(value):
            continue
        got = short(value)
        if kind == "Tensor" and value is not None and argument.name.endswith(_SCALES):
            expected = f"a float32 tensor of {scales_of}"
        elif kind == "Tensor":
            got = "None" if value is None else type(value).__name__
        return InvalidType(f"{op}: {argument.name}: expected {expected}, got {got}")
    return None


def _blamed(op: str, text: str, given: Mapping[str, object]) -> str:
    """The text, with the query in place of an ``out`` that is on the query's device."""
    if text.startswith(f"{op}: out: expected a tensor on "):
        for name in ("query", "qkv"):
            if getattr(given.get(name), "device", None) == getattr(given["out"], "device", 0):
                return text.replace(": out:", f": {name}:", 1)
    return text


def _too_many_query_tokens(
    op: str, text: str, given: Mapping[str, object]
) -> InvalidArgument | None:
    """For a start that is wrong only because ``max_query_len`` is too small."""
    found = _START.match(text)
    query, starts, most = (given.get(x) for x in ("query", "query_start_loc", "max_query_len"))
    if found is None or not isinstance(query, Tensor) or not isinstance(starts, Tensor):
        return None
    sequence = int(found[1]) - 1
    start, end = starts[sequence : sequence + 2].tolist() if sequence >= 0 else (0, 0)
    if not isinstance(most, int) or end > len(query) or end - start <= most:
        return None
    tokens = f"sequence {sequence} has {end - start} query tokens"
    return InvalidArgument(f"{op}: max_query_len = {most}: {tokens}")


def _no_kernel(op: str, given: Mapping[str, object]) -> Unsupported | None:
    """For a tensor that is not plain memory, or on a device without kernels."""
    for name, value in given.items():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor) and (kind := _other_than_dense(tensor)) is not None:
                return Unsupported(f"{op}: {name}: expected a dense tensor, got {kind}")
            if isinstance(tensor, Tensor) and tensor.device.type not in ("cpu", "cuda", "meta"):
                return Unsupported(
                    f"{op}: {name}: expected a CPU or CUDA tensor, got {tensor.device}"
                )
    return None


def _other_than_dense(tensor: Tensor) -> str | None:
    if tensor.is_nested:
        return "a nested one"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    if tensor.is_quantized:
        return "a quantized one"
    return "a negated view; call .resolve_neg()" if tensor.is_neg() else None


def short(value: object) -> str:
    if isinstance(value, Tensor):  # its elements may be many, or freed
        return "a tensor"
    if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
        return f"[{', '.join(map(short, value))}]"[:40]
    return " ".join(f"{value!r:.40}".split())


def _is_window(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_int, value))


def _is_int(value: object) -> bool:
    try:
        return operator.index(value) in _INT64  # type: ignore[arg-type]
    except TypeError:
        return isinstance(value, torch.SymInt)


def _is_float(value: object) -> bool:
    if isinstance(value, Real):
        try:
            float(value)
        except OverflowError:
            return False
        return True
    return isinstance(value, torch.SymFloat | torch.SymInt)


def _is_bool(value: object) -> bool:
    return isinstance(value, int | torch.SymBool)  # torch takes 0 and 1


def _are_tensors(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(one, Tensor) for one in value)


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "Tensor": (lambda value: isinstance(value, Tensor), "a tensor"),
    "List[Tensor]": (_are_tensors, "a list of tensors"),
    "int": (_is_int, "an int"),
    "float": (_is_float, "a float"),
    "bool": (_is_bool, "a bool"),
    "str": (lambda value: isinstance(value, str), "a str"),
}
