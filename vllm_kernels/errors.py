"""What the library raises. Every class is a RuntimeError, too."""

from __future__ import annotations

__all__ = [
    "EngineBusy",
    "Error",
    "InvalidArgument",
    "InvalidIndex",
    "InvalidType",
    "NonFiniteLogits",
    "OutOfMemory",
    "UnknownRequest",
    "Unsupported",
]


class Error(RuntimeError):
    """The base of all errors that vllm_kernels raises.

    Example:
        >>> try:
        ...     vllm_kernels.silu_and_mul(torch.empty(2, 4), torch.empty(2, 6))
        ... except vllm_kernels.Error as error:
        ...     print(type(error).__name__, error)
        InvalidArgument silu_and_mul: ...
    """


class InvalidArgument(Error, ValueError):
    """A shape, dtype, device, stride or value that does not fit. The text names the argument."""


class NonFiniteLogits(Error, ArithmeticError):
    """NaN or infinite logits. Their request ends with this error, whose text names it."""


class InvalidType(Error, TypeError):
    """A Python object of the wrong kind, such as a list for a tensor."""


class InvalidIndex(Error, IndexError):
    """A block, slot, position, length or start that is out of range."""


class OutOfMemory(Error, MemoryError):
    """A cache that does not fit. The text has the bytes that it needs and those that are free."""


class EngineBusy(Error):
    """A call inside a step of the same engine, or one that other requests do not allow."""


class UnknownRequest(Error, KeyError):
    """A request id that the engine does not have, or whose request is finished."""

    __str__ = Error.__str__  # KeyError's has quotes


class Unsupported(Error, NotImplementedError):
    """A valid request that this build, device or model does not serve."""
