"""The paged KV cache: writing, copying, converting."""

from __future__ import annotations

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
    bytes_ = (x.float() / divisor).clamp(-largest, largest).to(FP8[kv_dtype]).view(torch.uint8)
    return torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8, device=x.device), bytes_)


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
    keys, values = key_cache.clone(), value_cache.clone()
    block_size, x = key_cache.shape[3:]
    k = _to_store(key, kv_cache_dtype, k_scale, key_cache).unflatten(-1, (-1, x))
    v = _to_store(value, kv_cache_dtype, v_scale, value_cache)
    tokens, blocks, places = _last_of_each_slot(slot_mapping, block_size)
    keys[blocks, :, :, places] = k[tokens]
    values[blocks, :, :, places] = v[tokens]
    return keys, values


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
    keys, values = key_cache.clone(), value_cache.clone()
    block_size = key_cache.shape[1]
    k = _to_store(key, kv_cache_dtype, k_scale, key_cache)
    v = _to_store(value, kv_cache_dtype, v_scale, value_cache)
    tokens, blocks, places = _last_of_each_slot(slot_mapping, block_size)
    keys[blocks, places] = k[tokens]
    values[blocks, places] = v[tokens]
    return keys, values


def write_tokens(
    cache: Tensor, rows: Tensor, slot_mapping: Tensor, layout: str, scale: Tensor | None
) -> Tensor:
    """One cache afterwards; layouts and scales as paged_attention has them.

    rows [tokens, heads, head_size]; scale one element, one a head, or None for 1.
    """
    out = cache.clone()
    if cache.dtype.itemsize == 1:
        largest = torch.iinfo if cache.dtype == torch.int8 else torch.finfo
        limits = largest(cache.dtype)
        divisor = torch.ones(1) if scale is None else scale
        quotient = rows.float() / divisor.to(rows.device).reshape(-1, 1)
        quotient = quotient.round() if cache.dtype == torch.int8 else quotient
        rows = quotient.clamp(limits.min, limits.max)
    rows = rows.to(cache.dtype)
    block_size = cache.shape[{"vllm": 3, "HND": 2, "NHD": 1}[layout]]
    for token, block, place in zip(*_last_of_each_slot(slot_mapping, block_size)):
        if layout == "NHD":
            out[block, place] = rows[token]
        elif layout == "HND":
            out[block, :, place] = rows[token]
        elif cache.dim() == 5:  # K [blocks, heads, D/x, block, x]
            out[block, :, :, place] = rows[token].unflatten(-1, (-1, cache.shape[4]))
        else:
            out[block, :, :, place] = rows[token]
    return out


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows, and the scale of each, [...]."""
    scale = x.float().abs().amax(-1) / torch.tensor(127.0, device=x.device)
    return to_int8(x, torch.where(scale > 0, scale, 1.0)[..., None]), scale


def reshape_and_cache_per_token_quant(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    slot_mapping: Tensor,
    layout: str = "vllm",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The caches and scales afterwards."""
    k, k_scales = quantise_rows(key)
    v, v_scales = quantise_rows(value)
    one = torch.ones(1)
    if layout == "vllm":
        keys, values = reshape_and_cache(
            k, v, key_cache, value_cache, slot_mapping, "auto", one, one
        )
    else:
        swap = layout == "HND"
        pages = [c.transpose(1, 2) if swap else c for c in (key_cache, value_cache)]
        written = reshape_and_cache_flash(k, v, *pages, slot_mapping, "auto", one, one)
        keys, values = (c.transpose(1, 2) if swap else c for c in written)
    key_scales, value_scales = key_scales.clone(), value_scales.clone()
    tokens, blocks, places = _last_of_each_slot(slot_mapping, key_scales.size(-1))
    key_scales[blocks, :, places] = k_scales[tokens]
    value_scales[blocks, :, places] = v_scales[tokens]
    return keys, values, key_scales, value_scales


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
