"""What the library raises. Every class is a RuntimeError, too."""

from __future__ import annotations

__all__ = ["Error", "InvalidArgument", "InvalidIndex", "InvalidType", "OutOfMemory", "Unsupported"]


class Error(RuntimeError):
    """The base of all errors that vllm_kernels raises."""


class InvalidArgument(Error, ValueError):
    """A shape, dtype, device, stride or value that does not fit. The text names the argument."""


class InvalidType(Error, TypeError):
    """A Python object of the wrong kind, such as a list for a tensor."""


class InvalidIndex(Error, IndexError):
    """A block, slot, position, length or start that is out of range."""


class OutOfMemory(Error, MemoryError):
    """A cache that does not fit. The text has the bytes that it needs and those that are free."""


class Unsupported(Error, NotImplementedError):
    """A valid request that this build, device or model does not serve."""
