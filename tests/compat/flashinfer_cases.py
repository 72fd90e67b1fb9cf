"""Paged caches, and attention in float64, for the tests of FlashInfer's functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PAGE, HEADS, KV_HEADS, SIZE = 16, 4, 2, 64
LENS = [37, 0, 16, 5]


def ints(*values: int, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    left: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [n, heads, size], k and v [m, kv_heads, size] -> out, lse in base 2, in float64."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    group, positions = q.shape[1] // k.shape[1], torch.arange(q.shape[0]) + len(k) - len(q)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(k)) - positions[:, None]
    hidden = (distance > 0) & causal | (distance < -left) & (left >= 0)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.cpu().double()[:, None])
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]))
    return torch.einsum("hnm,mhd->nhd", weights, v), lse.t() / math.log(2)


class Cache:
    """A paged cache with a table in CSR form, and what each sequence has in it."""

    def __init__(
        self, device: str, dtype: torch.dtype, layout: str, lens: list[int], page: int = PAGE
    ) -> None:
        counts = [-(-length // page) for length in lens]
        order = torch.randperm(sum(counts) + 2)
        rows = torch.full((len(order), 2, page, KV_HEADS, SIZE), math.nan)
        self.sequences, taken, ids = [], 0, []
        for length, count in zip(lens, counts):
            mine, taken = order[taken : taken + count], taken + count
            tokens = torch.randn(2, count * page, KV_HEADS, SIZE)
            tokens[:, length:] = math.nan
            tokens = tokens.to(dtype).float()
            rows[mine] = tokens.view(2, count, page, KV_HEADS, SIZE).transpose(0, 1)
            ids += mine.tolist()
            self.sequences.append(tokens[:, :length])
        rows = rows.transpose(2, 3) if layout == "HND" else rows
        self.both = rows.contiguous().to(device, dtype)
        self.indptr = ints(0, *torch.tensor(counts).cumsum(0).tolist(), device=device)
        self.indices = ints(*ids, -1, 2**30, device=device)
        last = [n - max(0, count - 1) * page for n, count in zip(lens, counts)]
        self.last = ints(*last, device=device)

    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last

    def table_of_append(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indices, self.indptr, self.last

    def forms(self) -> list[Tensor | tuple[Tensor, Tensor]]:
        return [self.both, (self.both[:, 0], self.both[:, 1])]


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    torch.testing.assert_close(got.cpu().double(), want, atol=bound, rtol=bound)


def near_both(
    got: tuple[Tensor, Tensor], want: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> None:
    """out and lse of a call, and those of each sequence."""
    near(got[0], torch.cat([out for out, _ in want]), dtype)
    lse_dtype = dtype if dtype == torch.float32 else torch.bfloat16
    near(got[1], torch.cat([lse for _, lse in want]), lse_dtype)


def workspace(device: str) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)
