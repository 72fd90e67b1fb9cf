"""Valid calls of the ops that rotate queries and keys."""

from __future__ import annotations

from random import choice

import torch
from torch import Tensor
from valid_calls_base import EIGHT_BITS, FLOATS, Call, Paged, calls, maybe, some_slots


def cos_sin(head_size: int) -> Tensor:
    return torch.randn(40, choice([head_size, head_size // 2])).to(choice(FLOATS))


@calls("rotary_embedding")
def rotate(op: str) -> Call:
    head_size, dtype = choice([8, 32]), choice(FLOATS)
    lead, heads = choice([(5,), (2, 3)]), choice([1, 2])
    query, key = torch.randn(2, *lead, heads * head_size).to(dtype)
    return {
        "positions": torch.randint(0, 40, lead), "query": query.clone(), "key": maybe(key.clone()),
        "head_size": head_size, "cos_sin_cache": cos_sin(head_size),
        "is_neox": choice([True, False]),
    }  # fmt: skip


@calls("batched_rotary_embedding")
def rotate_by_tables(op: str) -> Call:
    call = rotate(op)
    offsets = torch.randint(0, 20, (call["positions"].numel(),))
    call["positions"] = call["positions"] % 20
    return {
        **call, "rot_dim": call["cos_sin_cache"].shape[1], "cos_sin_cache_offsets": offsets,
    }  # fmt: skip


@calls("fused_qk_norm_rope")
def norm_and_rotate(op: str) -> Call:
    size, dtype = choice([8, 32]), choice(FLOATS)
    q_weight, k_weight = torch.randn(2, size).to(dtype)
    return {
        "qkv": torch.randn(5, 4 * size).to(dtype), "num_heads_q": 2, "num_heads_k": 1,
        "num_heads_v": 1, "head_dim": size, "eps": 1e-6, "q_weight": q_weight.clone(),
        "k_weight": k_weight.clone(), "cos_sin_cache": cos_sin(size),
        "is_neox": choice([True, False]), "position_ids": torch.randint(0, 40, (5,)),
    }  # fmt: skip


def rotation(cache: Paged, count: int) -> Call:
    weights = torch.randn(2, cache.head_size).to(cache.dtype)
    return {
        "positions": torch.randint(0, 40, (count,)), "cos_sin_cache": cos_sin(cache.head_size),
        "is_neox": choice([True, False]), **cache.caches(), "layout": cache.layout,
        "slot_mapping": some_slots(count, cache.slots), **cache.scales(), "epsilon": 1e-6,
        "q_weight": maybe(weights[0].clone()), "k_weight": maybe(weights[1].clone()),
    }  # fmt: skip


@calls("rope_and_cache")
def rotate_and_write(op: str) -> Call:
    cache, count = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values()])), choice([1, 4, 20])
    query = torch.randn(count, choice([1, 3]), cache.head_size).to(cache.dtype)
    return {**rotation(cache, count), **cache.tokens(count), "query": query}
