"""One valid call of every op, by the names of its schema: what malformed_calls.py changes.

Sizes, dtypes and layouts are drawn from `random`, values from torch's generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from random import choice
from typing import Any

import torch
from helpers import LAYOUTS, to_layout
from torch import Tensor

Call = dict[str, Any]

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
VALID_CALLS: dict[str, Callable[[str], Call]] = {}
"""By op: a function of its name."""


def calls(*ops: str) -> Callable[[Callable[[str], Call]], Callable[[str], Call]]:
    def add(make: Callable[[str], Call]) -> Callable[[str], Call]:
        VALID_CALLS.update(dict.fromkeys(ops, make))
        return make

    return add


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def maybe(value: Any) -> Any:
    return choice([None, value])


def unset(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output before the call."""
    return torch.full(shape, 7.0).to(dtype)


def unset_like(x: Tensor) -> Tensor:
    return unset(*x.shape, dtype=x.dtype)


def scale() -> Tensor:
    return torch.rand(1) + 0.5


def rows(width: int) -> Tensor:
    leading = choice([(1,), (3,), (2, 3)])
    return torch.randn(*leading, width).to(choice(FLOATS))


def some_slots(tokens: int, slots: int) -> Tensor:
    """Some -1."""
    picked = torch.randperm(slots)[:tokens]
    return torch.where(torch.rand(tokens) < 0.2, -1, picked)


# --- norms and activations


@calls(
    "rms_norm", "rms_norm_weightless", "gemma_rms_norm", "fused_add_rms_norm",
    "fused_add_rms_norm_weightless", "gemma_fused_add_rms_norm",
)  # fmt: skip
def norm(op: str) -> Call:
    x = rows(choice([1, 7, 64, 100]))
    call: Call = {"input": x, "epsilon": 1e-6}
    if "fused_add" in op:
        call["residual"] = torch.randn_like(x)
    else:
        call["out"] = unset_like(x)
    if "weightless" not in op:
        call["weight"] = torch.randn(x.shape[-1]).to(x.dtype)
    return call


@calls("rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant")
def norm_static_quant(op: str) -> Call:
    call = norm("fused_add" if "fused_add" in op else "rms_norm")
    out = unset(*call["input"].shape, dtype=torch.float8_e4m3fn)
    return {**call, "out": out, "scale": scale()}


@calls("rms_norm_dynamic_per_token_quant")
def norm_token_quant(op: str) -> Call:
    call = norm_static_quant("fused_add")
    del call["scale"]
    scales = unset(*call["input"].shape[:-1], 1)
    return {**call, "scales": scales, **quantized(call), "residual": maybe(call["residual"])}


@calls("rms_norm_per_block_quant")
def norm_group_quant(op: str) -> Call:
    group = choice([64, 128])
    x = rows(group * choice([1, 2]))
    call: Call = {"input": x, "weight": torch.randn(x.shape[-1]).to(x.dtype), "epsilon": 1e-6}
    call |= quantized(call) | group_scales(x.shape, group)
    return call | {"residual": maybe(torch.randn_like(x))}


def quantized(call: Call) -> Call:
    """out of either dtype, and its bound."""
    out = unset(*call["input"].shape, dtype=choice([torch.float8_e4m3fn, torch.int8]))
    return {"out": out, "scale_ub": None if out.dtype == torch.int8 else maybe(scale())}


def group_scales(shape: torch.Size, group: int) -> Call:
    number = shape[:-1].numel()
    transposed = choice([True, False])
    sizes = (number, shape[-1] // group)
    scales = unset(*sizes[::-1]).t() if transposed else unset(*sizes)
    return {"scales": scales, "group_size": group, "is_scale_transposed": transposed}


GATED = {
    "silu_and_mul": {}, "mul_and_silu": {}, "gelu_and_mul": {}, "gelu_tanh_and_mul": {},
    "fatrelu_and_mul": {"threshold": 0.1}, "silu_and_mul_with_clamp": {"limit": 1.0},
    "swigluoai_and_mul": {"alpha": 1.7, "limit": 7.0},
}  # fmt: skip


@calls(*GATED, "silu_and_mul_quant", "silu_and_mul_per_block_quant")
def gated(op: str) -> Call:
    group = choice([64, 128])
    x = rows(2 * group if "per_block" in op else 2 * choice([1, 7, 64]))
    out = x[..., : x.shape[-1] // 2].clone()
    call: Call = {"out": out, "input": x, **GATED.get(op, {})}
    if op == "silu_and_mul_quant":
        return call | {"out": out.to(torch.float8_e4m3fn), "scale": scale()}
    if op == "silu_and_mul_per_block_quant":
        return {**call, **quantized({"input": out}), **group_scales(out.shape, group)}
    return call


@calls(
    "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant",
    "static_scaled_int8_quant", "dynamic_scaled_int8_quant",
)  # fmt: skip
def scaled_quant(op: str) -> Call:
    x = rows(choice([1, 7, 64, 100]))
    dtype = torch.float8_e4m3fn if "fp8" in op else torch.int8
    call: Call = {"out": unset(*x.shape, dtype=dtype), "input": x}
    token_scales = unset(x.shape[:-1].numel(), 1)
    if op == "dynamic_per_token_scaled_fp8_quant":
        return call | {"scales": token_scales, "scale_ub": maybe(scale())}
    if op == "dynamic_scaled_int8_quant":
        return call | {"scales": token_scales, "azp": maybe(token_scales.int())}
    call["scale"] = scale()
    return call | {"azp": maybe(ints(5))} if op == "static_scaled_int8_quant" else call


@calls("gelu_new", "gelu_fast", "gelu_quick", "silu_and_mul_split")
def plain(op: str) -> Call:
    x = rows(choice([1, 7, 64]))
    inputs = {"gate": x, "up": torch.randn_like(x)} if "split" in op else {"input": x}
    return {"out": unset_like(x), **inputs}


# --- the cache


class Paged:
    """A small cache and its sizes."""

    def __init__(self, dtype: torch.dtype, stored: torch.dtype | None = None, layout: str = ""):
        self.dtype, self.stored = dtype, stored or dtype
        self.layout = layout or choice(LAYOUTS)
        self.blocks, self.block_size, self.heads = 4, choice([8, 16]), choice([1, 2])
        self.is_int4 = stored == torch.uint8
        self.head_size = choice([32, 96] if self.is_int4 else [32, 48])
        row = self.head_size // 2 if self.is_int4 else self.head_size
        sizes = (self.blocks, self.block_size, self.heads, row)
        self.key, self.value = (
            to_layout(torch.randn(sizes).to(self.stored), self.layout, is_key)
            for is_key in (True, False)
        )
        self.slots = self.blocks * self.block_size

    def caches(self) -> Call:
        return {"key_cache": self.key, "value_cache": self.value}

    def tokens(self, count: int) -> Call:
        shape = (count, self.heads, self.head_size)
        return {name: torch.randn(shape).to(self.dtype) for name in ("key", "value")}

    def scales(self) -> Call:
        if self.stored == self.dtype:
            return {"k_scale": None, "v_scale": None}
        size = choice([1, self.heads])
        return {"k_scale": torch.rand(size) + 0.5, "v_scale": torch.rand(size) + 0.5}

    def of_tokens(self, *names: str) -> Call:
        """Scales, and zeros of int4, or None."""
        some = torch.rand(len(names), self.blocks, self.heads, self.block_size)
        last = len(names) if self.is_int4 else 2
        return dict.fromkeys(names) | dict(zip(names[:last], (x.clone() for x in some)))

    def tables(self, lens: list[int]) -> Call:
        tables = torch.stack([torch.randperm(self.blocks) for _ in lens])
        return {"block_tables": tables.int(), "seq_lens": ints(*lens)}


@calls("reshape_and_cache", "reshape_and_cache_flash")
def write_cache(op: str) -> Call:
    dtype, name = choice(FLOATS), choice(["auto", *EIGHT_BITS])
    cache = Paged(dtype, EIGHT_BITS.get(name), "NHD" if "flash" in op else "vllm")
    count = choice([1, 4, 20])
    scales = cache.scales() if name != "auto" else {"k_scale": scale(), "v_scale": scale()}
    return {
        **cache.tokens(count), **cache.caches(), "slot_mapping": some_slots(count, cache.slots),
        "kv_cache_dtype": name, **scales,
    }  # fmt: skip


@calls("reshape_and_cache_per_token_quant")
def write_quantized_cache(op: str) -> Call:
    cache = Paged(choice(FLOATS), choice([torch.int8, torch.uint8]))
    count = choice([1, 4, 20])
    return {
        **cache.tokens(count), **cache.caches(), "slot_mapping": some_slots(count, cache.slots),
        **cache.of_tokens("key_scales", "value_scales", "key_zeros", "value_zeros"),
        "layout": cache.layout,
    }  # fmt: skip


def gather_tables(blocks: int, block_size: int) -> tuple[Call, int]:
    """block_table, cu_seq_lens and seq_starts of three sequences, and their number of rows."""
    starts = ints(5, 0, 3)
    call = {"block_table": torch.stack([torch.randperm(blocks) for _ in range(3)]).int()}
    return {**call, "cu_seq_lens": ints(0, 11, 11, 19), "seq_starts": maybe(starts)}, 20


@calls("cp_gather_cache", "gather_cache", "gather_and_maybe_dequant_cache")
def gather_entries(op: str) -> Call:
    entry = choice([(7,), (16,), (2, 8)])
    tables, count = gather_tables(4, 8)
    dtype, name = choice(FLOATS), choice(["auto", *EIGHT_BITS])
    src = torch.randn(4, 8, *entry).to(EIGHT_BITS.get(name, dtype))
    if op != "gather_and_maybe_dequant_cache":
        return {
            **tables,
            "src_cache": src,
            "dst": unset(count, *entry, dtype=src.dtype),
            "batch_size": 3,
        }
    return {
        **tables, "src_cache": src, "dst": unset(count, *entry, dtype=dtype),
        "token_to_seq": ints(*[0] * 11, *[2] * 8), "num_tokens": 19, "kv_cache_dtype": name,
        "scale": scale(),
    }  # fmt: skip


@calls("gather_paged_kv")
def gather_pages(op: str) -> Call:
    cache = Paged(choice(FLOATS), choice([None, *EIGHT_BITS.values(), torch.uint8]))
    scales = cache.scales()
    if cache.is_int4:
        scales = cache.of_tokens("k_scale", "v_scale", "k_zero", "v_zero")
    tables, count = gather_tables(cache.blocks, cache.block_size)
    tables["block_tables"] = tables.pop("block_table")
    return {
        **cache.tokens(count), **cache.caches(), **tables, **scales, "layout": cache.layout,
    }  # fmt: skip


@calls("concat_and_cache_mla")
def write_mla(op: str) -> Call:
    name, dtype, count = choice(["auto", "fp8", "fp8_ds_mla"]), choice(FLOATS), choice([1, 4])
    rank, pe_dim = (512, 64) if name == "fp8_ds_mla" else (24, 8)
    width = 656 if name == "fp8_ds_mla" else rank + pe_dim
    stored = dtype if name == "auto" else torch.uint8
    return {
        "kv_c": torch.randn(count, rank).to(dtype), "k_pe": torch.randn(count, pe_dim).to(dtype),
        "kv_cache": torch.zeros(4, 8, width, dtype=stored),
        "slot_mapping": some_slots(count, 32), "kv_cache_dtype": name, "scale": scale(),
    }  # fmt: skip


@calls("cp_gather_and_upconvert_fp8_kv_cache")
def upconvert_mla(op: str) -> Call:
    source = {**write_mla(op), "kv_cache_dtype": "fp8_ds_mla", "slot_mapping": torch.arange(32)}
    source |= {"kv_c": torch.randn(32, 512), "k_pe": torch.randn(32, 64)}
    source["kv_cache"] = torch.zeros(4, 8, 656, dtype=torch.uint8)
    torch.ops.vllm_kernels.concat_and_cache_mla(**source)
    return {
        "src_cache": source["kv_cache"], "dst": unset(12, 576, dtype=choice(FLOATS)),
        "block_table": ints(3, 1, 2, 0).view(2, 2), "seq_lens": ints(9, 2),
        "workspace_starts": ints(0, 10), "batch_size": 2,
    }  # fmt: skip


@calls("concat_mla_q")
def concat_query(op: str) -> Call:
    nope, rope = choice([(24, 8), (7, 3), (16, 0)])
    query = torch.randn(3, 2, nope + rope).to(choice(FLOATS))
    parts = query.split([nope, rope], dim=-1)
    return {
        "ql_nope": parts[0].clone(), "q_pe": parts[1].clone(), "q_out": unset_like(query),
    }  # fmt: skip


def pairs(blocks: int) -> Tensor:
    order = torch.randperm(blocks)
    return torch.stack([order[:2], order[2:4]], 1)


@calls("copy_blocks", "copy_blocks_mla")
def copy(op: str) -> Call:
    caches = [torch.randn(4, 5, 6).to(choice(FLOATS[1:])) for _ in range(choice([2, 4]))]
    if op == "copy_blocks_mla":
        return {"kv_caches": caches, "block_mapping": pairs(4)}
    half = len(caches) // 2
    return {
        "key_caches": caches[:half], "value_caches": caches[half:], "block_mapping": pairs(4),
    }  # fmt: skip


@calls("swap_blocks")
def swap(op: str) -> Call:
    src = torch.randn(4, 5, 6).to(choice(FLOATS))
    return {"src": src, "dst": torch.randn(5, 5, 6).to(src.dtype), "block_mapping": pairs(4)}


@calls("convert_fp8")
def convert(op: str) -> Call:
    wide, name = rows(9), choice(["fp8", "fp8_e5m2"])
    narrow = wide.to(EIGHT_BITS.get(name, torch.float8_e4m3fn)).view(torch.uint8)
    output, input_ = choice([(wide, narrow), (narrow, wide)])
    return {"output": output, "input": input_, "scale": choice([1.0, 0.5]), "kv_dtype": name}


# --- pages


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


# --- rotary


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


# --- attention


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
    if cache.is_int4 or (cache.stored == torch.int8 and random.random() < 0.5):
        names = "k_token_scales", "v_token_scales", "k_token_zeros", "v_token_zeros"
        scales = {"k_scale": None, "v_scale": None, **cache.of_tokens(*names)}
    visible = {"sliding_window": choice([0, 5]), "window_right": choice([0, 0, -1, 3])}
    if random.random() < 0.2:
        words = torch.randint(256, (tokens,)).to(choice([torch.int32, torch.int64]))
        visible = {"sliding_window": 0, "window_right": 0, "tree_mask": words}
    return {
        "out": unset_like(query), "lse": maybe(unset(tokens, heads)), "query": query,
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
    return {
        "out": unset_like(query), "lse": maybe(unset(5, heads)), "query": query,
        "key": key, "value": value, "query_start_loc": ints(0, 2, 2, 5),
        "key_start_loc": ints(0, 8, 9, 19), **scores(heads), "window_left": choice([-1, 4]),
        "window_right": choice([0, -1, 3]), **cache.scales(), "max_query_len": 3, "workspace": None,
        "zero_unowned": choice([True, False]),
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


# --- sampling


VOCABULARY = 70
"""Two words of a bitmask and some tokens past them."""


def some_logits() -> Tensor:
    return 3 * torch.randn(3, VOCABULARY).to(choice(FLOATS))


def limits() -> Call:
    return {
        "top_k": maybe(ints(0, 5, VOCABULARY)), "top_p": maybe(torch.tensor([1.0, 0.5, 0.9])),
        "min_p": maybe(torch.tensor([0.0, 0.1, 0.01])),
    }  # fmt: skip


def bitmask() -> Call:
    words = torch.randint(-(2**31), 2**31, (3, 2)).int()
    return {"bitmask": words, "bitmask_rows": maybe(ints(2, -1, 0))}


def token_list(values: Tensor, names: tuple[str, str, str]) -> Call:
    """Lists of 2, 0 and 3 tokens with a value each."""
    lists = (ints(0, 2, 2, 5), torch.randperm(VOCABULARY)[:5].int(), values)
    return dict(zip(names, lists))


@calls("sample")
def draw(op: str) -> Call:
    random_numbers = choice([
        {"uniforms": torch.rand(3)},
        {"seeds": torch.randint(-9, 9, (3,)), "offsets": torch.randint(0, 9, (3,))},
    ])  # fmt: skip
    call: Call = {
        "tokens": torch.full((3,), -7), "logits": some_logits(),
        "temperature": torch.tensor([0.0, 0.7, 1.5]), **random_numbers, **limits(),
        "rows": maybe(ints(2, 0, 0)),
    }  # fmt: skip
    if random.random() < 0.5:
        call |= bitmask()
    if random.random() < 0.5:
        counts = ints(1, 3, 1, 2, 1)
        call |= token_list(counts, ("count_indptr", "count_tokens", "counts"))
        for name in ("repetition", "frequency", "presence"):
            call[name] = maybe(torch.rand(3) + 0.5)
    if random.random() < 0.5:
        call |= token_list(torch.randn(5), ("bias_indptr", "bias_tokens", "bias_values"))
    return call


@calls("top_k_top_p_mask_")
def mask_unlikely(op: str) -> Call:
    return {"logits": some_logits(), **limits()}


@calls("token_logprobs")
def logprobs(op: str) -> Call:
    width = 1 + choice([0, 1, 5])
    return {
        "logprobs": unset(3, width), "ids": torch.full((3, width), -7),
        "ranks": torch.full((3,), -7), "logits": some_logits(),
        "tokens": torch.randint(0, VOCABULARY, (3,)), "rows": maybe(ints(2, 0, 0)),
    }  # fmt: skip


@calls("softmax")
def probabilities(op: str) -> Call:
    logits = some_logits()
    return {
        "out": unset(*logits.shape), "logits": logits, "temperature": maybe(torch.rand(3) + 0.5),
    }  # fmt: skip


@calls("apply_token_bitmask_")
def forbid(op: str) -> Call:
    return {"logits": some_logits(), **bitmask()}


@calls("apply_repetition_penalties")
def penalize(op: str) -> Call:
    logits = some_logits()
    seen = torch.rand(2, *logits.shape) < 0.3
    return {
        "logits": logits, "prompt_mask": seen[0].clone(), "output_mask": seen[1].clone(),
        "repetition_penalties": torch.rand(3) + 0.5,
    }  # fmt: skip


@calls("append_token_counts")
def count_tokens(op: str) -> Call:
    """Lists of 3, 0 and 4 entries, 2, 0 and 4 of them in use."""
    call: Call = {
        "tokens": ints(5, 9, -1, 3, 8, 2, 6), "counts": ints(1, 2, 0, 1, 1, 4, 0),
        "lengths": ints(2, 0, 4), "indptr": ints(0, 3, 3, 7),
        "new_tokens": torch.tensor([random.choice([9, 4, -1]), 1, random.choice([8, 2])]),
    }  # fmt: skip
    if random.random() < 0.5:
        counted = {"positions": torch.tensor([7, 3, 9]), "next_positions": torch.tensor([7, 0, 11])}
        call |= counted
    return call


@calls("spec_verify")
def verify(op: str) -> Call:
    drafts = torch.randint(0, VOCABULARY, (2, 3))
    call: Call = {"tokens": torch.full((2, 4), -7), "accepted": ints(-7, -7)}
    if random.random() < 0.5:
        targets = torch.cat([drafts, drafts[:, :1]], 1)
        targets[0, 1] += 1
        return call | {"draft_tokens": drafts, "target_tokens": targets}
    drafts[1, 2] = -1
    return call | {
        "draft_tokens": drafts, "target_probs": torch.randn(2, 4, VOCABULARY).softmax(-1),
        "draft_probs": maybe(torch.randn(2, 3, VOCABULARY).softmax(-1)),
        "uniforms": torch.rand(2, 4, 2),
    }  # fmt: skip
