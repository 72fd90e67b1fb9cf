"""The tables and starts that a wrapper keeps on the device, and attention to its pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgument
from ...ops import paged_attention
from .._checks import check_tensors
from ._common import KvLayout, PagedKvCache, Wrapper, finish, split_cache


def check_fits(plan: str, name: str, x: Tensor, buffer: Tensor, at_most: bool = False) -> None:
    """Refuses a tensor of another length than its buffer, or with at_most of a larger one."""
    if len(x) > len(buffer) if at_most else len(x) != len(buffer):
        raise InvalidArgument(
            f"{plan}: {name}: expected {len(buffer)} elements (from the wrapper's buffer), got "
            f"{len(x)}"
        )


def kept(x: Tensor, on: torch.device, buffer: Tensor | None) -> Tensor:
    """x on the device, or its buffer with x in front. From host memory nothing waits."""
    if buffer is None:
        return x.to(on, non_blocking=True)
    buffer[: len(x)].copy_(x, non_blocking=True)
    return buffer


def longest_of(indptr: Tensor) -> int | None:
    """The largest step between starts, if the host knows it. Bad starts are run()'s to refuse."""
    if indptr.device.type != "cpu" or indptr.dtype != torch.int32 or indptr.dim() != 1:
        return None
    longest = int(indptr.diff().max()) if len(indptr) > 1 else -1
    return longest if longest >= 0 else None


class Pages:
    """What plan() keeps of a table: tensors of its own, or with CUDA graphs the caller's buffers.

    The buffers' names are those of the wrapper's arguments: indptr, indices and lengths of the last
    pages, in this order.
    """

    def __init__(
        self, wrapper: str, on: torch.device, fixed: bool, **buffers: Tensor | None
    ) -> None:
        self._device, self.fixed = on, fixed
        self._buffers: list[Tensor | None] = [None, None, None]
        if fixed:
            check_tensors(wrapper, **buffers)
            self._buffers = list(buffers.values())
            indptr, _, last = (x for x in buffers.values() if x is not None)
            if len(indptr) != len(last) + 1:
                first, *_ = buffers
                raise InvalidArgument(
                    f"{wrapper}: {first}: expected {len(last) + 1} elements, got {len(indptr)}"
                )
        self._kept: list[Tensor] = []
        self._max_pages: int | None = None

    def set(self, plan: str, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        """Keeps a table."""
        given = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        check_tensors(plan, **given)
        for (name, x), buffer in zip(given.items(), self._buffers):
            if buffer is not None:
                check_fits(plan, name, x, buffer, at_most=name == "indices")
        self._kept = [
            kept(x, self._device, buffer) for x, buffer in zip(given.values(), self._buffers)
        ]
        # A bound keeps the table small. The replays of a graph may have other lists.
        self._max_pages = None if self.fixed else longest_of(indptr)

    def table(self) -> dict[str, Any]:
        """The arguments of paged_attention."""
        names = "kv_indptr", "kv_indices", "last_page_len"
        return dict(zip(names, self._kept)) | {"max_pages": self._max_pages}

    @property
    def batch_size(self) -> int:
        return len(self._kept[2]) if self._kept else 0


class Starts:
    """Where each sequence's tokens start, and the most of a sequence, if the host knows it."""

    def __init__(self, on: torch.device, buffer: Tensor | None) -> None:
        self._device, self._buffer = on, buffer
        self.starts: Tensor | None = None
        self.longest: int | None = None

    def set(self, plan: str, name: str, indptr: Tensor, longest: int | None) -> None:
        check_tensors(plan, **{name: indptr})
        if self._buffer is not None:
            check_fits(plan, name, indptr, self._buffer)
            longest = None  # a graph would keep it
        elif longest is None:
            longest = longest_of(indptr)
        self.longest = longest
        self.starts = kept(indptr, self._device, self._buffer)


class PagedWrapper(Wrapper):
    """A wrapper over a paged cache."""

    _pages: Pages
    _layout: KvLayout

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._pages.fixed

    def _attend(
        self,
        q: Tensor,
        paged_kv_cache: PagedKvCache,
        args: tuple[object, ...],
        scales: tuple[float | None, float | None, float | None],
        window_left: int | None,
        lse: Tensor | None,
        **options: Any,
    ) -> Any:
        """The common part of run(). scales: q_scale, k_scale, v_scale; options: those of
        paged_attention."""
        scores = self._planned(args, q=q)
        keys, values = split_cache(f"{type(self).__name__}.run", paged_kv_cache)
        left = scores.window_left if window_left is None else window_left
        result = paged_attention(
            q, keys, values, **self._pages.table(), layout=self._layout, sliding_window=left + 1,
            **scores.options(q, *scales[:2]), **options,
        )  # fmt: skip
        return finish(result, scales[2], lse)
