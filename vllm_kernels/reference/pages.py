"""Pages of the cache: bounds of their keys, the best ones for a query, copied tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import token_rows

__all__ = ["copy_slots", "page_bounds_update", "page_scores", "select_pages"]


def _outwards(x: Tensor, dtype: torch.dtype, down: bool) -> Tensor:
    """float32 rounded to dtype towards -inf, or towards +inf."""
    nearest = x.to(dtype)
    if dtype == torch.float32:
        return nearest
    bits = nearest.view(torch.int16)
    moved = bits + torch.where((bits < 0) == down, 1, -1).to(torch.int16)
    wrong = nearest.float() > x if down else nearest.float() < x
    return torch.where(wrong, moved.view(dtype), nearest)


def page_bounds_update(
    bounds: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    layout: str = "vllm",
) -> Tensor:
    """bounds afterwards."""
    out, pages = bounds.clone(), token_rows(key_cache, layout)
    block_size = pages.shape[1]
    highest: dict[int, int] = {}
    for slot in slot_mapping.tolist():
        if slot >= 0:
            page, place = divmod(slot, block_size)
            highest[page] = max(place, highest.get(page, 0))
    for page, place in highest.items():
        keys = pages[page, : place + 1].float()
        low, high = keys.amin(0), keys.amax(0)
        if k_scale is not None:
            low, high = low * k_scale.reshape(-1, 1), high * k_scale.reshape(-1, 1)
        out[page, :, 0] = _outwards(low, out.dtype, True)
        out[page, :, 1] = _outwards(high, out.dtype, False)
    return out


def page_scores(query: Tensor, bounds: Tensor) -> Tensor:
    """Of one sequence: query [num_heads, head_size], bounds [pages, num_kv_heads, 2, head_size] ->
    float64 [num_kv_heads, pages]."""
    heads = query.double().nan_to_num(nan=0.0).unflatten(0, (bounds.shape[1], -1))
    low, high = (bounds[:, :, i].double().transpose(0, 1)[:, None] for i in (0, 1))
    q = heads[:, :, None]  # [num_kv_heads, group, pages, head_size]
    return torch.maximum(q * low, q * high).sum((1, 3))


def kept_pages(scores: Tensor, pages: int, budget: int, sinks: int, recent: int) -> Tensor:
    """Indices of the kept pages, ascending; `scores` is changed."""
    scores = scores.nan_to_num(nan=float("inf"), posinf=torch.finfo(torch.float64).max)
    order = sorted(
        range(pages),
        key=lambda i: (not (i < sinks or i >= pages - recent), -scores[i].item(), i),
    )
    return torch.tensor(sorted(order[:budget]), dtype=torch.int64)


def select_pages(
    query: Tensor,
    bounds: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    budget: int,
    *,
    block_size: int,
    sink_pages: int = 1,
    recent_pages: int = 4,
    per_kv_head: bool = False,
) -> tuple[Tensor, Tensor]:
    """(tables, lens)."""
    num_seqs, max_pages = block_tables.shape
    most = min(budget // block_size, max_pages)
    rows = bounds.shape[1] if per_kv_head else 1
    tables = block_tables.new_zeros(num_seqs, rows, most)
    lens = seq_lens.clone()
    for seq, length in enumerate(seq_lens.tolist()):
        pages = -(-length // block_size)
        ids = block_tables[seq, :pages]
        scores = page_scores(query[seq], bounds[ids.long()])
        if not per_kv_head:
            scores = scores.sum(0, keepdim=True)
        for row in range(rows):
            kept = kept_pages(scores[row], pages, most, sink_pages, recent_pages)
            tables[seq, row, : len(kept)] = ids[kept]
        lens[seq] = length - max(pages - most, 0) * block_size
    return (tables if per_kv_head else tables[:, 0]), lens


def copy_slots(
    caches: list[Tensor], src: Tensor, dst: Tensor, layout: str = "vllm"
) -> list[Tensor]:
    """The caches afterwards."""
    moves = [(s, d) for s, d in zip(src.tolist(), dst.tolist()) if s >= 0 and d >= 0]
    results = []
    for cache in caches:
        out = cache.clone()
        if cache.dim() == 3:
            read, written = cache.transpose(1, 2), out.transpose(1, 2)
        elif layout == "vllm":  # dimension 3 counts the tokens
            read, written = cache.movedim(3, 1), out.movedim(3, 1)
        else:
            read, written = token_rows(cache, layout), token_rows(out, layout)
        size = read.shape[1]
        for s, d in moves:
            written[d // size, d % size] = read[s // size, s % size]
        results.append(out)
    return results
