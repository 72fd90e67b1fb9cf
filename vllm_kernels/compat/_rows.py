"""Rows and indices as the kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor


def int32(values: Tensor) -> Tensor:
    return values.int().contiguous()


def int32_table(table: Tensor) -> Tensor:
    return rows_contiguous(table).int()


def rows_contiguous(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def token_seqs(starts: Tensor, num_tokens: int) -> Tensor:
    """The sequence of every token."""
    tokens = torch.arange(num_tokens, dtype=starts.dtype, device=starts.device)
    seqs = torch.searchsorted(starts, tokens, right=True) - 1
    return seqs.clamp(0, max(0, starts.numel() - 2))
