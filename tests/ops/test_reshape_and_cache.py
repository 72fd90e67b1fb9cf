"""reshape_and_cache and reshape_and_cache_flash against their reference, bit for bit: every slot
that was not written keeps what it held, poison included."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_compiles, bits, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

OPS = ["reshape_and_cache", "reshape_and_cache_flash"]
CACHE_DTYPES = ["auto", "fp8_e4m3", "fp8_e5m2", "int8"]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=OPS, ids=["vllm", "flash"])
def op(request: pytest.FixtureRequest) -> str:
    return request.param


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


@pytest.mark.parametrize("n", [2, 50, 300, 2000, 9000])
def test_repeated_slots_keep_the_last_token_whole(op, device, n):
    slots = torch.randint(-1, 40, (n,), device=device)
    slots[n // 2 : n // 2 + 16] = torch.arange(16, device=device)[: len(slots) - n // 2]
    for dtype, kv_cache_dtype in ((torch.bfloat16, "auto"), (torch.float32, "fp8")):
        key, value = tokens(n, 2, 64, dtype, device)
        pools = caches(op, dtype, kv_cache_dtype, device, blocks=3)
        check(op, key, value, *pools, slots, kv_cache_dtype)


@pytest.mark.parametrize("n", [40, 300, 2000])
def test_bad_slots_do_not_stand_for_good_ones(op, device, n):
    """On a GPU: a later slot that is no slot but has a good one's lower half."""
    if device == "cpu":
        pytest.skip("an error on a CPU")
    key, value = tokens(n, 2, 64, torch.bfloat16, device)
    for slots in (torch.randperm(n // 2, device=device), torch.arange(n // 2, device=device)):
        pools = caches(op, torch.bfloat16, "auto", device, blocks=-(-n // 32))
        args = [key, value, *pools, torch.cat([slots, slots + 2**32]), "auto", *scales(device)]
        want = getattr(reference, op)(*args[:4], torch.cat([slots, slots * 0 - 1]), *args[5:])
        getattr(vllm_kernels, op)(*args)
        assert all(torch.equal(bits(pool), bits(x)) for pool, x in zip(pools, want))


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


@pytest.mark.parametrize("bad", [-2, 11 * 16, 2**40, -(2**40), 2**32 + 5])
def test_bad_slots(op, device, bad):
    pools = caches(op, torch.float32, "auto", device)
    key, value = tokens(4, 2, 64, torch.float32, device)
    slots = torch.tensor([5, 6, bad, 8], device=device)
    args = (key, value, *pools, slots, "auto", *scales(device))
    if device == "cpu":
        before = [bits(pool).clone() for pool in pools]
        with raises(
            rf"^{op}: slot_mapping\[2\] = {bad}: expected -1 \(skipped\) or a slot in \[0, 176\)$"
        ):
            getattr(vllm_kernels, op)(*args)
        for pool, want in zip(pools, before):
            assert torch.equal(bits(pool), want)
    else:  # contained: the others are written
        good = torch.tensor([5, 6, -1, 8], device=device)
        want = getattr(reference, op)(*args[:4], good, *args[5:])
        getattr(vllm_kernels, op)(*args)
        torch.cuda.synchronize()
        assert torch.equal(bits(pools[0]), bits(want[0]))
        assert torch.equal(bits(pools[1]), bits(want[1]))


def test_bad_scales_on_the_cpu(op):
    key, value = tokens(4, 2, 64, torch.float32, "cpu")
    slots, one = torch.arange(4), torch.ones(1)
    for value_, text in ((float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0"), (-1.0, "-1")):
        for shape in ((1,), (), (2,)):
            bad, good = torch.full(shape, value_), torch.ones(shape)
            for kind in ("fp8", "fp8_e5m2", "int8"):
                caches_ = caches(op, torch.float32, kind, "cpu")
                before = [bits(cache).clone() for cache in caches_]
                for name, given in (("k_scale", (bad, good)), ("v_scale", (good, bad))):
                    with raises(rf"^{op}: {name}\[0\] = {text}: expected a finite number > 0$"):
                        getattr(vllm_kernels, op)(key, value, *caches_, slots, kind, *given)
                assert all(torch.equal(bits(a), b) for a, b in zip(caches_, before))
        unused = torch.tensor([value_])  # with "auto" scales are not read
        plain = caches(op, torch.float32, "auto", "cpu")
        getattr(vllm_kernels, op)(key, value, *plain, slots, "auto", unused, one)


def test_bad_input(op, device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    kc, vc = caches(op, torch.float32, "auto", device)
    k8, v8 = caches(op, torch.float32, "fp8", device)
    slots = torch.arange(4, device=device)
    ks, vs = scales(device)
    good = {
        "key": key, "value": value, "key_cache": kc, "value_cache": vc, "slot_mapping": slots,
        "kv_cache_dtype": "auto", "k_scale": ks, "v_scale": vs,
    }  # fmt: skip
    cases: list[tuple[dict[str, object], str]] = [
        ({"key": key.long()}, r"key: expected float32, float16 or bfloat16, got int64"),
        ({"key": key.flatten(1)},
         r"key: expected shape \[num_tokens, num_kv_heads, head_size\], got shape \[4, 128\]"),
        ({"key": key.transpose(1, 2).contiguous().transpose(1, 2)},
         r"key: expected stride 1 in the last dimension"),
        ({"value": value.half()}, r"value: expected float32 \(from key\), got float16"),
        ({"value": value[:3]}, r"value: expected num_tokens = 4 \(from key\) at dimension 0"),
        ({"value": value[:, :1]}, r"value: expected num_kv_heads = 2 \(from key\)"),
        ({"kv_cache_dtype": "int4"},
         r'kv_cache_dtype: expected "auto", "fp8", "fp8_e4m3", "fp8_e5m2" or "int8", got "int4"$'),
        ({"kv_cache_dtype": "fp8"}, r"_cache: expected uint8 or float8_e4m3fn \(from kv_cache"),
        ({"key_cache": k8, "value_cache": v8}, r"_cache: expected float32 \(from kv_cache_dtype"),
        ({"key_cache": kc[:10]}, r"_cache: expected num_blocks = 1"),
        ({"key_cache": kc.flatten(2)}, r"key_cache: expected shape \[num_blocks, "),
        ({"value_cache": vc[:1].expand(11, -1, -1, -1)}, r"value_cache: is written, so"),
        ({"value_cache": kc.flatten()[: vc.numel()].view(vc.shape)},
         r"key_cache and value_cache overlap in memory"),
        ({"key": kc.flatten()[:512].view(4, 2, 64)}, r"key_cache and key overlap in memory"),
        ({"slot_mapping": slots.int()},
         r"slot_mapping: expected int64, got int32; cast it with .long\(\)"),
        ({"slot_mapping": slots[None]}, r"slot_mapping: expected 1 dimensions, got shape \[1, 4\]"),
        ({"slot_mapping": torch.arange(5, device=device)},
         r"slot_mapping: expected at most num_tokens = 4 \(from key\) slots, got shape \[5\]"),
        ({"slot_mapping": torch.arange(8, device=device)[::2]},
         r"slot_mapping: expected stride 1 in the last dimension"),
        ({"k_scale": ks.double()}, r"k_scale: expected float32, got float64; cast it"),
        ({"v_scale": torch.ones(3, device=device)},
         r"v_scale: expected one element, or num_kv_heads = 2, got shape \[3\]$"),
        ({"v_scale": torch.ones(2, device=device)},
         r"v_scale: expected 1 elements \(from k_scale\), got shape \[2\]$"),
        ({"k_scale": torch.ones(4, device=device)[::2], "v_scale": torch.ones(2, device=device)},
         r"k_scale: expected a contiguous tensor, got strides \[2\]"),
        ({"k_scale": 1.0},
         r"k_scale: expected a float32 tensor of one element or \[num_kv_heads\], got 1\.0$"),
        ({"v_scale": None}, r"v_scale: expected a tensor, got None$"),
    ]  # fmt: skip
    if op == "reshape_and_cache":
        cases += [
            ({"key_cache": kc.transpose(2, 3).contiguous().transpose(2, 3)},
             r"key_cache: expected the page of a head to be contiguous"),
            ({"key_cache": kc.view(11, 2, 8, 16, 8)}, r"key_cache: expected head_size / x = 16"),
        ]  # fmt: skip
    for change, message in cases:
        before = bits(kc).clone(), bits(vc).clone()
        with raises(rf"^{op}: .*{message}"):
            getattr(vllm_kernels, op)(**{**good, **change})
        assert torch.equal(bits(kc), before[0]) and torch.equal(bits(vc), before[1])
    for name in ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale"):
        with pytest.raises((RuntimeError, TypeError)):
            getattr(torch.ops.vllm_kernels, op)(**{**good, name: None})


def test_sizes_of_0(op, device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    slots = torch.full((4,), -1, device=device)
    empty = caches(op, torch.float32, "auto", device, block=0)
    with raises(rf"^{op}: key_cache: expected block_size >= 1, got shape \[11, "):
        getattr(vllm_kernels, op)(key, value, *empty, slots, "auto", *scales(device))
    for heads, size in ((0, 64), (2, 0), (0, 0)):  # nothing to write
        none = torch.empty(4, heads, size, device=device)
        getattr(vllm_kernels, op)(
            none, none, *caches(op, torch.float32, "auto", device, heads=heads, size=size),
            slots, "auto", *scales(device),
        )  # fmt: skip


def test_8_bit_cache_of_odd_head_size(device):
    key, value = tokens(4, 2, 40, torch.float32, device)
    kc = torch.zeros(11, 2, 2, 16, 16, dtype=torch.uint8, device=device)
    vc = torch.zeros(11, 2, 40, 16, dtype=torch.uint8, device=device)
    with raises(r"expected head_size to be a multiple of 16 for a float8_e4m3fn cache, got 40$"):
        vllm_kernels.reshape_and_cache(
            key, value, kc, vc, torch.arange(4, device=device), "fp8", *scales(device)
        )


def test_inference_only(op, device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    pools = caches(op, torch.float32, "auto", device)
    args = (value, *pools, torch.arange(4, device=device), "auto", *scales(device))
    with raises(rf"^{op}: \w+: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, op)(key.requires_grad_(), *args)
    with torch.no_grad():
        getattr(vllm_kernels, op)(key, *args)
    for index in (-2, -1):
        call = [key.detach(), *args[:5], *scales(device)]
        call[index].requires_grad_()
        with raises(rf"^{op}: \w+: requires grad, .*no_grad\(\)$"):
            getattr(vllm_kernels, op)(*call)


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


# VLLM_KERNELS_CHECK is read once a process.
CHECK_MODE = """
import torch, vllm_kernels
def call(slots):
    key = torch.randn(4, 2, 64, device="cuda")
    cache = torch.zeros(11, 16, 2, 64, device="cuda")
    one = torch.ones(1, device="cuda")
    slots = torch.tensor(slots, device="cuda")
    vllm_kernels.reshape_and_cache_flash(key, key, cache, cache.clone(), slots, "auto", one, one)
def message(run):
    try:
        run()
    except RuntimeError as error:
        return str(error)
op = "reshape_and_cache_flash: "
bad = op + "slot_mapping[2] = 999: expected -1 (skipped) or a slot in [0, 176)"
twice = op + "slot_mapping[3] = 6: expected a slot that no earlier element names"
call([5, -1, 7, 8])
vllm_kernels.check()
call([5, 6, 999, 8])
assert message(vllm_kernels.check) == bad
vllm_kernels.check()  # reported once
others = range(1, torch.cuda.device_count())
assert not any(torch._C._cuda_hasPrimaryContext(device) for device in others)
many = torch.arange(3000, device="cuda")  # more than the scan's block has threads
many[2900] = many[1700]
wide, pages = torch.randn(3000, 1, 64, device="cuda"), torch.zeros(200, 16, 1, 64, device="cuda")
vllm_kernels.reshape_and_cache_flash(
    wide, wide, pages, pages.clone(), many, "auto", *torch.ones(2, 1, device="cuda")
)
assert message(vllm_kernels.check) == (
    op + "slot_mapping[2900] = 1700: expected a slot that no earlier element names"
)
call([5, 6, 999, -7])
torch.cuda.synchronize()
assert message(lambda: call([1, 2, 3, 4])) == bad
x = torch.randn(4, 64, device="cuda")
call([5, 6, 999, -7])
torch.cuda.synchronize()
assert message(lambda: vllm_kernels.rms_norm(x, x.clone(), x[0].clone(), 1e-6)) == bad
call([5, 6, 7, 6])
assert message(vllm_kernels.check) == twice
slots = torch.tensor([5, 6, 7, 8], device="cuda")
key = torch.randn(4, 2, 64, device="cuda")
cache, one = torch.zeros(11, 16, 2, 64, device="cuda"), torch.ones(1, device="cuda")
args = (key, key, cache, cache.clone(), slots, "auto", one, one)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    vllm_kernels.reshape_and_cache_flash(*args)
graph.replay()
vllm_kernels.check()
slots[2] = 999
graph.replay()
assert message(vllm_kernels.check) == bad
print("fine")
"""


@needs_gpu
def test_check_mode():
    done = subprocess.run(
        [sys.executable, "-c", CHECK_MODE], capture_output=True, text=True, timeout=120,
        env={**os.environ, "VLLM_KERNELS_CHECK": "1"},
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr[-2000:]
