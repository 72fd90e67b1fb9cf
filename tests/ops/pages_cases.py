"""What the tests of page bounds, page selection and copied slots share."""

from __future__ import annotations

import torch
from helpers import to_layout
from torch import Tensor

EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def key_rows(
    blocks: int, block_size: int, heads: int, head_size: int, stored: torch.dtype, device: str
) -> Tensor:
    """[blocks, block_size, heads, head_size]"""
    x = torch.randn(blocks, block_size, heads, head_size, device=device)
    return (20 * x if stored == torch.int8 else x).to(stored)


def key_cache(rows: Tensor, layout: str) -> Tensor:
    return to_layout(rows, layout, True)


def lengths_and_tables(lens: list[int], block_size: int, device: str) -> tuple[Tensor, Tensor, int]:
    """block_tables with garbage past the pages, seq_lens, and the number of blocks."""
    pages = [-(-n // block_size) for n in lens]
    order = torch.randperm(sum(pages) + 2)
    tables = torch.full((len(lens), max(pages, default=0) + 2), 2**30)
    used = 0
    for seq, count in enumerate(pages):
        tables[seq, :count] = order[used : used + count]
        used += count
    return tables.int().to(device), torch.tensor(lens).int().to(device), len(order)
