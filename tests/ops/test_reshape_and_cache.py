"""reshape_and_cache and reshape_and_cache_flash against their reference, bit for bit: every slot
that was not written keeps what it held, poison included."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, bits, needs_gpu, opcheck
from reshape_and_cache_cases import CACHE_DTYPES, OPS, caches, check, scales, slot_patterns, tokens

import vllm_kernels
from vllm_kernels import reference


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("block", [8, 16, 32])
def test_slot_patterns(op, device, dtype, kv_cache_dtype, block):
    for slots in slot_patterns(11 * block, block, device).values():
        key, value = tokens(len(slots) + 3, 2, 64, dtype, device)
        pools = caches(op, dtype, kv_cache_dtype, device, block=block)
        check(op, key, value, *pools, slots, kv_cache_dtype)


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("size", [32, 40, 64, 80, 96, 120, 128, 192, 256])
def test_head_sizes(op, device, dtype, kv_cache_dtype, size):
    if op == "reshape_and_cache" and kv_cache_dtype != "auto" and size % 16:
        pytest.skip("an 8-bit cache of layout vllm holds head sizes in steps of 16")
    for name in ("offset", "random"):
        slots = slot_patterns(11 * 16, 16, device)[name]
        key, value = tokens(len(slots), 3, size, dtype, device)
        pools = caches(op, dtype, kv_cache_dtype, device, heads=3, size=size)
        check(op, key, value, *pools, slots, kv_cache_dtype)


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("size", [32, 80, 128, 256])
def test_one_scale_a_head(op, device, dtype, kv_cache_dtype, size):
    for name in ("offset", "random", "pages"):
        slots = slot_patterns(11 * 16, 16, device)[name]
        key, value = tokens(len(slots), 3, size, dtype, device)
        pools = caches(op, dtype, kv_cache_dtype, device, heads=3, size=size)
        check(op, key, value, *pools, slots, kv_cache_dtype, by_head=True)


# vLLM's kernel of the newer line drops what lies beyond 512 vectors of a token.
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize(("heads", "size"), [(40, 128), (24, 128), (128, 128), (1, 64), (1, 16)])
def test_many_and_few_heads(op, device, dtype, heads, size, kv_cache_dtype):
    few = torch.tensor([5, 40, 3, -1, 17], device=device)
    many = torch.arange(66, device=device) + 3  # on CUDA the kernel for more than 64 tokens
    for slots in (few, many, many.flip(0)):
        key, value = tokens(len(slots), heads, size, dtype, device)
        pools = caches(op, dtype, kv_cache_dtype, device, blocks=5, heads=heads, size=size)
        check(op, key, value, *pools, slots, kv_cache_dtype, by_head=True)


def test_any_block_size(op, device, dtype):
    for block in (1, 5, 24, 64):
        slots = torch.randperm(6 * block)[: 3 * block].to(device)
        key, value = tokens(len(slots), 2, 32, dtype, device)
        pools = caches(op, dtype, "auto", device, blocks=6, block=block, size=32)
        check(op, key, value, *pools, slots)


def test_head_size_that_fits_no_vector(device, dtype):
    slots = torch.tensor([5, 4, 30], device=device)
    key, value = tokens(3, 3, 7, dtype, device)
    for kv_cache_dtype in CACHE_DTYPES:
        pools = caches(OPS[1], dtype, kv_cache_dtype, device, heads=3, size=7)
        check(OPS[1], key, value, *pools, slots, kv_cache_dtype)


@pytest.mark.parametrize("n", [2, 50, 300, 2000, 9000])
def test_repeated_slots_keep_the_last_token_whole(op, device, n):
    slots = torch.randint(-1, 40, (n,), device=device)
    slots[n // 2 : n // 2 + 16] = torch.arange(16, device=device)[: len(slots) - n // 2]
    for dtype, kv_cache_dtype in ((torch.bfloat16, "auto"), (torch.float32, "fp8")):
        key, value = tokens(n, 2, 64, dtype, device)
        pools = caches(op, dtype, kv_cache_dtype, device, blocks=3)
        check(op, key, value, *pools, slots, kv_cache_dtype)


def test_many_tokens(op, device, dtype):
    n = 9001 if device == "cuda" else 700
    patterns = (torch.randperm(n + 100)[:n], torch.arange(7, n + 7))
    for slots in patterns:
        key, value = tokens(n, 8, 128, dtype, device)
        pools = caches(op, dtype, "auto", device, blocks=(n + 115) // 16, heads=8, size=128)
        check(op, key, value, *pools, slots.to(device))


def test_saturation_and_special_values(op, device, dtype):
    values = [0.0, -0.0, 1e-8, 448.0, 449.0, 464.0, 500.0, 65504.0, -65504.0, 57344.0]
    values += [float("inf"), float("-inf"), float("nan"), 2.0**-9, 2.0**-10, 2.0**-16, 0.0175]
    values += [
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        126.5,
        127.4,
        127.5,
        128.0,
        -127.5,
        -128.5,
        -129.0,
        -200.0,
    ]
    key = torch.tensor(values * 4, device=device, dtype=dtype)[:64].expand(3, 2, 64).contiguous()
    one = torch.ones(1, device=device)
    slots = torch.tensor([0, 1, 20], device=device)
    for kv_cache_dtype in CACHE_DTYPES[1:]:
        pools = caches(op, dtype, kv_cache_dtype, device)
        args = (key, key.flip(0), *pools, slots, kv_cache_dtype, one, one)
        want = getattr(reference, op)(*args)
        getattr(vllm_kernels, op)(*args)
        assert torch.equal(pools[0], want[0]) and torch.equal(pools[1], want[1])


@pytest.mark.parametrize("scale", [0.0, 1e-40, 3e-30, 1.1e-19, 7e18, 3e38, float("inf"), -0.3])
def test_any_scale(op, device, scale):
    """Zero, denormal, infinite and negative scales: the quotient is that of float32."""
    if device == "cpu" and not 0 < scale < float("inf"):
        pytest.skip("a CPU refuses it")
    slots = torch.arange(5, 75, device=device)
    for dtype, size in ((torch.bfloat16, 64), (torch.float32, 32)):
        key, value = tokens(len(slots), 2, size, dtype, device)
        factor = scale if 0 < abs(scale) < 1e30 else 1.0  # quotients that tell rows apart
        key, value = key * factor, value * factor * 100
        key[3, 0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
        for kv_cache_dtype in CACHE_DTYPES[1:]:
            pools = caches(op, dtype, kv_cache_dtype, device, size=size)
            args = (key, value, *pools, slots, kv_cache_dtype)
            factors = torch.tensor([scale], device=device), torch.tensor([scale], device=device)
            want = getattr(reference, op)(*args, *factors)
            getattr(vllm_kernels, op)(*args, *factors)
            assert torch.equal(pools[0], want[0]) and torch.equal(pools[1], want[1])


def test_tensors_of_the_8_bit_dtype_are_taken_as_well(op, device):
    slots = torch.tensor([3, 9], device=device)
    key, value = tokens(2, 2, 64, torch.float16, device)
    named = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
    for name, dtype in named.items():
        pools = [cache.view(dtype) for cache in caches(op, torch.float16, name, device)]
        check(op, key, value, *pools, slots, name)


def test_nothing_to_do(op, device, dtype):
    pools = caches(op, dtype, "auto", device)
    key, value = tokens(4, 2, 64, dtype, device)
    check(op, key, value, *pools, torch.empty(0, dtype=torch.int64, device=device))
    check(op, key[:0], value[:0], *pools, torch.empty(0, dtype=torch.int64, device=device))
    check(op, key, value, *pools, torch.full((4,), -1, device=device))


# Schema and fake kernels do not depend on the dtype.
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
def test_opcheck_and_compile(op, device, dtype, kv_cache_dtype):
    key, value = tokens(4, 2, 64, dtype, device)
    pools = [torch.zeros_like(c) for c in caches(op, dtype, kv_cache_dtype, device)]
    args = (key, value, *pools, torch.arange(4, device=device), kv_cache_dtype, *scales(device))
    opcheck(op, *args)
    assert_compiles(getattr(vllm_kernels, op), *args)


@needs_gpu
def test_graph_replay(op, dtype):
    key, value = tokens(64, 8, 128, dtype, "cuda")
    pools = caches(op, dtype, "auto", "cuda", blocks=40, heads=8, size=128)
    slots = torch.randperm(600, device="cuda")[:64]
    args = (key, value, *pools, slots, "auto", *scales("cuda"))
    call = getattr(vllm_kernels, op)
    call(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*args)
    for refill in (torch.randperm(600)[:64], torch.arange(37, 101), torch.full((64,), -1)):
        slots.copy_(refill)
        key.normal_()
        want = getattr(reference, op)(*args)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(pools[0]), bits(want[0]))
        assert torch.equal(bits(pools[1]), bits(want[1]))
