"""The tensors and limits of FlashInfer's sampling functions: their checks, and a value a sample."""

from __future__ import annotations

from numbers import Integral, Real

import torch
from torch import Tensor

from ...errors import InvalidArgument, InvalidType

FLOATS = torch.float32, torch.float16, torch.bfloat16


def per_row(
    name: str, value: Tensor | float | None, rows: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    if value is None:
        return None
    integer = dtype == torch.int32
    if isinstance(value, Tensor):
        check_tensor(name, value, *((torch.int32, torch.int64) if integer else FLOATS))
        return value.to(dtype)
    if isinstance(value, bool) or not isinstance(value, Integral if integer else Real):
        raise InvalidType(
            f"flashinfer.sampling: {name}: expected {'an integer' if integer else 'a number'} or "
            f"a tensor, got {value!r:.40}"
        )
    return torch.full((rows,), value, dtype=dtype, device=device)


def check_tensor(name: str, value: object, *dtypes: torch.dtype) -> None:
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise InvalidType(
            f"flashinfer.sampling: {name}: expected a tensor, got {type(value).__name__}"
        )
    if value.dtype not in dtypes:
        raise InvalidArgument(
            f"flashinfer.sampling: {name}: expected {expected}, got {value.dtype}"
        )


def of_samples(limit: Tensor | float, rows: Tensor | None) -> Tensor | float:
    """FlashInfer's limits belong to rows of probabilities, ours to samples."""
    return limit if rows is None or not isinstance(limit, Tensor) else of_rows(limit, rows)


def of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows], or the nearest one for a row that is not there, as the op says what is bad."""
    return values[rows.long().clamp(0, len(values) - 1)]
