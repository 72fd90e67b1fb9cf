"""page_bounds_update: against its reference, bit for bit; what makes bounds hold."""

from __future__ import annotations

import pytest
import torch
from helpers import LAYOUTS, assert_compiles, assert_graph_replays, bits, needs_gpu, opcheck, raises
from pages_cases import EIGHT_BITS, key_cache, key_rows
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference


def check(bounds: Tensor, keys: Tensor, slots: Tensor, layout: str, scale=None) -> Tensor:
    """Equal to the reference; returns the bounds afterwards."""
    want = reference.page_bounds_update(bounds, keys, slots, k_scale=scale, layout=layout)
    vllm_kernels.page_bounds_update(bounds, keys, slots, k_scale=scale, layout=layout)
    torch.testing.assert_close(bounds, want, rtol=0, atol=0, equal_nan=True)
    return bounds


def unset(rows: Tensor, dtype: torch.dtype) -> Tensor:
    blocks, _, heads, size = rows.shape
    return torch.full((blocks, heads, 2, size), 7.0, dtype=dtype, device=rows.device)


def some_slots(rows: Tensor, count: int) -> Tensor:
    """Some -1, some twice."""
    total = rows.shape[0] * rows.shape[1]
    return torch.randint(-1, total, (count,), device=rows.device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "block"), [(64, 16), (80, 8), (128, 16), (256, 32), (16, 5)])
@pytest.mark.parametrize("count", [1, 7, 300, 2000])
def test_matches_reference(device, dtype, layout, size, block, count):
    rows = key_rows(40, block, 3, size, dtype, device)
    check(unset(rows, dtype), key_cache(rows, layout), some_slots(rows, count), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", EIGHT_BITS.values(), ids=EIGHT_BITS)
@pytest.mark.parametrize("scales", [0, 1, 3])
def test_8_bit_caches(device, dtype, layout, stored, scales):
    """Bounds of 16 bits hold for every dequantized key: they are rounded outwards."""
    rows = key_rows(9, 16, 3, 64, stored, device)
    scale = torch.rand(scales, device=device) + 0.3 if scales else None
    slots = torch.arange(15, 9 * 16, 16, device=device)
    bounds = check(unset(rows, dtype), key_cache(rows, layout), slots, layout, scale)
    keys = rows.float() * (scale.view(-1, 1) if scales else 1.0)
    low, high = bounds[:, :, 0].float()[:, None], bounds[:, :, 1].float()[:, None]
    assert ((low <= keys) & (keys <= high)).all()
    if scales and dtype != torch.float32:  # the rounding is no idle step
        nearest = keys.amax(1).to(dtype).float()
        assert (nearest < keys.amax(1)).any() and not torch.equal(nearest, high[:, 0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_head_sizes_that_fit_no_vector(device, dtype, layout):
    for stored in (dtype, torch.int8):
        rows = key_rows(6, 4, 2, 7, stored, device)
        check(unset(rows, dtype), key_cache(rows, layout), some_slots(rows, 9), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tensors(device, dtype, layout):
    rows = key_rows(8, 16, 2, 64, dtype, device)
    keys = key_cache(rows, layout)
    packed = torch.stack([keys + 1, keys, keys + 2], 1)
    wide = torch.full((8, 3, 2, 2, 64), 7.0, dtype=dtype, device=device)
    check(wide[:, 1], packed[:, 1], some_slots(rows, 20), layout)
    assert (wide[:, ::2] == 7.0).all()
    odd = torch.full((8 * 257 + 1,), 7.0, dtype=dtype, device=device)[1:].view(8, 257)
    check(odd[:, :256].view(8, 2, 2, 64), keys, some_slots(rows, 20), layout)
    assert (odd[:, 256] == 7.0).all()


def test_order_of_the_slots_does_not_matter(device, layout):
    rows = key_rows(300, 16, 2, 64, torch.bfloat16, device)
    keys, slots = key_cache(rows, layout), some_slots(rows, 3000)
    first = check(unset(rows, torch.bfloat16), keys, slots, layout)
    for order in (slots.flip(0), slots[torch.randperm(3000, device=device)], slots.sort().values):
        again = unset(rows, torch.bfloat16)
        vllm_kernels.page_bounds_update(again, keys, order, layout=layout)
        assert torch.equal(again, first)


def test_a_page_is_filled_up_to_its_highest_slot(device):
    """What lies behind it is not read; earlier bounds do not count."""
    rows = key_rows(2, 4, 1, 8, torch.float32, device)
    rows[0, 2:] = float("nan")
    bounds = torch.full((2, 1, 2, 8), 1e9, device=device)
    vllm_kernels.page_bounds_update(bounds, rows, torch.tensor([1], device=device), layout="NHD")
    assert torch.equal(bounds[0, 0, 0], rows[0, :2, 0].amin(0))
    assert torch.equal(bounds[0, 0, 1], rows[0, :2, 0].amax(0))
    assert (bounds[1] == 1e9).all()


def test_bounds_after_cut_overwrite_copy_swap_and_fork(device):
    """The ways of the docstring: bounds hold for every visible key, and are exact."""
    rows = key_rows(8, 4, 2, 16, torch.float32, device)
    bounds = torch.zeros(8, 2, 2, 16, device=device)

    def update(*slots: int) -> None:
        where = torch.tensor(slots, device=device)
        vllm_kernels.page_bounds_update(bounds, rows, where, layout="NHD")

    def exact(page: int, tokens: int) -> None:
        keys = rows[page, :tokens]
        assert torch.equal(bounds[page, :, 0], keys.amin(0))
        assert torch.equal(bounds[page, :, 1], keys.amax(0))

    def pairs(*values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    update(*range(8))
    exact(0, 4), exact(1, 4)
    rows[1, 1] = 9.0  # cut to 5 tokens, then one more
    update(5)
    exact(1, 2)
    rows[0, 0] = -9.0  # overwritten in place: the last visible slot is named, too
    update(0, 3)
    exact(0, 4)
    for cache in (rows, bounds):  # a copy of page and bounds
        vllm_kernels.copy_blocks_mla([cache], pairs([0, 2]))
    exact(2, 4)
    vllm_kernels.copy_blocks_mla([rows], pairs([1, 3]))  # a fork; its new token brings the bounds
    rows[3, 2] = 11.0
    update(14)
    exact(3, 3)
    on_host, bounds_on_host = torch.zeros(8, 4, 2, 16), torch.zeros(8, 2, 2, 16)
    for here, there in ((rows, on_host), (bounds, bounds_on_host)):
        vllm_kernels.swap_blocks(here, there, torch.tensor([[0, 5]]))
        here[0] = 0
        vllm_kernels.swap_blocks(there, here, torch.tensor([[5, 4]]))
    exact(4, 4)
    moved = torch.tensor([16], device=device), torch.tensor([15], device=device)
    vllm_kernels.copy_slots([rows], *moved, "NHD")
    update(15)
    exact(3, 4)


def test_nan_stays_in_its_component(device, dtype, layout):
    rows = key_rows(3, 16, 2, 64, dtype, device)
    rows[1, 3, 1, 5] = float("nan")
    bounds = check(
        unset(rows, dtype), key_cache(rows, layout), torch.tensor([31, 47], device=device), layout
    )
    assert bounds.isnan().sum() == 2 and bounds[1, 1, :, 5].isnan().all()


def test_nothing_to_do(device):
    rows = key_rows(3, 16, 2, 64, torch.float32, device)
    for slots in ([], [-1, -1]):
        where = torch.tensor(slots, dtype=torch.int64, device=device)
        assert (check(unset(rows, torch.float32), rows, where, "NHD") == 7.0).all()


@pytest.mark.parametrize("bad", [-2, 48, 2**40])
def test_bad_slots(device, bad):
    rows = key_rows(3, 16, 2, 64, torch.float32, device)
    bounds, slots = unset(rows, torch.float32), torch.tensor([20, bad], device=device)
    if device == "cpu":
        message = rf"slot_mapping\[1\] = {bad}: expected -1 \(skipped\) or a slot in \[0, 48\)$"
        with raises(rf"^page_bounds_update: {message}"):
            vllm_kernels.page_bounds_update(bounds, rows, slots, layout="NHD")
        assert (bounds == 7.0).all()
    else:
        want = reference.page_bounds_update(bounds, rows, slots[:1], layout="NHD")
        vllm_kernels.page_bounds_update(bounds, rows, slots, layout="NHD")
        assert torch.equal(bounds, want)


def test_bad_input(device):
    rows = key_rows(3, 16, 2, 64, torch.float32, device)
    bounds, slots = unset(rows, torch.float32), torch.tensor([20], device=device)
    one = torch.ones(1, device=device)
    cases = [
        ((bounds.half(), rows, slots, None, "NHD"),
         r"key_cache: expected float16 \(from bounds\), float8_e4m3fn, float8_e5m2 or int8"),
        ((bounds[:2], rows, slots, None, "NHD"),
         r"key_cache: expected num_blocks = 2 \(from bounds\) at dimension 0, got shape \[3, "),
        ((bounds[:, :, :1], rows, slots, None, "NHD"),
         r"bounds: expected 2 = 2 at dimension 2, got shape \[3, 2, 1, 64\]$"),
        ((bounds.transpose(1, 2).contiguous().transpose(1, 2), rows, slots, None, "NHD"),
         r"bounds: expected the bounds of a page to be contiguous, got stride 128 at dimension 2"),
        ((bounds[:1].expand(3, 2, 2, 64), rows, slots, None, "NHD"),
         r"bounds: is written, so its elements must not share memory"),
        ((bounds, rows, slots, None, "vllm"),
         r"key_cache: expected shape \[num_blocks, num_kv_heads, head_size / x, block_size, x\]"),
        ((bounds, rows, slots.int(), None, "NHD"),
         r"slot_mapping: expected int64, got int32; cast it with .long\(\)$"),
        ((bounds, rows, slots, one, "NHD"),
         r"k_scale: expected None: only 8-bit caches have scales, this one is float32$"),
        ((bounds, rows, slots, None, "NDH"), r"layout: expected \"vllm\", \"NHD\" or \"HND\""),
        ((rows.view(-1)[:768].view(3, 2, 2, 64), rows, slots, None, "NHD"),
         r"bounds and key_cache overlap in memory$"),
    ]  # fmt: skip
    for args, message in cases:
        with raises(rf"^page_bounds_update: {message}"):
            torch.ops.vllm_kernels.page_bounds_update(*args)
    assert (bounds == 7.0).all()
    with raises(r"^page_bounds_update: bounds: requires grad, .*no_grad\(\)$"):
        vllm_kernels.page_bounds_update(bounds.requires_grad_(), rows, slots, layout="NHD")


def test_opcheck_and_compile(device):
    rows = key_rows(3, 16, 2, 64, torch.float32, device)
    bounds, slots = unset(rows, torch.float32), torch.tensor([20, -1], device=device)
    opcheck("page_bounds_update", bounds, key_cache(rows, "vllm"), slots)
    assert_compiles(vllm_kernels.page_bounds_update, bounds, key_cache(rows, "vllm"), slots)


@needs_gpu
def test_graph_replay():
    rows = key_rows(30, 16, 2, 64, torch.bfloat16, "cuda")
    keys, bounds = key_cache(rows, "vllm"), unset(rows, torch.bfloat16)
    slots = some_slots(rows, 40)

    def call() -> None:
        vllm_kernels.page_bounds_update(bounds, keys, slots)

    def want() -> Tensor:
        nothing = torch.full_like(bounds, float("nan"))
        return reference.page_bounds_update(nothing, keys, slots).nan_to_num(nan=3.0)

    slots.copy_(torch.arange(15, 30 * 16, 16, device="cuda").repeat(2)[:40])  # every page
    assert_graph_replays(
        call, lambda: slots.copy_(slots - torch.randint(0, 16, (40,), device="cuda")), bounds, want
    )
    assert not bits(bounds).eq(0x7FC0).any()
