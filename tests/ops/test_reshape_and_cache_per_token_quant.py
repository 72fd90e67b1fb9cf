"""reshape_and_cache_per_token_quant against its reference, bit for bit: every slot and scale that
was not written keeps what it held."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

OP = "reshape_and_cache_per_token_quant"


@pytest.fixture(params=[8, 4], ids=["int8", "int4"])
def bits(request: pytest.FixtureRequest) -> int:
    return request.param


def skip_other_sizes(bits: int, head_size: int) -> None:
    if bits == 4 and head_size not in range(32, 257, 32):
        pytest.skip("int4 has other head sizes")


def cache_shapes(layout: str, blocks: int, block: int, heads: int, size: int):
    if layout == "vllm":
        return (blocks, heads, size // 16, block, 16), (blocks, heads, size, block)
    return ((blocks, block, heads, size) if layout == "NHD" else (blocks, heads, block, size),) * 2


def caches(bits, layout, device, *, blocks=11, block=16, heads=2, size=64) -> list[Tensor]:
    """Keys, values and their scales, and zeros of int4, full of noise."""
    shapes = cache_shapes(layout, blocks, block, heads, size if bits == 8 else size // 2)
    pages = [torch.randint(-128, 128, s, device=device, dtype=torch.int8) for s in shapes]
    if bits == 4:
        pages = [page.view(torch.uint8) for page in pages]
    return [*pages, *torch.randn(2 if bits == 8 else 4, blocks, heads, block, device=device)]


def tokens(n: int, heads: int, size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Rows whose sizes differ by orders of magnitude."""
    size_of_row = 10.0 ** torch.randint(-3, 3, (2, n, heads, 1), device=device)
    return list((torch.randn(2, n, heads, size, device=device) * size_of_row).to(dtype))


def write(module, key, value, out: list[Tensor], slots: Tensor, layout: str):
    return getattr(module, OP)(key, value, *out[:4], slots, layout, *out[4:])


NAMES = "key", "value", "key_scales", "value_scales", "key_zeros", "value_zeros"


def check(key: Tensor, value: Tensor, out: list[Tensor], slots: Tensor, layout: str) -> None:
    want = write(reference, key, value, out, slots, layout)
    write(vllm_kernels, key, value, out, slots, layout)
    assert len(out) == len(want)
    for name, got, expected in zip(NAMES, out, want):
        if got.is_floating_point():
            got, expected = got.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7)
        assert torch.equal(got, expected), name


def slot_patterns(block: int, device: str) -> list[Tensor]:
    random = torch.randperm(11 * block)
    pages = torch.randperm(11)
    run = (pages[:6, None] * block + torch.arange(block)).flatten()
    hole = run.clone()
    hole[block + 3] = -1
    patterns = [random[:40], random[:3], run, run[: 5 * block - 3], run[3:], hole, run.flip(0)]
    patterns.append(torch.arange(11 * block))  # runs that go on over the end of a page
    patterns += [torch.cat([random[:5], run]), torch.cat([run, run[:9]]), torch.full((9,), -1)]
    return [slots.to(device) for slots in patterns]


@pytest.mark.parametrize("block", [8, 16, 32])
@pytest.mark.parametrize("size", [16, 64, 80, 128])
def test_matches_reference(bits, layout, device, dtype, block, size):
    skip_other_sizes(bits, size)
    for slots in slot_patterns(block, device):
        key, value = tokens(len(slots) + 2, 2, size, dtype, device)
        out = caches(bits, layout, device, block=block, size=size)
        check(key, value, out, slots, layout)


@pytest.mark.parametrize("size", [32, 96, 112, 160, 192, 224, 256, 512, 576])
def test_head_sizes(bits, layout, device, dtype, size):
    skip_other_sizes(bits, size)
    slots = torch.cat([torch.arange(16, 100), torch.tensor([3, 170, -1])]).to(device)
    key, value = tokens(len(slots), 3, size, dtype, device)
    check(key, value, caches(bits, layout, device, heads=3, size=size), slots, layout)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_head_sizes_that_fit_no_vector(device, dtype, layout):
    for size in (1, 7, 40, 100):
        slots = torch.tensor([5, 4, 30, 5], device=device)
        key, value = tokens(4, 3, size, dtype, device)
        check(key, value, caches(8, layout, device, heads=3, size=size), slots, layout)


def test_many_heads(bits, layout, device, dtype):
    slots = torch.arange(70, device=device) + 5
    key, value = tokens(70, 40, 128, dtype, device)
    check(key, value, caches(bits, layout, device, heads=40, size=128), slots, layout)


def test_any_block_size(bits, layout, device, dtype):
    for block in (1, 5, 24, 64):
        slots = torch.randperm(6 * block)[: 3 * block].to(device)
        key, value = tokens(len(slots), 2, 64, dtype, device)
        check(key, value, caches(bits, layout, device, blocks=6, block=block), slots, layout)


def test_strided_inputs_caches_and_scales(bits, layout, device, dtype):
    slots = torch.cat([torch.randperm(176)[:5], torch.arange(70)]).to(device)
    qkv = torch.randn(75, 8 + 4, 64, device=device, dtype=dtype)
    unaligned = torch.randn(75, 3 + 2 * 2 * 64, device=device, dtype=dtype)[:, 3:]
    unaligned = unaligned.unflatten(1, (2, 2, 64)).unbind(1)
    for key, value in ((qkv[:, 8:10], qkv[:, 10:]), unaligned):
        out = caches(bits, layout, device)
        # Pages of two layers together, scales and zeros of K and V side by side.
        packed = [torch.stack([t, t], 1) for t in out[:2]] + [torch.stack(out[2:], 1)]
        before = [t.clone() for t in packed]
        views = [packed[0][:, 1], packed[1][:, 1], *packed[2].unbind(1)]
        check(key, value, views, slots, layout)
        assert torch.equal(packed[0][:, 0], before[0][:, 0])
        assert torch.equal(packed[1][:, 0], before[1][:, 0])


def test_round_trip_error(bits, layout, device, dtype):
    slots = torch.randperm(176, device=device)
    key, value = tokens(176, 2, 64, dtype, device)
    out = caches(bits, layout, device)
    write(vllm_kernels, key, value, out, slots, layout)
    blocks, places = slots // 16, slots % 16
    for x, cache, *of_tokens in zip((key, value), out[:2], out[2:4], out[4:] or (None, None)):
        rows = reference.token_rows(cache, layout)[blocks, places]
        rows = rows.double() if bits == 8 else reference.int4_values(rows).double()
        scale, zero = (
            0.0 if one is None else one[blocks, :, places][..., None].double() for one in of_tokens
        )
        error = (rows * scale + zero - x.double()).abs()
        size = x.double().abs().amax(-1, keepdim=True)
        assert (error <= scale * 0.50001 + size * 2.0**-20).all()
        assert (error / size).max() < (1 / 250 if bits == 8 else 1 / 14)


def test_zero_nan_and_infinite_rows(bits, layout, device, dtype):
    slots = torch.arange(70, device=device)
    key, value = tokens(70, 2, 64, dtype, device)
    key[3] = 0
    value[4, 1] = -0.0
    key[5, 0, 7], key[6, 1, 63], value[7, 0, 0] = float("nan"), float("inf"), float("-inf")
    tiny = torch.finfo(dtype).smallest_normal
    value[8] = tiny
    key[9] = 190 * 2.0**-149  # float32: a scale of one bit, and more than 127 of it
    out = caches(bits, layout, device)
    check(key, value, out, slots, layout)
    k_scales, v_scales, *zeros = (x.transpose(1, 2).flatten(0, 1) for x in out[2:])
    assert not k_scales[3].any() and v_scales[4, 1] == 0
    bad = k_scales[5, 0], k_scales[6, 1], v_scales[7, 0]
    assert bad[0].isnan() and not (bad[1].isfinite() or bad[2].isfinite())
    for of_tokens in (k_scales, *zeros[:1]):
        assert (~of_tokens.isfinite()).sum() == 2
    for of_tokens in (v_scales, *zeros[1:]):
        assert (~of_tokens.isfinite()).sum() == 1
    if bits == 4:
        assert bad[1].isnan() and bad[2].isnan() and (v_scales[8] == 0).all()
        assert (zeros[1][8] == tiny).all()


def test_int4_of_extreme_rows(layout, device):
    """Constant, nearly constant and very wide rows; a difference that float32 does not hold."""
    base = torch.linspace(-1, 1, 64, device=device)
    rows = [torch.full_like(base, x) for x in (0.0, 2.5, -1e30, 1e-45)]
    rows += [scale * base for scale in (3e-31, 1e-30, 2.0**-96, 1e-3, 1.7e38, 3e38)]
    rows += [1 + 1e-7 * base, 1e6 + base, torch.where(base < 0, 0.0, 1.0), -base.abs()]
    key = torch.stack(rows)[:, None].expand(-1, 2, -1)
    out = caches(4, layout, device)
    check(key, -key, out, torch.arange(len(rows), device=device), layout)
    scales = out[2].transpose(1, 2).flatten(0, 1)[: len(rows), 0]
    assert not scales[:4].any() and scales[4] == 0 and (scales[7:9] > 0).all()
    assert scales[9].isnan() and scales.isnan().sum() == 1


@pytest.mark.parametrize("n", [2, 50, 300, 9000])
def test_repeated_slots_keep_the_last_token_whole(bits, layout, device, n):
    slots = torch.randint(-1, 40, (n,), device=device)
    slots[n // 2 : n // 2 + 16] = torch.arange(16, device=device)[: n - n // 2]
    key, value = tokens(n, 2, 64, torch.bfloat16, device)
    check(key, value, caches(bits, layout, device, blocks=3), slots, layout)


def test_nothing_to_do(bits, layout, device, dtype):
    key, value = tokens(4, 2, 64, dtype, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    check(key, value, caches(bits, layout, device), none, layout)
    check(key[:0], value[:0], caches(bits, layout, device), none, layout)


@pytest.mark.parametrize("bad", [-2, 11 * 16, 2**40])
def test_bad_slots(bits, layout, device, bad):
    out = caches(bits, layout, device)
    key, value = tokens(4, 2, 64, torch.float32, device)
    slots = torch.tensor([5, 6, bad, 8], device=device)
    if device == "cpu":
        before = [t.clone() for t in out]
        with raises(rf"^{OP}: slot_mapping\[2\] = {bad}: expected -1 \(skipped\) or a slot in"):
            write(vllm_kernels, key, value, out, slots, layout)
        assert all(torch.equal(a, b) for a, b in zip(out, before))
    else:  # contained: the others are written
        good = torch.tensor([5, 6, -1, 8], device=device)
        want = write(reference, key, value, out, good, layout)
        write(vllm_kernels, key, value, out, slots, layout)
        assert all(torch.equal(a, b) for a, b in zip(out, want))


def test_bad_input(device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    kc, vc, ks, vs = caches(8, "NHD", device)
    slots = torch.arange(4, device=device)
    good = {
        "key": key, "value": value, "key_cache": kc, "value_cache": vc, "key_scales": ks,
        "value_scales": vs, "slot_mapping": slots, "layout": "NHD",
    }  # fmt: skip
    cases = [
        ({"layout": "HN"}, r'layout: expected "vllm", "NHD" or "HND", got "HN"$'),
        ({"layout": "HND"}, r"key_cache: expected num_kv_heads = 2 \(from key\) at dimension 1"),
        ({"layout": "vllm"}, r"key_cache: expected shape \[.*, x\] \(from layout = "),
        ({"key_cache": kc.view(torch.uint8)}, r"key_cache: expected int8, got uint8$"),
        ({"value_cache": vc.float()}, r"value_cache: expected int8, got float32$"),
        ({"key": key.half()}, r"value: expected float16 \(from key\), got float32$"),
        ({"key_scales": ks.double()}, r"key_scales: expected float32, got float64"),
        ({"key_scales": ks[:, :, :8]}, r"key_scales: expected block_size = 16 \(from key_cache\)"),
        ({"value_scales": vs[:10]}, r"value_scales: expected num_blocks = 11 \(from key_cache\)"),
        ({"value_scales": vs[:1].expand(11, -1, -1)}, r"value_scales: is written, so its elements"),
        ({"value_scales": ks}, r"value_scales and key_scales overlap in memory$"),
        ({"value_cache": kc}, r"value_cache and key_cache overlap in memory$"),
        ({"slot_mapping": slots.int()}, r"slot_mapping: expected int64, got int32"),
    ]
    before = [t.clone() for t in (kc, vc, ks, vs)]
    for change, message in cases:
        with raises(rf"^{OP}: {message}"):
            getattr(vllm_kernels, OP)(**{**good, **change})
    assert all(torch.equal(a, b) for a, b in zip((kc, vc, ks, vs), before))
    with raises(rf"^{OP}: \w+: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, OP)(**{**good, "key": key.requires_grad_()})


def test_bad_input_of_int4(device):
    key, value = tokens(4, 2, 64, torch.float32, device)
    good = dict(zip((f"{x}_{y}" for y in ("cache", "scales", "zeros") for x in ("key", "value")),
                    caches(4, "NHD", device)))  # fmt: skip
    kz, vz = good["key_zeros"], good["value_zeros"]
    moved = torch.zeros(11, 2, 24, device=device)[..., :16]
    int8 = good["key_cache"].view(torch.int8)
    cases = [
        ({"value_zeros": None}, r"value_zeros: expected a tensor, as key_zeros is one, got None$"),
        ({"key_zeros": None, "value_zeros": None}, r"key_cache: expected int8, got uint8$"),
        ({"key_cache": int8}, r"key_cache: expected uint8, got int8$"),
        ({"key_zeros": kz.double()}, r"key_zeros: expected float32, got float64"),
        ({"value_zeros": vz[:10]}, r"value_zeros: expected shape"),
        ({"value_zeros": moved}, r"value_zeros: expected the strides of value_scales, which has 32 "
                                 r"at dimension 0, got 48$"),
        ({"value_zeros": kz}, r"value_zeros and key_zeros overlap in memory$"),
        ({"key_zeros": good["key_scales"]}, r"key_zeros and key_scales overlap in memory$"),
        ({"key": key[..., :48], "value": value[..., :48]},
         r"key: expected a head_size of 32 to 256 in steps of 32 for an int4 cache, got 48$"),
        ({"key_cache": good["key_cache"][..., :24]},
         r"key_cache: expected head_size / 2 = 32 \(from key\) at dimension 3, got shape"),
    ]  # fmt: skip
    before = [t.clone() for t in good.values()]
    given = good | {"key": key, "value": value, "layout": "NHD"}
    given["slot_mapping"] = torch.arange(4, device=device)
    for change, message in cases:
        with raises(rf"^{OP}: {message}"):
            getattr(vllm_kernels, OP)(**given | change)
    assert all(torch.equal(a, b) for a, b in zip(good.values(), before))


def test_opcheck_and_compile(bits, layout, device, dtype):
    key, value = tokens(4, 2, 64, dtype, device)
    out = caches(bits, layout, device)
    args = (key, value, *out[:4], torch.arange(4, device=device), layout, *out[4:])
    opcheck(OP, *args)
    assert_compiles(getattr(vllm_kernels, OP), *args)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay(bits, layout, dtype):
    key, value = tokens(80, 8, 128, dtype, "cuda")
    out = caches(bits, layout, "cuda", blocks=40, heads=8, size=128)
    slots = torch.randperm(600, device="cuda")[:80]
    args = (key, value, *out[:4], slots, layout, *out[4:])
    getattr(vllm_kernels, OP)(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(vllm_kernels, OP)(*args)
    for refill in (torch.randperm(600)[:80], torch.arange(48, 128), torch.full((80,), -1)):
        slots.copy_(refill)
        key.normal_()
        want = getattr(reference, OP)(*args)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(out, want))
