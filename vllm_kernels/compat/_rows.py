"""Rows and indices as the kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

_INT32 = torch.iinfo(torch.int32)


def int32(values: Tensor) -> Tensor:
    return _as_int32(values).contiguous()


def int32_table(table: Tensor) -> Tensor:
    return _as_int32(rows_contiguous(table))


def _as_int32(values: Tensor) -> Tensor:
    """As int32. What does not fit becomes the largest or smallest number, which checks refuse."""
    if values.dtype == torch.int64:
        values = values.clamp(_INT32.min, _INT32.max)
    return values.int()


def rows_contiguous(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def token_seqs(starts: Tensor, num_tokens: int) -> Tensor:
    """The sequence of every token."""
    tokens = torch.arange(num_tokens, dtype=starts.dtype, device=starts.device)
    seqs = torch.searchsorted(starts, tokens, right=True) - 1
    return seqs.clamp(0, max(0, starts.numel() - 2))
