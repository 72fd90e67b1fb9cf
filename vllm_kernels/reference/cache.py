"""The paged KV cache: writing, copying, converting."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def to_fp8(x: Tensor, scale: float | Tensor, kv_dtype: str) -> Tensor:
    """x / scale to nearest even, saturating, as uint8; NaN is 0x7f."""
    largest = torch.finfo(FP8[kv_dtype]).max
    divisor = torch.as_tensor(scale, device=x.device)  # torch multiplies by a number's inverse
    quotient = x.float() / divisor
    bytes_ = quotient.clamp(-largest, largest).to(FP8[kv_dtype]).view(torch.uint8)
    return torch.where(
        quotient.isnan(), torch.tensor(0x7F, dtype=torch.uint8, device=x.device), bytes_
    )


def from_fp8(x: Tensor, scale: float, kv_dtype: str, dtype: torch.dtype) -> Tensor:
    """x * scale in float32, rounded to dtype."""
    return (x.view(FP8[kv_dtype]).float() * scale).to(dtype)


def to_int8(x: Tensor, scale: float | Tensor) -> Tensor:
    """x / scale to nearest even, saturating to [-128, 127]; NaN is 0."""
    quotient = x.float() / torch.as_tensor(scale, device=x.device)
    return quotient.nan_to_num(nan=0.0).round().clamp(-128, 127).to(torch.int8)


def _to_store(x: Tensor, kv_cache_dtype: str, scale: Tensor, cache: Tensor) -> Tensor:
    """x [tokens, heads, D]; scale of one element, or one a head."""
    if kv_cache_dtype == "auto":
        return x
    scale = scale.reshape(-1, 1)
    stored = to_int8(x, scale) if kv_cache_dtype == "int8" else to_fp8(x, scale, kv_cache_dtype)
    return stored.view(cache.dtype)


def _last_of_each_slot(slot_mapping: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their blocks and places there: a slot gets the last token that names it."""
    last = {slot: token for token, slot in enumerate(slot_mapping.tolist()) if slot >= 0}
    slots = torch.tensor(list(last), dtype=torch.int64)
    tokens = torch.tensor(list(last.values()), dtype=torch.int64)
    return tokens, slots // block_size, slots % block_size


def _put(cache: Tensor, rows: Tensor, slot_mapping: Tensor, layout: str) -> Tensor:
    """One cache afterwards; rows [tokens, heads, head_size] of its dtype."""
    out = cache.clone()
    stored = out
    if cache.dtype.itemsize == 1:  # torch indexes no float8
        stored, rows = out.view(torch.uint8), rows.view(torch.uint8)
    block_size = cache.shape[{"vllm": 3, "HND": 2, "NHD": 1}[layout]]
    tokens, blocks, places = _last_of_each_slot(slot_mapping, block_size)
    if layout == "NHD":
        stored[blocks, places] = rows[tokens]
    elif layout == "HND":
        stored[blocks, :, places] = rows[tokens]
    elif cache.dim() == 5:  # K [blocks, heads, D/x, block, x]
        stored[blocks, :, :, places] = rows[tokens].unflatten(-1, (-1, cache.shape[4]))
    else:
        stored[blocks, :, :, places] = rows[tokens]
    return out


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """The caches afterwards. K [blocks, heads, D/x, block, x], V [blocks, heads, D, block]."""
    k = _to_store(key, kv_cache_dtype, k_scale, key_cache)
    v = _to_store(value, kv_cache_dtype, v_scale, value_cache)
    return _put(key_cache, k, slot_mapping, "vllm"), _put(value_cache, v, slot_mapping, "vllm")


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """The caches afterwards. K, V [blocks, block, heads, D]."""
    k = _to_store(key, kv_cache_dtype, k_scale, key_cache)
    v = _to_store(value, kv_cache_dtype, v_scale, value_cache)
    return _put(key_cache, k, slot_mapping, "NHD"), _put(value_cache, v, slot_mapping, "NHD")


def write_tokens(
    cache: Tensor, rows: Tensor, slot_mapping: Tensor, layout: str, scale: Tensor | None
) -> Tensor:
    """One cache afterwards; layouts and scales as paged_attention has them.

    rows [tokens, heads, head_size]; scale one element, one a head, or None for 1.
    """
    if cache.dtype.itemsize == 1:
        largest = torch.iinfo if cache.dtype == torch.int8 else torch.finfo
        limits = largest(cache.dtype)
        divisor = torch.ones(1) if scale is None else scale
        quotient = rows.float() / divisor.to(rows.device).reshape(-1, 1)
        quotient = quotient.round() if cache.dtype == torch.int8 else quotient
        rows = quotient.clamp(limits.min, limits.max)
    return _put(cache, rows.to(cache.dtype), slot_mapping, layout)


def _int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows, and the scale of each, [...]."""
    scale = x.float().abs().amax(-1) / torch.tensor(127.0, device=x.device)
    return to_int8(x, torch.where(scale > 0, scale, 1.0)[..., None]), scale


def _int4_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 rows [..., head_size / 2], and scale and zero of each, [...]."""
    x = x.float()
    low, high = x.amin(-1), x.amax(-1)
    span = high - low
    scale = span / torch.tensor(15.0, device=x.device)
    is_flat = scale < 2.0**-100
    scale = scale.masked_fill(is_flat, 0.0).masked_fill(~span.isfinite(), torch.nan)
    inverse = (1.0 / scale)[..., None]
    n = ((x - low[..., None]) * inverse).round().clamp_max(15.0)
    n = torch.where(scale[..., None] > 0, n, 8.0).to(torch.uint8)
    first, second = n.chunk(2, -1)
    return first | second << 4, scale, low + 8.0 * scale


def reshape_and_cache_per_token_quant(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    slot_mapping: Tensor,
    layout: str = "vllm",
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The caches and scales afterwards, and the zeros where there are some."""
    of_tokens = [key_scales, value_scales]
    if key_zeros is None or value_zeros is None:
        (k, *k_parts), (v, *v_parts) = _int8_rows(key), _int8_rows(value)
    else:
        (k, *k_parts), (v, *v_parts) = _int4_rows(key), _int4_rows(value)
        of_tokens += [key_zeros, value_zeros]
    keys = _put(key_cache, k, slot_mapping, layout)
    values = _put(value_cache, v, slot_mapping, layout)
    of_tokens = [x.clone() for x in of_tokens]
    tokens, blocks, places = _last_of_each_slot(slot_mapping, key_scales.size(-1))
    written = [part for pair in zip(k_parts, v_parts) for part in pair]
    for of_token, rows in zip(of_tokens, written):
        of_token[blocks, :, places] = rows[tokens]
    return keys, values, *of_tokens


def _gather(cache: Tensor, rows: Tensor, block_table: Tensor, cu_seq_lens: Tensor,
            seq_starts: Tensor | None) -> Tensor:  # fmt: skip
    """rows afterwards, of a cache [blocks, block, ...]."""
    out = rows.clone()
    block_size, ends = cache.size(1), cu_seq_lens.tolist()
    for seq, (begin, end) in enumerate(pairwise(ends)):
        start = 0 if seq_starts is None else int(seq_starts[seq])
        positions = torch.arange(start, start + end - begin, device=cache.device)
        blocks = block_table[seq].long()[positions // block_size]
        out[begin:end] = cache[blocks, positions % block_size].to(out.dtype)
    return out


def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> Tensor:
    """dst afterwards."""
    return _gather(src_cache, dst, block_table[:batch_size], cu_seq_lens, seq_starts)


gather_cache = cp_gather_cache


def _dequantized(cache: Tensor, scale: Tensor | None) -> Tensor:
    """In float32; `scale` broadcasts."""
    return cache.float() if scale is None else cache.float() * scale


def gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Tensor,
    seq_starts: Tensor | None = None,
) -> Tensor:
    """dst afterwards."""
    if kv_cache_dtype == "auto":
        wide = src_cache
    else:
        stored = {**FP8, "int8": torch.int8}[kv_cache_dtype]
        wide = _dequantized(src_cache.view(stored), scale)
    out = _gather(wide, dst, block_table, cu_seq_lens, seq_starts)
    out[num_tokens:] = dst[num_tokens:]
    return out


def token_rows(cache: Tensor, layout: str) -> Tensor:
    """[num_blocks, ...] -> [num_blocks, block_size, num_kv_heads, head_size]."""
    if layout == "NHD":
        return cache
    if layout == "HND":
        return cache.transpose(1, 2)
    if cache.dim() == 5:  # [blocks, heads, D/x, slots, x]
        return cache.permute(0, 3, 1, 2, 4).flatten(3)
    return cache.permute(0, 3, 1, 2)


def int4_values(packed: Tensor) -> Tensor:
    """n - 8 of the bytes of an int4 cache, [..., elements] -> float32 [..., 2 * elements]."""
    return torch.cat([packed & 15, packed >> 4], -1).float() - 8.0


def gather_paged_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seq_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "vllm",
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """key and value afterwards."""

    def gathered(rows: Tensor, cache: Tensor, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        pages = token_rows(cache, layout)
        if scale is not None and scale.dim() == 3:  # a scale a token and head
            scale = scale.transpose(1, 2)[..., None]
        elif scale is not None:
            scale = scale.reshape(-1, 1)
        if zero is not None:
            pages = int4_values(pages)
        wide = pages if scale is None else _dequantized(pages, scale)
        if zero is not None:
            wide = wide + zero.transpose(1, 2)[..., None]
        return _gather(wide, rows, block_tables, cu_seq_lens, seq_starts)

    return gathered(key, key_cache, k_scale, k_zero), gathered(value, value_cache, v_scale, v_zero)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
) -> Tensor:
    """kv_cache afterwards."""
    if kv_cache_dtype == "fp8_ds_mla":
        entries = _ds_mla_entries(kv_c, k_pe)
    else:
        entries = torch.cat([kv_c, k_pe], -1)
        if kv_cache_dtype != "auto":
            entries = to_fp8(entries, scale.reshape(()), kv_cache_dtype).view(kv_cache.dtype)
    out = kv_cache.clone()
    tokens, blocks, places = _last_of_each_slot(slot_mapping, kv_cache.size(1))
    out[blocks, places] = entries[tokens]
    return out


def _ds_mla_entries(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """[tokens, 656] uint8."""
    tiles = kv_c.float().unflatten(-1, (4, 128))
    largest = tiles.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)
    scales = (largest / torch.tensor(448.0, device=kv_c.device)).clamp_min(2.0**-126)
    latent = to_fp8(tiles, scales[..., None], "fp8").flatten(1)
    return torch.cat([latent, scales.view(torch.uint8), k_pe.bfloat16().view(torch.uint8)], -1)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
) -> Tensor:
    """dst afterwards."""
    out = dst.clone()
    block_size = src_cache.size(1)
    for seq, (start, length) in enumerate(zip(workspace_starts.tolist(), seq_lens.tolist())):
        positions = torch.arange(length, device=src_cache.device)
        blocks = block_table[seq].long()[positions // block_size]
        entries = src_cache[blocks, positions % block_size]
        latent = entries[:, :512].contiguous().view(torch.float8_e4m3fn).float()
        scales = entries[:, 512:528].contiguous().view(torch.float32)
        rope = entries[:, 528:].contiguous().view(torch.bfloat16)
        wide = (latent.unflatten(-1, (4, 128)) * scales[..., None]).flatten(1)
        out[start : start + length] = torch.cat([wide.to(dst.dtype), rope.to(dst.dtype)], -1)
    return out


def concat_mla_q(ql_nope: Tensor, q_pe: Tensor) -> Tensor:
    """q_out."""
    return torch.cat([ql_nope, q_pe], -1)


def copy_blocks(cache: Tensor, block_mapping: Tensor) -> Tensor:
    """One cache afterwards."""
    out = cache.clone()
    for source, destination in block_mapping.tolist():
        out[destination] = cache[source]
    return out


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> Tensor:
    """dst afterwards."""
    out = dst.clone()
    for source, destination in block_mapping.tolist():
        out[destination] = src[source].to(dst.device)
    return out
