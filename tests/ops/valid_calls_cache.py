"""Valid calls of the ops that write, read and move a cache."""

from __future__ import annotations

from random import choice

import torch
from torch import Tensor
from valid_calls_base import (
    EIGHT_BITS,
    FLOATS,
    Call,
    Paged,
    calls,
    ints,
    maybe,
    rows,
    scale,
    some_slots,
    unset,
    unset_like,
)


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
