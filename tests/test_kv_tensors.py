"""KVCache: the tensors of a paged cache, of every layout and type."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager
from vllm_kernels.kv_cache.tensors import (
    CACHE_DTYPES,
    LAYOUTS,
    KVCache,
    KVShape,
    Pairs,
    free_memory,
)

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_size=64, dtype=torch.float32, block_size=8)

OF_TOKENS = ["int8_per_token", "int4_per_token"]


def shape(**changes: object) -> KVShape:
    fields = {name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}
    return KVShape(**(fields | changes))


def fill(cache: KVCache, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores tokens in the first slots."""
    size = (num_tokens, cache.shape.num_kv_heads, cache.shape.head_size)
    key, value = torch.randn(2, *size, dtype=cache.shape.dtype, device=cache.device)
    cache.write(layer, key, value, torch.arange(num_tokens, device=cache.device))
    return key, value


def attend(cache: KVCache, layer: int, blocks: list[int], num_tokens: int, seed: int = 0):
    query = torch.randn(1, 4, cache.shape.head_size, generator=torch.Generator().manual_seed(seed))
    return cache.attend(
        layer,
        query.to(cache.device, cache.shape.dtype),
        torch.tensor([blocks], dtype=torch.int32, device=cache.device),
        torch.tensor([num_tokens], dtype=torch.int32, device=cache.device),
    )


@pytest.mark.parametrize("cache_dtype", ["auto", *CACHE_DTYPES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_and_attend(layout: str, cache_dtype: str, device: str) -> None:
    """All layouts and types hold the same tokens, 8-bit ones roughly."""
    scales = {"auto": 1.0, "fp8_e5m2": 1e-3, "int8": 0.03}
    scale = 1.0 if "per_token" in cache_dtype else scales.get(cache_dtype, 0.02)
    cache = KVCache(
        shape(layout=layout, cache_dtype=cache_dtype), 4, device=device,
        k_scale=scale, v_scale=torch.full((3, 2), scale),
    )  # fmt: skip
    key, value = fill(cache, 1, 20)
    got = attend(cache, 1, [0, 1, 2, 3], 20)
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)).to(device)
    scores = torch.einsum("hd,thd->ht", query[0], key.repeat_interleave(2, 1)) * 64**-0.5
    expected = torch.einsum("ht,thd->hd", scores.softmax(-1), value.repeat_interleave(2, 1))
    tolerance = 1e-5 if cache_dtype == "auto" else 0.25
    torch.testing.assert_close(got[0], expected, atol=tolerance, rtol=tolerance)
    assert cache.key_caches[0].dtype == cache.shape.stored_dtype


@pytest.mark.parametrize("cache_dtype", ["auto", *OF_TOKENS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies(layout: str, cache_dtype: str, device: str) -> None:
    """Of blocks with their scales and zeros."""
    cache = KVCache(
        shape(layout=layout, cache_dtype=cache_dtype), 6, device=device, num_host_blocks=4
    )
    for layer in range(3):
        fill(cache, layer, 16)
    before = [attend(cache, layer, [0, 1], 16) for layer in range(3)]
    cache.copy(torch.tensor([[0, 4], [1, 5]]))
    cache.swap_out(torch.tensor([[0, 3], [1, 0]]))
    for tensor in (*cache.key_caches, *cache.value_caches):
        tensor[:4] = float("nan") if tensor.is_floating_point() else 99
    of_tokens = cache.key_scales, cache.value_scales, cache.key_zeros, cache.value_zeros
    for tensor in itertools.chain(*of_tokens):
        tensor[:4] = float("nan")
    cache.swap_in(torch.tensor([[3, 2], [0, 1]]))
    for layer in range(3):
        assert torch.equal(attend(cache, layer, [4, 5], 16), before[layer])
        assert torch.equal(attend(cache, layer, [2, 1], 16), before[layer])
    nothing = torch.empty(0, 2, dtype=torch.int64)
    cache.copy(nothing)
    cache.swap_out(nothing)


def test_scales_of_tokens(device: str) -> None:
    """Tokens of widely different sizes are as exact as any; a block has its scales' bytes, too."""
    scaled = shape(cache_dtype="int8_per_token")
    assert scaled.token_bytes == 2 * 2 * (64 + 4) and scaled.block_bytes == 3 * 8 * 272
    cache = KVCache(scaled, 4, device=device)
    assert cache.key_scales[2].shape == (4, 2, 8) and len(cache.value_scales) == 3
    key, value = torch.randn(2, 20, 2, 64, device=device) * 10.0 ** torch.arange(-3, 1).repeat(5)[
        :, None, None
    ].to(device)
    cache.write(1, key, value, torch.arange(20, device=device))
    wide = KVCache(SHAPE, 4, device=device)
    wide.write(1, key, value, torch.arange(20, device=device))
    got, want = (attend(one, 1, [0, 1, 2], 20) for one in (cache, wide))
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
    cache.free()
    assert not cache.key_scales


def test_zeros_of_tokens(device: str) -> None:
    """int4 takes half of int8's bytes, and a zero for each scale."""
    both = shape(cache_dtype="int4_per_token")
    assert both.token_bytes == 2 * 2 * (32 + 8) and both.block_bytes == 3 * 8 * 160
    assert both.cache_shapes(4) == ((4, 2, 2, 8, 16), (4, 2, 32, 8))
    cache = KVCache(both, 4, device=device, tensor_of_layer=[2, 0, 1, 0])
    assert cache.value_zeros[0].shape == (4, 2, 8) and len(cache.key_zeros) == 4
    assert cache.key_zeros[1] is cache.key_zeros[3]
    tensors = [cache.key_caches, cache.value_caches, cache.key_scales, cache.value_scales]
    tensors += [cache.key_zeros, cache.value_zeros]
    assert sum(x[layer].nbytes for x in tensors for layer in range(3)) == 4 * both.block_bytes
    cache.free()
    assert not cache.key_zeros and not cache.value_zeros


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotated_tokens_have_scales(layout: str, device: str) -> None:
    """rope_and_write and decode, with norms: as over a cache of the model's dtype."""
    positions = torch.arange(20, device=device)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(32, device=device) / 32)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    norms = dict(zip(("q_weight", "k_weight"), 1 + torch.rand(2, 64, device=device)))
    qkv = torch.randn(20, 8 * 64, device=device)
    blocks = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    length = torch.tensor([20], dtype=torch.int32, device=device)
    results = []
    for cache_dtype in ("auto", *OF_TOKENS):
        cache = KVCache(shape(layout=layout, cache_dtype=cache_dtype), 3, device=device)
        query, key, value = qkv[:19].clone().view(19, 8, 64).split([4, 2, 2], 1)
        before = key.clone()
        cache.rope_and_write(1, positions[:19], query, key, value, table, positions[:19], **norms)
        assert torch.equal(key, before)
        last = cache.decode(
            1, qkv[19:].clone(), positions[19:], table, positions[19:], blocks, length, **norms
        )
        results.append((query, last))
    for result, tolerance in zip(results[1:], (0.03, 0.3), strict=True):
        for got, want in zip(result, results[0]):
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cache_dtype", OF_TOKENS)
def test_what_has_no_scales_of_tokens(cache_dtype: str, device: str) -> None:
    with pytest.raises(NotImplementedError, match=f"page_bounds: .* False with {cache_dtype}"):
        shape(cache_dtype=cache_dtype, page_bounds=True)
    with pytest.raises(ValueError, match=rf"k_scale: expected 1.0 .* this one is {cache_dtype}"):
        KVCache(shape(cache_dtype=cache_dtype), 4, k_scale=0.5)
    cache = KVCache(shape(cache_dtype=cache_dtype), 4, device=device)
    query, table = torch.randn(1, 4, 64, device=device), torch.zeros(1, 1, device=device).int()
    with pytest.raises(NotImplementedError, match="attend_sparq: expected another cache_dtype th"):
        cache.attend_sparq(0, query, table, table[0], r=8, k=8)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, np.ndarray.tolist])
def test_pairs_of_the_manager(kind: Callable[[np.ndarray], Pairs], device: str) -> None:
    """A fork that is written, and sequences on the host, by what the manager returned."""
    manager = KVCacheManager(6, 8, num_host_blocks=4)
    cache = KVCache(SHAPE, 6, device=device, num_host_blocks=4)
    buffers = BatchBuffers.zeros(max_sequences=2, max_blocks=3, max_tokens=16)
    manager.allocate(1, 12)
    slots = torch.as_tensor(manager.slot_mapping(1)).to(device)
    tokens = torch.randn(2, 12, 2, 64, device=device)
    cache.write(2, *tokens, slots)
    before = attend(cache, 2, manager.block_table(1).tolist(), 12)
    manager.fork(1, 2)
    pairs = manager.step([1, 2], 1, buffers)
    assert len(pairs) == 1
    cache.copy(kind(pairs))
    for sequence in (1, 2):
        assert torch.equal(attend(cache, 2, manager.block_table(sequence).tolist(), 12), before)
    pairs = manager.swap_out([1, 2])
    assert len(pairs) == 3
    cache.swap_out(kind(pairs))
    for tensor in (*cache.key_caches, *cache.value_caches):
        tensor.fill_(float("nan"))
    cache.swap_in(kind(manager.swap_in([1, 2])))
    for sequence in (1, 2):
        assert torch.equal(attend(cache, 2, manager.block_table(sequence).tolist(), 12), before)


def test_layers_of_different_groups_share_tensors() -> None:
    cache = KVCache(shape(num_layers=2), 4, tensor_of_layer=[0, 1, 0, 1])
    assert cache.key_caches[0] is cache.key_caches[2]
    fill(cache, 3, 8)
    before = attend(cache, 3, [0], 8)
    cache.copy(torch.tensor([[0, 2]]))  # once, not once a layer
    assert torch.equal(attend(cache, 1, [2], 8), before)
    with pytest.raises(ValueError, match=r"tensor_of_layer: expected all of 0 to 1"):
        KVCache(shape(num_layers=2), 4, tensor_of_layer=[0, 0])


def test_copies_and_swaps_take_bounds_along(device: str) -> None:
    cache = KVCache(shape(page_bounds=True), 4, device=device, num_host_blocks=2)
    fill(cache, 1, 8)
    before = cache.page_bounds[1][0].clone()
    assert (before[:, 0] <= before[:, 1]).all()
    cache.copy(torch.tensor([[0, 2]]))
    assert torch.equal(cache.page_bounds[1][2], before)
    cache.swap_out(torch.tensor([[2, 1]]))
    cache.swap_in(torch.tensor([[1, 3]]))
    assert torch.equal(cache.page_bounds[1][3], before)


def test_sizes() -> None:
    assert SHAPE.block_bytes == 2 * 3 * 8 * 2 * 64 * 4
    assert shape(cache_dtype="fp8", dtype=torch.bfloat16).block_bytes == SHAPE.block_bytes // 4
    assert shape(page_bounds=True).block_bytes == SHAPE.block_bytes + 3 * 2 * 2 * 64 * 4
    cache = KVCache.from_bytes(SHAPE, 5 * SHAPE.block_bytes + 1, host_bytes=2 * SHAPE.block_bytes)
    assert (cache.num_blocks, cache.num_host_blocks) == (5, 2)
    tensors = cache.key_caches + cache.value_caches
    assert sum(tensor.nbytes for tensor in tensors) == 5 * SHAPE.block_bytes
    with pytest.raises(ValueError, match="a block takes 24,576 bytes, got 100"):
        KVCache.from_bytes(SHAPE, 100)
    assert not cache.is_freed
    cache.free()
    assert cache.is_freed


def test_free_memory(device: str) -> None:
    free = free_memory(torch.device(device))
    assert free > 1 << 20
    cache = KVCache.from_free_memory(SHAPE, 1e-4, device=device)
    assert 0.5 < cache.num_blocks * SHAPE.block_bytes / (free * 1e-4) <= 1.5
    with pytest.raises(ValueError, match="fraction: expected more than 0, up to 1, got 2"):
        KVCache.from_free_memory(SHAPE, 2, device=device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected at least 1, got 0"),
        ({"head_size": 264}, "head size: expected a multiple of 8 from 32 to 256, got 264"),
        (
            {"head_size": 40, "cache_dtype": "fp8"},
            "head size: expected a multiple of 16 from 32 to 256, got 40",
        ),
        (
            {"head_size": 80, "cache_dtype": "int4_per_token"},
            "head size: expected a multiple of 32 from 32 to 256 for int4_per_token, got 80",
        ),
        ({"dtype": torch.float64}, "dtype: expected float32, float16 or bfloat16"),
        ({"block_size": 24}, "block_size: expected a power of two from 1 to 256, got 24"),
        ({"layout": "DNH"}, "layout: expected vllm or NHD or HND, got 'DNH'"),
        ({"cache_dtype": "fp4"}, "cache_dtype: expected auto, fp8,"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, object], message: str) -> None:
    wrong = {"num_layers", "num_kv_heads", "layout", "cache_dtype"}  # no shape has such values
    is_wrong = message.partition(":")[0] in wrong
    with pytest.raises(ValueError if is_wrong else NotImplementedError, match=message):
        shape(**changes)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="num_blocks: expected at least 1, got 0"):
        KVCache(SHAPE, 0)
    with pytest.raises(ValueError, match="num_host_blocks: expected >= 0, got -1"):
        KVCache(SHAPE, 1, num_host_blocks=-1)
    with pytest.raises(ValueError, match=r"k_scale: expected a number, \[3\] or \[3, 2\]"):
        KVCache(SHAPE, 1, k_scale=torch.ones(2))
    for scale in (0.5, float("nan"), torch.full((3,), 2.0)):
        with pytest.raises(ValueError, match=r"v_scale: expected 1.0 .only 8-bit.*torch.float32"):
            KVCache(SHAPE, 1, v_scale=scale)
    for scale in (0, -1.0, float("nan"), float("inf"), torch.tensor([1.0, 1.0, 0.0])):
        with pytest.raises(ValueError, match="k_scale: expected more than 0 and finite, got"):
            KVCache(shape(cache_dtype="int8"), 1, k_scale=scale)
    cache = KVCache(SHAPE, 1)
    with pytest.raises(RuntimeError, match="there are no host blocks"):
        cache.swap_out([[0, 0]])
    with pytest.raises(TypeError, match=r"pairs: expected integers, .n, 2., got \[\[0.5, 0\]\]"):
        cache.copy([[0.5, 0]])
    for layer in (3, -1):
        with pytest.raises(IndexError, match=f"layer: expected 0 to 2, got {layer}"):
            fill(cache, layer, 4)
    cache.free()
    with pytest.raises(RuntimeError, match="it was freed"):
        attend(cache, 0, [0], 1)
