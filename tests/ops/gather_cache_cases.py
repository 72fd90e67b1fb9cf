"""Sequences in pages, and gathers of them against their references."""

from __future__ import annotations

import torch
from helpers import bits, to_layout
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Any bits for what is only moved; finite numbers, of the scale of 1, for what is converted."""
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 127, shape, device=device).to(dtype)


class Batch:
    """Sequences of pages in random order, garbage behind them in the block table."""

    def __init__(self, device: str, lengths: list[int], starts: list[int] | None = None,
                 block: int = 16, spare_rows: int = 3) -> None:  # fmt: skip
        ends = [(start + n) for start, n in zip(starts or [0] * len(lengths), lengths)]
        pages = [-(-end // block) for end in ends]
        self.num_blocks = sum(pages) + 2
        ids = torch.randperm(self.num_blocks)
        self.table = torch.full((len(lengths) + 1, max(pages, default=0) + 2), 2**30)
        used = 0
        for seq, count in enumerate(pages):
            self.table[seq, :count] = ids[used : used + count]
            used += count
        self.table = self.table.int().to(device)
        lens = torch.tensor(lengths, dtype=torch.int64)
        self.cu = torch.cat([torch.zeros(1), lens.cumsum(0)]).int().to(device)
        self.starts = None if starts is None else torch.tensor(starts).int().to(device)
        self.rows = sum(lengths) + spare_rows
        self.token_to_seq = torch.arange(len(lengths)).repeat_interleave(lens).int().to(device)
        self.tokens = sum(lengths)
        self.batch = len(lengths)


BATCHES = {
    "one": ([37], None),
    "ragged": ([5, 0, 16, 33, 0, 0, 1, 100], None),
    "starts": ([5, 0, 16, 33, 0, 20], [3, 7, 16, 17, 0, 31]),
    "many": ([3] * 100 + [0] * 40 + [7], None),
    "none": ([0, 0], None),
}


def check_cp(batch: Batch, src: Tensor, dst: Tensor) -> None:
    args = (src, dst, batch.table, batch.cu, batch.batch, batch.starts)
    want, before = reference.cp_gather_cache(*args), dst.clone()
    for gather in (vllm_kernels.cp_gather_cache, vllm_kernels.gather_cache):
        dst.copy_(before)
        gather(*args)
        assert torch.equal(bits(dst), bits(want))


def paged(batch: Batch, layout: str, stored: torch.dtype, device: str, *, heads=2, size=64,
          block=16) -> list[Tensor]:  # fmt: skip
    shape = (batch.num_blocks, block, heads, size)
    return [to_layout(noise(shape, stored, device), layout, is_key) for is_key in (True, False)]


def check_kv(batch: Batch, caches: list[Tensor], rows: list[Tensor], layout: str,
             scales: tuple[Tensor | None, Tensor | None] = (None, None),
             zeros: tuple[Tensor | None, Tensor | None] = (None, None)) -> None:  # fmt: skip
    args = (*rows, *caches, batch.table, batch.cu)
    named = {"seq_starts": batch.starts, "k_scale": scales[0], "v_scale": scales[1]}
    named |= {"k_zero": zeros[0], "v_zero": zeros[1]}
    want = reference.gather_paged_kv(*args, **named, layout=layout)
    vllm_kernels.gather_paged_kv(*args, **named, layout=layout)
    assert torch.equal(bits(rows[0]), bits(want[0])), "key"
    assert torch.equal(bits(rows[1]), bits(want[1])), "value"


def rows_for(batch: Batch, heads: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    return [noise((batch.rows, heads, size), dtype, device) for _ in range(2)]
