"""Calls of FlashAttention's functions, and how near the oracle they must come."""

from __future__ import annotations

import oracle
import torch
from helpers import ints
from torch import Tensor

from vllm_kernels.compat import flash_attn, flash_attn_interface

NAN = float("nan")
BOUND = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FA2, FA3 = flash_attn, flash_attn_interface


def near(got: Tensor, want: Tensor, scale: float = 1.0) -> None:
    assert got.shape == want.shape, f"{list(got.shape)}, expected {list(want.shape)}"
    bound = scale * BOUND.get(got.dtype, 0)
    torch.testing.assert_close(got.double(), want.double(), rtol=bound, atol=bound)


def near_lse(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def random(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def starts_of(counts: list[int], device: str) -> Tensor:
    return ints([0, *counts], device).cumsum(0).int()


def expected_varlen(q, k, v, queries, keys, **options) -> tuple[Tensor, Tensor]:
    """(out [T, H, Dv], lse [H, T])."""
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    got = [oracle.attention(*part, **options) for part in parts]
    return torch.cat([out for out, _ in got]), torch.cat([lse for _, lse in got], dim=1)


class Paged:
    """Pages of NaN, and sequences in some of them."""

    def __init__(self, device: str, dtype: torch.dtype, lens: list[int], page: int, room: int = 8,
                 heads: int = 2, slabs: int = 1) -> None:  # fmt: skip
        counts = [-(-(max(n, 0) + room) // page) for n in lens]
        width = max(counts) + 1
        order = torch.randperm(sum(counts) + 3)
        # A layer is every n-th slab of one buffer: strided pages.
        pool = torch.full((len(order), slabs, 2, page, heads, 64), NAN)
        self.pool = pool.to(device, dtype)
        self.key, self.value = self.pool[:, slabs // 2, 0], self.pool[:, slabs // 2, 1]
        self.table = torch.full((len(lens), width), -1, dtype=torch.int32)
        self.rows = []
        for seq, (length, count) in enumerate(zip(lens, counts, strict=True)):
            mine, order = order[:count], order[count:]
            self.table[seq, :count] = mine
            rows = random(2, max(length, 0), heads, 64, device=device, dtype=dtype)
            self.rows.append(rows)
            for token in range(max(length, 0)):
                block = int(mine[token // page])
                self.key[block, token % page] = rows[0, token]
                self.value[block, token % page] = rows[1, token]
        self.table = self.table.to(device)
        self.lens = ints(lens, device)
        self.page = page

    def gathered(self, seq: int, length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(length, device=self.table.device)
        blocks = self.table[seq].long()[tokens // self.page]
        return self.key[blocks, tokens % self.page], self.value[blocks, tokens % self.page]


def table_name(fa) -> str:
    return "block_table" if fa is FA2 else "page_table"
