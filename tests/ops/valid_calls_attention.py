"""Valid calls of attention, and of what merges its results."""

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
    scale,
    unset,
    unset_like,
)
from valid_calls_rope import rotation


def scores(heads: int) -> Call:
    return {
        "scale": 0.2, "softcap": choice([0.0, 20.0]), "alibi_slopes": maybe(torch.rand(heads)),
        "sinks": maybe(torch.randn(heads)),
    }  # fmt: skip


@calls("paged_attention")
def attend(op: str) -> Call:
    cache = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values(), torch.uint8]))
    group = choice([1, 2, 4])
    counts = choice([[1, 1, 1], [2, 0, 3]])
    tokens, heads = sum(counts), group * cache.heads
    query = torch.randn(tokens, heads, cache.head_size).to(cache.dtype)
    starts = None if counts[1] == 1 else ints(0, 2, 2, 5)
    pages = cache.tables([cache.slots, 1, 9]) | {"kv_indptr": None}
    if random.random() < 0.3:
        pages = {
            "block_tables": torch.randperm(cache.blocks).repeat(2).int(), "seq_lens": ints(5, 0, 3),
            "kv_indptr": ints(0, cache.blocks, cache.blocks, cache.blocks + 2), "max_pages": 4,
        }  # fmt: skip
    scales = cache.scales()
    query, out, scales["q_scale"] = cache.maybe_e4m3(query)
    if cache.is_int4 or (cache.stored == torch.int8 and random.random() < 0.5):
        names = "k_token_scales", "v_token_scales", "k_token_zeros", "v_token_zeros"
        scales |= {"k_scale": None, "v_scale": None, **cache.of_tokens(*names)}
    visible = {"sliding_window": choice([0, 5]), "window_right": choice([0, 0, -1, 3])}
    if random.random() < 0.2:
        words = torch.randint(256, (tokens,)).to(choice([torch.int32, torch.int64]))
        visible = {"sliding_window": 0, "window_right": 0, "tree_mask": words}
    elif random.random() < 0.2 and "kv_indptr" not in pages:
        totals = 3 * pages["seq_lens"] + 2
        visible |= {"total_seq_lens": totals, "shards": 3, "shard": 1, "interleave": choice([1, 8])}
    return {
        "out": out, "lse": maybe(unset(tokens, heads)), "query": query,
        **cache.caches(), **pages, "query_start_loc": starts, **scores(heads), **visible, **scales,
        "layout": cache.layout, "max_query_len": 1 if starts is None else 3, "workspace": None,
        "fixed_split_size": choice([0, 0, 16]), "kv_ready": choice([True, False]),
        "zero_unowned": choice([True, False]),
    }  # fmt: skip


@calls("attention_with_kvcache")
def append_and_attend(op: str) -> Call:
    cache, group = Paged(choice(FLOATS)), choice([1, 2, 4])
    count, query_len = choice([0, 1, 3]), choice([1, 2, 5])
    query = torch.randn(3, query_len, group * cache.heads, cache.head_size).to(cache.dtype)
    new = {name: x.view(3, count, *x.shape[1:]) for name, x in cache.tokens(3 * count).items()}
    tables = {"block_tables": torch.arange(3, dtype=torch.int32)[:, None]}
    if cache.layout == "NHD" and random.random() < 0.5:
        tables["block_tables"] = None
    return {
        "query": query, **cache.caches(), "seq_lens": ints(cache.block_size - count, 5, 5),
        **tables, "key": new["key"] if count else None, "value": new["value"] if count else None,
        "query_start_loc": None, "max_query_len": 0, "scale": choice([None, 0.2]),
        "sliding_window": choice([0, 5]), "window_right": choice([0, -1, 3]),
        "softcap": choice([0.0, 20.0]), "sinks": maybe(torch.randn(query.shape[2])),
        "cumulative": False, "layout": cache.layout,
    }  # fmt: skip


@calls("varlen_attention")
def attend_keys(op: str) -> Call:
    cache, heads = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values()]), "NHD"), 2
    key, value = (x.flatten(0, 1)[:19].clone() for x in (cache.key, cache.value))
    query = torch.randn(5, heads * cache.heads, cache.head_size).to(cache.dtype)
    heads = query.shape[1]
    query, out, q_scale = cache.maybe_e4m3(query)
    return {
        "out": out, "lse": maybe(unset(5, heads)), "query": query,
        "key": key, "value": value, "query_start_loc": ints(0, 2, 2, 5),
        "key_start_loc": ints(0, 8, 9, 19), **scores(heads), "window_left": choice([-1, 4]),
        "window_right": choice([0, -1, 3]), **cache.scales(), "max_query_len": 3, "workspace": None,
        "zero_unowned": choice([True, False]), "q_scale": q_scale,
    }  # fmt: skip


@calls("fused_decode_attention")
def decode_step(op: str) -> Call:
    cache, group = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values()])), choice([1, 2])
    heads = group * cache.heads
    width = (heads + 2 * cache.heads) * cache.head_size
    bias = torch.randn(width).to(cache.dtype)
    return {
        **rotation(cache, 3), "qkv": torch.randn(3, width).to(cache.dtype), "bias": maybe(bias),
        "out": unset(3, heads, cache.head_size, dtype=cache.dtype), **scores(heads),
        **cache.tables([cache.slots, 1, 9]), "sliding_window": choice([0, 5]), "workspace": None,
        "fixed_split_size": choice([0, 16]),
    }  # fmt: skip


@calls("paged_attention_v1", "paged_attention_v2")
def attend_as_vllm(op: str) -> Call:
    dtype, name = choice(FLOATS), choice(["auto", "fp8_e4m3", "fp8_e5m2"])
    cache, group = Paged(dtype, EIGHT_BITS.get(name), "vllm"), choice([1, 2, 4])
    heads, lens = group * cache.heads, [cache.slots, 1, 9]
    query = torch.randn(3, heads, cache.head_size).to(dtype)
    sparse = {
        "tp_rank": 0, "blocksparse_local_blocks": 1, "blocksparse_vert_stride": choice([0, 2]),
        "blocksparse_block_size": 2 * cache.block_size,
        "blocksparse_head_sliding_step": choice([0, 1]),
    }  # fmt: skip
    scratch = {
        "exp_sums": unset(3, heads, 1), "max_logits": unset(3, heads, 1),
        "tmp_out": unset(3, heads, 1, cache.head_size, dtype=dtype),
    }  # fmt: skip
    return {
        "out": unset_like(query), "query": query, **cache.caches(), **cache.tables(lens),
        "num_kv_heads": cache.heads, "scale": 0.2, "block_size": cache.block_size,
        "max_seq_len": cache.slots, "alibi_slopes": maybe(torch.rand(heads)),
        "kv_cache_dtype": name, "k_scale": scale(), "v_scale": scale(), **sparse,
        **(scratch if op.endswith("v2") else {}),
    }  # fmt: skip


@calls("merge_attn_states")
def merge(op: str) -> Call:
    prefix, suffix = torch.randn(2, 5, 3, 16).to(choice(FLOATS))
    lse = torch.randn(3, 3, 5)
    return {
        "output": unset_like(prefix), "output_lse": maybe(lse[0].clone()),
        "prefix_output": prefix.clone(), "prefix_lse": lse[1].clone(),
        "suffix_output": suffix.clone(), "suffix_lse": lse[2].clone(),
    }  # fmt: skip


@calls("combine_attn_partials")
def combine(op: str) -> Call:
    partials = torch.randn(random.randrange(1, 4), 5, 3, 16).to(choice(FLOATS))
    return {
        "output": unset_like(partials[0]), "output_lse": maybe(unset(5, 3)),
        "out_partial": partials, "lse_partial": torch.randn(partials.shape[:-1]),
    }  # fmt: skip
