"""Memory between guard pages, in which every byte that belongs to no tensor is a canary."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
SIZE = 8 * PAGE  # of a slot; larger storages have no guards
CANARY = 0xFF  # NaN in every floating dtype, -1 in every integer


def each_tensor(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value with function(tensor) for the tensor, or for those of a list."""
    if isinstance(value, (list, tuple)):
        return type(value)(each_tensor(one, function) for one in value)
    return function(value) if isinstance(value, Tensor) else value


def is_plain(x: Tensor) -> bool:
    """Whether it is an ordinary tensor of host memory that it has."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not (x.is_nested or x.is_quantized or x._is_zerotensor())
        and x.layout == torch.strided
        and x.device.type == "cpu"
        and not (x.is_neg() or x.is_conj() or x.requires_grad)
        and span_bytes(x) <= x.untyped_storage().nbytes()
    )


def span_bytes(x: Tensor) -> int:
    """From the start of the storage to past the last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return (x.storage_offset() + last + 1) * x.itemsize if x.numel() else 0


class GuardedMemory:
    """Slots of SIZE bytes; an access past either end of a slot is a fault."""

    def __init__(self, slots: int = 40):
        pages = SIZE // PAGE
        self._map = mmap.mmap(-1, (slots * (pages + 1) + 1) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for slot in range(slots + 1):
            guard = ctypes.c_void_p(start + slot * (pages + 1) * PAGE)
            assert protect(guard, ctypes.c_size_t(PAGE), 0) == 0
        self._slots = [
            torch.frombuffer(
                self._map, dtype=torch.uint8, count=SIZE, offset=(slot * (pages + 1) + 1) * PAGE
            )
            for slot in range(slots)
        ]
        self._used: dict[int, tuple[int, int]] = {}  # by storage: slot and offset in it
        self._before: list[Tensor] = []

    def reset(self) -> None:
        self._used.clear()

    def place(self, x: Tensor) -> Tensor:
        """The tensor at the start or the end of a slot, with its strides, and with those that
        shared its storage."""
        if not is_plain(x) or not 0 < x.untyped_storage().nbytes() <= SIZE:
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._used:
            if len(self._used) == len(self._slots):
                return x
            slot = self._slots[len(self._used)].fill_(CANARY)
            room = SIZE - storage.nbytes()
            offset = random.choice([0, room - room % 8])
            bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)
            slot[offset : offset + storage.nbytes()] = bytes_
            self._used[storage.data_ptr()] = len(self._used), offset
        index, offset = self._used[storage.data_ptr()]
        placed = torch.empty(0, dtype=x.dtype)
        elements = offset // x.itemsize + x.storage_offset()
        return placed.set_(self._slots[index].untyped_storage(), elements, x.shape, x.stride())

    def holds(self, x: Tensor) -> bool:
        if not is_plain(x):
            return False
        address = x.untyped_storage().data_ptr()
        return any(slot.untyped_storage().data_ptr() == address for slot in self._slots)

    def remember(self) -> None:
        self._before = [slot.clone() for slot in self._slots[: len(self._used)]]

    def undo(self, x: Tensor) -> None:
        """Gives the elements of x what they were when remember() was called."""
        if x.dtype == torch.bool:
            x = x.view(torch.uint8)  # copy_() of bool makes 1 of any byte but 0
        for slot, before in zip(self._slots, self._before):
            if slot.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                old = torch.empty(0, dtype=x.dtype)
                storage = before.untyped_storage()
                x.copy_(old.set_(storage, x.storage_offset(), x.shape, x.stride()))

    def changed(self) -> list[int]:
        """The slots that differ from what remember() saw."""
        pairs = enumerate(zip(self._slots, self._before))
        return [index for index, (slot, before) in pairs if not torch.equal(slot, before)]
