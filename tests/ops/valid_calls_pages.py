"""Valid calls of the ops that choose pages and tokens of a cache."""

from __future__ import annotations

import random
from random import choice

import torch
from valid_calls_base import (
    EIGHT_BITS,
    FLOATS,
    Call,
    Paged,
    calls,
    ints,
    maybe,
    some_slots,
    unset,
    unset_like,
)


@calls("page_bounds_update")
def bound_pages(op: str) -> Call:
    cache, count = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values()])), choice([1, 4, 20])
    bounds = unset(cache.blocks, cache.heads, 2, cache.head_size, dtype=cache.dtype)
    return {
        "bounds": bounds, "key_cache": cache.key, "slot_mapping": some_slots(count, cache.slots),
        "k_scale": cache.scales()["k_scale"], "layout": cache.layout,
    }  # fmt: skip


@calls("select_pages")
def select(op: str) -> Call:
    heads, dtype, width = choice([1, 2]), choice(FLOATS), choice([3, 5, 8])
    rows = choice([(), (heads,)])
    bounds = torch.randn(12, heads, 2, 24).sort(2).values.to(dtype)
    return {
        "tables": torch.full((3, *rows, width), -7, dtype=torch.int32), "lens": ints(-7, -7, -7),
        "query": torch.randn(3, 2 * heads, 24).to(dtype), "bounds": bounds,
        "block_tables": torch.stack([torch.randperm(12)[:8] for _ in range(3)]).int(),
        "seq_lens": ints(128, 1, 70), "block_size": 16, "sink_pages": choice([0, 1]),
        "recent_pages": choice([1, 2]),
    }  # fmt: skip


@calls("sparq_attention")
def attend_sparsely(op: str) -> Call:
    cache, seqs = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values()])), 3
    select = "pages" if cache.layout == "vllm" else choice(["pages", "tokens"])
    query = torch.randn(seqs, choice([1, 3]) * cache.heads, cache.head_size).to(cache.dtype)
    mean = torch.randn(seqs, cache.heads, cache.head_size).to(cache.dtype)
    return {
        "out": unset_like(query), "lse": maybe(unset(*query.shape[:2])), "query": query,
        "key_cache": cache.key, "value_cache": cache.value,
        "block_tables": torch.stack([torch.randperm(cache.blocks) for _ in range(seqs)]).int(),
        "seq_lens": ints(4 * cache.block_size, 1, 2 * cache.block_size + 3), "scale": 0.2,
        "r": choice([32, cache.head_size]), "k": choice([3, 4]) * cache.block_size,
        "window": choice([0, 5]), "sink_tokens": choice([0, 0, 4]), "select": select,
        "mean_value": maybe(mean), "layout": cache.layout,
        **{name: x if x is None else x[:1] for name, x in cache.scales().items()},
    }  # fmt: skip


@calls("value_mean_update")
def add_values(op: str) -> Call:
    heads, size, count = choice([1, 2]), choice([7, 32]), choice([1, 4, 9])
    return {
        "mean": torch.randn(3, heads, size), "counts": ints(0, 2, 5),
        "value": torch.randn(count, heads, size).to(choice(FLOATS)),
        "rows": torch.randint(-1, 3, (count,)),
    }  # fmt: skip


@calls("copy_slots")
def move_tokens(op: str) -> Call:
    cache, count = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values()])), choice([1, 4, 20])
    caches = [cache.key, cache.value]
    if random.random() < 0.3:
        caches.append(torch.rand(cache.blocks, cache.heads, cache.block_size))
    return {
        "caches": caches, "src": some_slots(count, cache.slots),
        "dst": some_slots(count, cache.slots), "layout": cache.layout,
    }  # fmt: skip
