"""The tensors and limits of FlashInfer's sampling functions: their checks, and a value a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ...errors import Error, InvalidArgument, InvalidType
from ...ops._refusals import renamed
from .._checks import check_integers, check_tensors

SAMPLING = "flashinfer.sampling"


def called(op: Callable[..., Any], words: Mapping[str, str], *args: Any, **given: Any) -> Any:
    """What the op returns. Its errors have FlashInfer's names: ``words``, by the op's."""
    try:
        return op(*args, **given)
    except Error as error:
        raise renamed(error, SAMPLING, words) from None


def per_row(
    name: str, value: Tensor | float | None, rows: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    if value is None:
        return None
    integer = dtype == torch.int32
    if isinstance(value, Tensor):
        if integer:
            check_integers(SAMPLING, **{name: value})
        else:
            check_floats(name, value)
        return value.to(dtype)
    if isinstance(value, bool) or not isinstance(value, Integral if integer else Real):
        raise InvalidType(
            f"{SAMPLING}: {name}: expected {'an integer' if integer else 'a number'} or a tensor, "
            f"got {value!r:.40}"
        )
    return torch.full((rows,), value, dtype=dtype, device=device)


def check_floats(name: str, values: Tensor, check_nan: bool = False) -> None:
    check_tensors(SAMPLING, **{name: values})
    if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        want = "float32 or float16 or bfloat16"
        raise InvalidArgument(f"{SAMPLING}: {name}: expected {want}, got {values.dtype}")
    if check_nan and bool(values.isnan().any()):
        raise InvalidArgument(f"{SAMPLING}: {name}: expected no NaN, got NaN")


def of_samples(limit: Tensor | float, rows: Tensor | None) -> Tensor | float:
    """FlashInfer's limits belong to rows of probabilities, ours to samples."""
    return limit if rows is None or not isinstance(limit, Tensor) else of_rows(limit, rows)


def of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows], or the nearest one for a row that is not there, as the op says what is bad."""
    return values[rows.long().clamp(0, len(values) - 1)]
