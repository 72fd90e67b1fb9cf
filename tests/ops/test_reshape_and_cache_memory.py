"""reshape_and_cache and reshape_and_cache_flash: strides, packed tensors and large offsets."""

from __future__ import annotations

import pytest
import torch
from helpers import bits, needs_gpu
from reshape_and_cache_cases import (
    CACHE_DTYPES,
    OPS,
    cache_shapes,
    caches,
    check,
    head_scales,
    poisoned,
    scales,
    slot_patterns,
    tokens,
)

import vllm_kernels
from vllm_kernels import reference


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
def test_strided_key_and_value(op, device, dtype, kv_cache_dtype):
    slots = slot_patterns(11 * 16, 16, device)["offset"]
    n, heads, size = len(slots), 2, 64
    qkv = torch.randn(n, 8 + 2 * heads, size, device=device, dtype=dtype)  # packed projections
    packed = (qkv[:, 8 : 8 + heads], qkv[:, 8 + heads :])
    transposed = torch.randn(2, heads, n, size, device=device, dtype=dtype).transpose(1, 2)
    unaligned = torch.randn(n, 3 + 2 * heads * size, device=device, dtype=dtype)[:, 3:]
    unaligned = unaligned.unflatten(1, (2, heads, size)).unbind(1)
    expanded = (qkv[:1, :heads].expand(n, -1, -1),) * 2
    for key, value in (packed, tuple(transposed), unaligned, expanded):
        pools = caches(op, dtype, kv_cache_dtype, device)
        check(op, key, value, *pools, slots, kv_cache_dtype)


def test_caches_of_a_packed_tensor(op, device, dtype):
    slots = slot_patterns(11 * 16, 16, device)["offset"]
    key, value = tokens(len(slots), 2, 64, dtype, device)
    shapes = cache_shapes(op, 11, 16, 2, 64, dtype.itemsize)
    whole = poisoned((11, 2, 16 * 2 * 64), dtype, device)
    views = [whole[:, i].unflatten(1, shape[1:]) for i, shape in enumerate(shapes)]
    check(op, key, value, *views, slots)
    layers = poisoned((11, 3, 2, 16 * 2 * 64), dtype, device)  # one block of all layers together
    before = bits(layers).clone()
    views = [layers[:, 1, i].unflatten(1, shape[1:]) for i, shape in enumerate(shapes)]
    check(op, key, value, *views, slots)
    for untouched in (0, 2):
        assert torch.equal(bits(layers[:, untouched]), before[:, untouched])


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
def test_layout_hnd_is_a_transposed_view(device, dtype, kv_cache_dtype):
    stored = dtype if kv_cache_dtype == "auto" else torch.uint8
    for slots in slot_patterns(11 * 16, 16, device).values():
        key, value = tokens(len(slots), 2, 64, dtype, device)
        hnd = [poisoned((11, 2, 16, 64), stored, device) for _ in range(2)]
        nhd = [cache.transpose(1, 2).contiguous() for cache in hnd]
        views = [cache.transpose(1, 2) for cache in hnd]
        k_scale, v_scale = head_scales(2, device)
        args = (slots, kv_cache_dtype, k_scale, v_scale)
        want = reference.reshape_and_cache_flash(key, value, *nhd, *args)
        vllm_kernels.reshape_and_cache_flash(key, value, *views, *args)
        for cache, rows in zip(hnd, want):
            assert torch.equal(bits(cache), bits(rows.transpose(1, 2)))


def test_interleaved_caches(device, dtype):
    slots = slot_patterns(11 * 16, 16, device)["offset"]
    key, value = tokens(len(slots), 2, 64, dtype, device)
    together = poisoned((11, 16, 2, 2, 64), dtype, device)  # K and V of a token side by side
    check(OPS[1], key, value, together[:, :, 0], together[:, :, 1], slots)


def test_offsets_beyond_32_bits(op, device):
    # A block stride of 2^31 elements over memory that is reserved and hardly touched.
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    stride, blocks = 2**31, 3
    shapes = cache_shapes(op, blocks, 16, 2, 64, 2)
    memory = torch.empty((blocks - 1) * stride + 8192, dtype=torch.bfloat16, device=device)
    views = []
    for shape in shapes:
        inner = torch.empty(shape[1:], device="meta").stride()
        views.append(memory.as_strided(shape, (stride, *inner), len(views) * 4096))
        views[-1].zero_()
    slots = torch.tensor([2 * 16 + 5, 3, *range(16, 32)], device=device)
    key, value = tokens(len(slots), 2, 64, torch.bfloat16, device)
    k_scale, v_scale = scales(device)
    getattr(vllm_kernels, op)(key, value, *views, slots, "auto", k_scale, v_scale)
    small = [view.clone(memory_format=torch.contiguous_format).zero_() for view in views]
    check(op, key, value, *small, slots)
    for view, want in zip(views, small):
        assert torch.equal(view, want)


@needs_gpu
def test_real_cache_of_more_than_2_31_elements(op):
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    heads, size, block = 8, 128, 16
    blocks = 2**31 // (heads * size * block) + 100
    shapes = cache_shapes(op, blocks, block, heads, size, 2)
    key_cache, value_cache = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes
    )
    last = blocks * block
    slots = torch.cat([torch.arange(last - 64, last), torch.tensor([5, last - 1000])]).cuda()
    key, value = tokens(len(slots), heads, size, torch.bfloat16, "cuda")
    k_scale, v_scale = scales("cuda")
    getattr(vllm_kernels, op)(key, value, key_cache, value_cache, slots, "auto", k_scale, v_scale)
    used = slots // block
    around, index = used.unique(return_inverse=True)
    small = [torch.zeros_like(cache[around]) for cache in (key_cache, value_cache)]
    check(op, key, value, *small, index * block + slots % block)
    assert torch.equal(key_cache[around], small[0]) and torch.equal(value_cache[around], small[1])
    assert key_cache.count_nonzero() == small[0].count_nonzero()
