"""The memory of a cache: tensors of a pool of blocks, what is free, and pairs of blocks to copy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from reprlib import repr as short_repr
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InvalidType, OutOfMemory
from .shape import KVShape

__all__ = ["Pairs", "flat", "free_memory", "mapping_of", "new_pool"]

Pairs: TypeAlias = Tensor | npt.NDArray[Any] | Sequence[Sequence[int]]
"""Blocks to copy, [n, 2]."""


def new_pool(
    shape: KVShape, num_blocks: int, device: torch.device, pinned: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[tuple[Tensor, ...]]]:
    """Keys, values and bounds, a tensor a layer; for each layer the scales of tokens, of keys
    and of values, then the zeros."""
    stored, both = shape.stored_dtype, (num_blocks, shape.num_kv_heads, 2, shape.head_size)
    key_shape, value_shape = shape.cache_shapes(num_blocks)
    options: dict[str, Any] = {"device": device, "pin_memory": pinned}
    layers = range(shape.num_layers)
    floats = 2 * (shape.has_token_scales + shape.has_token_zeros)
    of_tokens = num_blocks, shape.num_kv_heads, shape.block_size
    try:
        return (
            [torch.empty(key_shape, dtype=stored, **options) for _ in layers],
            [torch.empty(value_shape, dtype=stored, **options) for _ in layers],
            [torch.empty(both, dtype=shape.dtype, **options)
             for _ in layers if shape.page_bounds],
            [tuple(torch.empty(of_tokens, dtype=torch.float32, **options)
                   for _ in range(floats)) for _ in layers],
        )  # fmt: skip
    except RuntimeError as error:
        needed = num_blocks * shape.block_bytes
        free = free_memory(device)
        if needed <= free and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise OutOfMemory(
            f"KVCache: {num_blocks:,} blocks: need {needed:,} bytes on {device}, free {free:,}"
        ) from None


def flat(lists: Iterable[Iterable[Tensor | tuple[Tensor, ...]]]) -> list[Tensor]:
    """All tensors of lists of tensors or of tuples."""
    return [
        tensor
        for each in lists
        for one in each
        for tensor in (one if isinstance(one, tuple) else (one,))
    ]


def mapping_of(pairs: Pairs) -> Tensor:
    """What copy_blocks and swap_blocks take."""
    if isinstance(pairs, Tensor):
        return pairs
    array = np.asarray(pairs)
    if array.dtype.kind not in "iu":
        raise InvalidType(f"KVCache: pairs: expected integers, [n, 2], got {short_repr(pairs)}")
    return torch.from_numpy(array.astype(np.int64))  # a copy, as arrays may be read-only


def free_memory(device: torch.device) -> int:
    """Bytes that a new tensor on ``device`` may take: free memory, and memory that torch has
    reserved but does not use.

    Args:
        device: a CPU or a CUDA device.

    Example:
        >>> from vllm_kernels.kv_cache.tensors import free_memory
        >>> free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
