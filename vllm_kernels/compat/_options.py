"""What a call wants beside its tensors of tokens, and what of it is one argument of an op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import NoReturn

from torch import Tensor
from torch.compiler import is_compiling

from ..errors import InvalidArgument
from ._checks import wrong

_PLAIN: dict[str, Tensor | None] = {"alibi_slopes": None, "k_scale": None, "v_scale": None}


@dataclass
class Options:
    """Scores and what becomes of them, in FlashAttention's words."""

    function: str
    scale: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # [num_heads] or [batch, num_heads]
    sinks: Tensor | None = None  # [num_heads]
    q_descale: Tensor | None = None  # [batch, num_kv_heads], of 8-bit queries
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    returns_lse: bool = False

    def __post_init__(self) -> None:
        if self.window is None:
            self.window = (-1, -1)
        if not is_compiling():  # the numbers may be symbols then, and the op checks them
            self._check_scores()
        if not _is_window(self.window):
            raise InvalidArgument(
                f"{self.function}: window_size: expected (left, right), got {self.window!r:.40}"
            )
        # Whether there are no slopes, sinks and descales. Asked several times a call.
        self.is_plain = (
            self.alibi_slopes is None and self.sinks is None and self.q_descale is None
            and self.k_descale is None and self.v_descale is None
        )  # fmt: skip
        if self.is_plain:
            return
        for name, shape in (
            ("alibi_slopes", "[num_heads] or [batch, num_heads]"), ("s_aux", "[num_heads]"),
            ("q_descale", "[batch, num_kv_heads]"), ("k_descale", "[batch, num_kv_heads]"),
            ("v_descale", "[batch, num_kv_heads]"),
        ):  # fmt: skip
            value = self.sinks if name == "s_aux" else getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                raise InvalidArgument(
                    f"{self.function}: {name}: expected a tensor {shape}, got {value!r:.40}"
                )

    def _check_scores(self) -> None:
        """Refuses a scale or softcap that no op takes."""
        if not (self.scale is None or _is_finite(self.scale)):
            self._refuse_number("softmax_scale", "a finite number", self.scale)
        if not (_is_finite(self.softcap) and self.softcap >= 0):
            self._refuse_number("softcap", "a finite number >= 0", self.softcap)

    def _refuse_number(self, name: str, want: str, value: object) -> NoReturn:
        raise InvalidArgument(f"{self.function}: {name}: expected {want}, got {value!r:.40}")

    def check(self, batch: int, num_heads: int, num_kv_heads: int) -> None:
        """Slopes and descales are for so many sequences and heads."""
        if self.is_plain:
            return
        for name, heads in (
            ("alibi_slopes", num_heads), ("q_descale", num_kv_heads), ("k_descale", num_kv_heads),
            ("v_descale", num_kv_heads),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None or value.shape == (batch, heads) or value.shape == (heads,):
                continue
            # One descale, or one row of slopes or descales, for all.
            one = name != "alibi_slopes" and value.numel() == 1 and value.dim() <= 2
            if not one and value.shape != (1, heads):
                want = f"shape [{heads}] or [{batch}, {heads}], a row for each sequence of q"
                raise wrong(self.function, name, want, value)

    def score_scale(self, query: Tensor) -> float:
        """Of query . key."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def sides(self) -> tuple[int, int]:
        """Tokens before and after a query token's position that it sees; -1: all."""
        left, right = (-1 if side is None or side < 0 else int(side) for side in self.window)
        return left, 0 if self.causal else right

    def rows(self, batch: int) -> Iterator[tuple[slice | None, dict[str, Tensor | None]]]:
        """Sequences whose slopes and scales are one argument: all at once (None), or one by one."""
        if self.is_plain:
            yield None, _PLAIN
            return
        values = {
            "alibi_slopes": self.alibi_slopes,
            "k_scale": self.k_descale,
            "v_scale": self.v_descale,
        }
        per_row = {
            name: value
            for name, value in values.items()
            if value is not None
            and value.dim() == 2
            and value.shape[0] > 1
            and value.stride(0) != 0
        }
        whole = {
            name: None if value is None or not batch else row_of(value, name != "alibi_slopes")
            for name, value in values.items()
            if name not in per_row
        }
        shared = {name: floats(value) for name, value in whole.items()}
        if not per_row:
            yield None, shared
            return
        for row in range(batch):
            mine = {name: floats(value[row]) for name, value in per_row.items()}
            yield slice(row, row + 1), {**shared, **mine}


def _is_window(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return is_compiling() or all(
        type(side) is int or side is None or isinstance(side, Integral) for side in value
    )


def _is_finite(value: object) -> bool:
    # A float first: asking an abstract class costs 1 us.
    return isinstance(value, float | int | Real) and isfinite(value)


def row_of(value: Tensor, is_scale: bool = True) -> Tensor:
    """That of all sequences. Of a scale that is expanded over heads one element, which is no copy
    in :func:`floats`."""
    row = value[0] if value.dim() == 2 else value
    return row[:1] if is_scale and row.dim() == 1 and row.stride(0) == 0 else row


def floats(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.float().contiguous()
