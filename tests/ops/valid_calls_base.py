"""What the valid calls of all ops share: their table, drawn values and a small cache."""

from __future__ import annotations

from collections.abc import Callable
from random import choice
from typing import Any

import torch
from helpers import LAYOUTS, to_layout
from torch import Tensor

Call = dict[str, Any]

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
VALID_CALLS: dict[str, Callable[[str], Call]] = {}
"""By op: a function of its name."""


def calls(*ops: str) -> Callable[[Callable[[str], Call]], Callable[[str], Call]]:
    def add(make: Callable[[str], Call]) -> Callable[[str], Call]:
        VALID_CALLS.update(dict.fromkeys(ops, make))
        return make

    return add


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def maybe(value: Any) -> Any:
    return choice([None, value])


def unset(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output before the call."""
    return torch.full(shape, 7.0).to(dtype)


def unset_like(x: Tensor) -> Tensor:
    return unset(*x.shape, dtype=x.dtype)


def scale() -> Tensor:
    return torch.rand(1) + 0.5


def rows(width: int) -> Tensor:
    leading = choice([(1,), (3,), (2, 3)])
    return torch.randn(*leading, width).to(choice(FLOATS))


def some_slots(tokens: int, slots: int) -> Tensor:
    """Some -1."""
    picked = torch.randperm(slots)[:tokens]
    return torch.where(torch.rand(tokens) < 0.2, -1, picked)


class Paged:
    """A small cache and its sizes."""

    def __init__(self, dtype: torch.dtype, stored: torch.dtype | None = None, layout: str = ""):
        self.dtype, self.stored = dtype, stored or dtype
        self.layout = layout or choice(LAYOUTS)
        self.blocks, self.block_size, self.heads = 4, choice([8, 16]), choice([1, 2])
        self.is_int4 = stored == torch.uint8
        self.head_size = choice([32, 96] if self.is_int4 else [32, 48])
        row = self.head_size // 2 if self.is_int4 else self.head_size
        sizes = (self.blocks, self.block_size, self.heads, row)
        self.key, self.value = (
            to_layout(torch.randn(sizes).to(self.stored), self.layout, is_key)
            for is_key in (True, False)
        )
        self.slots = self.blocks * self.block_size

    def caches(self) -> Call:
        return {"key_cache": self.key, "value_cache": self.value}

    def tokens(self, count: int) -> Call:
        shape = (count, self.heads, self.head_size)
        return {name: torch.randn(shape).to(self.dtype) for name in ("key", "value")}

    def scales(self) -> Call:
        if self.stored == self.dtype:
            return {"k_scale": None, "v_scale": None}
        size = choice([1, self.heads])
        return {"k_scale": torch.rand(size) + 0.5, "v_scale": torch.rand(size) + 0.5}

    def maybe_e4m3(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """A query, its unset out, and its scale or None."""
        out, e4m3 = unset_like(query), torch.float8_e4m3fn
        if self.stored != e4m3 or self.dtype == torch.float32 or choice([True, False]):
            return query, out, None
        q_scale = torch.rand(choice([1, self.heads])) + 0.5
        return query.to(e4m3), out, maybe(q_scale)

    def of_tokens(self, *names: str) -> Call:
        """Scales, and zeros of int4, or None."""
        some = torch.rand(len(names), self.blocks, self.heads, self.block_size)
        last = len(names) if self.is_int4 else 2
        return dict.fromkeys(names) | dict(zip(names[:last], (x.clone() for x in some)))

    def tables(self, lens: list[int]) -> Call:
        tables = torch.stack([torch.randperm(self.blocks) for _ in lens])
        return {"block_tables": tables.int(), "seq_lens": ints(*lens)}
