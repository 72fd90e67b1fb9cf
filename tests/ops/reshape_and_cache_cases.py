"""Caches, tokens and slots for reshape_and_cache, and its check bit for bit."""

from __future__ import annotations

import torch
from helpers import bits
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

OPS = ["reshape_and_cache", "reshape_and_cache_flash"]
CACHE_DTYPES = ["auto", "fp8_e4m3", "fp8_e5m2", "int8"]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def cache_shapes(op: str, blocks: int, block: int, heads: int, size: int, itemsize: int):
    if op == "reshape_and_cache":
        x = 16 // itemsize
        return (blocks, heads, size // x, block, x), (blocks, heads, size, block)
    return ((blocks, block, heads, size),) * 2


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """NaN of many different bit patterns, so that a moved or rewritten byte shows."""
    integer = BITS[dtype.itemsize]
    noise = torch.randint(0, 100, shape, device=device, dtype=torch.int32)
    nan = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}.get(dtype, 100)
    return (noise + nan).to(integer).view(dtype)


def caches(op, dtype, kv_cache_dtype, device, *, blocks=11, block=16, heads=2, size=64):
    stored = dtype if kv_cache_dtype == "auto" else torch.uint8
    shapes = cache_shapes(op, blocks, block, heads, size, stored.itemsize)
    return tuple(poisoned(shape, stored, device) for shape in shapes)


def tokens(n: int, heads: int, size: int, dtype: torch.dtype, device: str):
    key, value = (torch.randn(n, heads, size, device=device, dtype=dtype) for _ in range(2))
    return key * 30, value * 3


def scales(device: str) -> tuple[Tensor, Tensor]:
    return torch.tensor(0.37, device=device), torch.tensor([1.7], device=device)


def head_scales(heads: int, device: str) -> tuple[Tensor, Tensor]:
    k_scale, v_scale = torch.rand(2, heads, device=device) + 0.1
    return k_scale, v_scale


def check(op, key, value, key_cache, value_cache, slots, kv_cache_dtype="auto", by_head=False):
    k_scale, v_scale = scales(key_cache.device)
    if by_head:
        k_scale, v_scale = head_scales(key.size(1), key_cache.device)
    args = (key, value, key_cache, value_cache, slots, kv_cache_dtype, k_scale, v_scale)
    want_k, want_v = getattr(reference, op)(*args)
    getattr(vllm_kernels, op)(*args)
    assert torch.equal(bits(key_cache), bits(want_k)), "key_cache"
    assert torch.equal(bits(value_cache), bits(want_v)), "value_cache"


def slot_patterns(num_slots: int, block: int, device: str) -> dict[str, Tensor]:
    """What an engine's slot mappings look like."""
    random = torch.randperm(num_slots)[: num_slots // 2]
    pages = torch.randperm(num_slots // block)
    run = (pages[:4, None] * block + torch.arange(block)).flatten()
    offset = torch.cat([random[:5], run])  # pages that do not begin at a multiple of the block size
    broken = run.clone()
    broken[block + 3] = -1  # a page with a hole
    short = torch.cat([run[: block - 1], run[block:]])  # a page that lacks its last token
    patterns = {
        "random": random,
        "pages": run,
        "offset": offset,
        "hole": broken,
        "short": short,
        "tail": run[: 2 * block - 3],
        "inside": run[3 : 3 * block],
        "backwards": run.flip(0),
        "padding": torch.cat([random[:7], torch.full((9,), -1)]),
        "one": random[:1],
    }
    return {name: slots.to(device) for name, slots in patterns.items()}
