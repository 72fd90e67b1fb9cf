"""Arguments of the manager's calls: their types, and what is said about wrong ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import torch

from .. import _C
from .._C import InvalidArgument
from .buffers import BatchBuffers

__all__ = ["Integers", "MultimodalItem", "Tokens", "native_buffers", "refuse_kinds"]

Integers: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
"""int64 (read in place) or int32 values of shape [n]: an array, a CPU tensor, or a list."""
Tokens: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
"""Token ids in the range of int32: int32 or int64 of shape [n], as an array, CPU tensor or list."""


class MultimodalItem(NamedTuple):
    """An image or the like; its placeholder tokens do not identify it.

    Example:
        >>> from vllm_kernels.kv_cache import KVCacheManager, MultimodalItem
        >>> manager = KVCacheManager(num_blocks=8, block_size=4)
        >>> image = MultimodalItem(start=1, num_tokens=6, digest="sha256 of the image")
        >>> manager.allocate(1, [7, 0, 0, 0, 0, 0, 0, 5], num_new=0, multimodal=[image])
        0
    """

    start: int
    """Its first token in the sequence."""
    num_tokens: int
    """Its number of placeholder tokens, >= 1."""
    digest: bytes | str
    """A hash of its contents."""


def native_buffers(
    method: str, buffers: BatchBuffers | Sequence[BatchBuffers]
) -> list[_C.BatchBuffers]:
    """What the extension module takes for the buffers of one group of layers, or of several."""
    if isinstance(buffers, BatchBuffers):
        return [buffers._native]
    try:
        return [group._native for group in buffers]
    except (AttributeError, TypeError):
        raise InvalidArgument(
            f"{method}: buffers: expected BatchBuffers, or a list of them, one a group of layers, "
            f"got {_kinds(buffers)}"
        ) from None


def _kinds(buffers: object) -> str:
    """The type of the buffers, or the types in their list."""
    name = type(buffers).__name__
    if not isinstance(buffers, list | tuple):
        return name
    return f"{name} of {', '.join(type(one).__name__ for one in buffers[:4])}"


def refuse_kinds(windows: object, **integers: object) -> None:
    """Raises an error that names the argument that is no integer. Call it after the module has
    refused the arguments."""

    def fits(value: object) -> bool:
        return isinstance(value, Integral) and -(2**63) <= int(value) < 2**63

    for name, value in integers.items():
        if not fits(value):
            raise InvalidArgument(
                f"KVCacheManager: {name}: expected an integer of 64 bits, got {value!r:.40}"
            ) from None
    if not isinstance(windows, Iterable) or not all(
        window is None or fits(window) for window in windows
    ):
        raise InvalidArgument(
            "KVCacheManager: windows: expected a list of integers of 64 bits or None, one a "
            f"group of layers, got {windows!r:.40}"
        ) from None
