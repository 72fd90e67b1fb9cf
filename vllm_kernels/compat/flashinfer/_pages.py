"""The page table of a wrapper, in CSR form on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor, device

from ...errors import InvalidArgument
from .._checks import check_tensors


class Pages:
    """What plan() keeps: tensors of its own, or with CUDA graphs the caller's buffers.

    The buffers' names are those of the wrapper's arguments: indptr, indices and lengths of the last
    pages, in this order.
    """

    def __init__(self, wrapper: str, on: device, fixed: bool, **buffers: Tensor | None) -> None:
        self._device, self.fixed = on, fixed
        self._buffers: list[Tensor] = []
        if fixed:
            check_tensors(wrapper, **buffers)
            self._buffers = [x for x in buffers.values() if x is not None]
            indptr, _, last = self._buffers
            if len(indptr) != len(last) + 1:
                first, *_ = buffers
                raise InvalidArgument(
                    f"{wrapper}: {first}: expected {len(last) + 1} elements, got {len(indptr)}"
                )
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def set(self, plan: str, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        """Keeps a table. From host memory it is copied, and nothing waits."""
        given = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        check_tensors(plan, **given)
        if not self.fixed:
            kept = [x.to(self._device, non_blocking=True) for x in given.values()]
            self._kept = kept[0], kept[1], kept[2]
            return
        for (name, x), buffer in zip(given.items(), self._buffers):
            fits = len(x) <= len(buffer) if name == "indices" else len(x) == len(buffer)
            if not fits:
                raise InvalidArgument(
                    f"{plan}: {name}: expected {len(buffer)} elements (from the wrapper's buffer), "
                    f"got {len(x)}"
                )
        for x, buffer in zip(given.values(), self._buffers):
            buffer[: len(x)].copy_(x, non_blocking=True)
        self._kept = self._buffers[0], self._buffers[1], self._buffers[2]

    def table(self) -> dict[str, Any]:
        """The arguments of paged_attention."""
        assert self._kept is not None
        indptr, indices, last = self._kept
        return {"kv_indptr": indptr, "kv_indices": indices, "last_page_len": last}

    @property
    def batch_size(self) -> int:
        assert self._kept is not None
        return len(self._kept[2])
