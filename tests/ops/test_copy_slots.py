"""copy_slots against its reference, bit for bit: layouts, overlapping moves, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import LAYOUTS, assert_compiles, needs_gpu, opcheck, raises, to_layout
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def layers(layout: str, dtype: torch.dtype, device: str, *, count: int = 2, blocks: int = 20,
           block: int = 16, heads: int = 2, size: int = 64) -> list[Tensor]:  # fmt: skip
    shape = (blocks, block, heads, size)
    return [
        to_layout(torch.randint(-99, 99, shape, device=device).to(dtype), layout, is_key)
        for _ in range(count)
        for is_key in (True, False)
    ]


def check(caches: list[Tensor], src: Tensor, dst: Tensor, layout: str) -> None:
    want = reference.copy_slots(caches, src, dst, layout)
    vllm_kernels.copy_slots(caches, src, dst, layout)
    for got, expected in zip(caches, want):
        assert torch.equal(got, expected)


def some_moves(slots: int, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Sources may repeat and may be destinations; some -1."""
    src, dst = torch.randint(0, slots, (count,)), torch.randperm(slots)[:count]
    src[torch.rand(count) < 0.1] = -1
    dst[torch.rand(count) < 0.1] = -1
    return src.to(device), dst.to(device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "block", "size"), [(1, 16, 64), (40, 16, 80), (310, 16, 128),
                                                      (70, 5, 16)])  # fmt: skip
def test_matches_reference(device, layout, dtype, count, block, size):
    caches = layers(layout, dtype, device, block=block, size=size)
    check(caches, *some_moves(20 * block, count, device), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_tokens(device, layout):
    """As many as a call takes: accesses of single elements."""
    caches = layers(layout, torch.float32, device, count=1, blocks=1100, heads=1, size=16)
    check(caches, *some_moves(1100 * 16, 16384, device), layout)
    caches = layers(layout, torch.bfloat16, device, count=1, blocks=1100, heads=1, size=16)
    check(caches, *some_moves(1100 * 16, 4100, device), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_that_overlap(device, layout):
    """All are read before any is written: shifts either way, a rotation, a swap."""
    for src, dst in (
        (range(1, 100), range(99)),
        (range(99), range(1, 100)),
        ([*range(1, 50), 0], range(50)),
        ([3, 40, 17], [40, 3, 17]),
    ):
        caches = layers(layout, torch.bfloat16, device, size=128)
        check(caches, *(torch.tensor(list(x), device=device) for x in (src, dst)), layout)


def test_many_layers(device, layout):
    caches = layers(layout, torch.bfloat16, device, count=150, blocks=3, heads=1, size=32)
    check(caches, *some_moves(48, 30, device), layout)


def test_scales_of_tokens(device, layout):
    """[num_blocks, num_kv_heads, block_size] among the caches; other shapes, too."""
    caches = layers(layout, torch.int8, device, count=1)
    caches += [torch.rand(20, 2, 16, device=device) for _ in range(2)]
    caches += layers(layout, torch.float32, device, count=1, size=32)
    caches += layers(layout, torch.bfloat16, device, count=1, heads=1, size=48)
    check(caches, *some_moves(320, 60, device), layout)


def test_packed_tensors(device):
    packed = torch.randint(-99, 99, (20, 2, 3, 16, 2, 72), device=device).to(torch.bfloat16)
    before = packed.clone()
    moves = some_moves(320, 60, device)
    check([packed[:, 0, 1], packed[:, 1, 1]], *moves, "NHD")
    assert torch.equal(packed[:, :, ::2], before[:, :, ::2])
    check([packed[:, 0, 1].transpose(1, 2), packed[:, 1, 1].transpose(1, 2)], *moves, "HND")
    odd = torch.randn(20 * 2048 + 1, device=device).to(torch.bfloat16)[1:]
    check([odd.view(20, 16, 2, 64)], *moves, "NHD")


def test_dimensions_in_any_order(device):
    """Blocks without gaps: a token is runs at one stride, whatever the order in memory."""
    for order in itertools.permutations(range(1, 5)):
        memory = torch.randint(-99, 99, (9, *(range(2, 6)[d - 1] for d in order)), device=device)
        places = [0, *(1 + order.index(d) for d in range(1, 5))]
        check([memory.float().permute(places)], *some_moves(36, 20, device), "vllm")


def test_nothing_to_do(device):
    caches = layers("NHD", torch.float32, device, count=1)
    none = torch.empty(0, dtype=torch.int64, device=device)
    check(caches, none, none, "NHD")
    check(caches, none.new_full((2,), -1), none.new_tensor([3, 4]), "NHD")
    if device == "cpu":  # without tensors on the GPU the CPU op is called
        vllm_kernels.copy_slots([], none, none)


@pytest.mark.parametrize("bad", [-2, 320, 2**40])
def test_bad_slots(device, bad):
    for index, name in enumerate(("src", "dst")):
        caches = layers("NHD", torch.float32, device, count=1)
        before = [cache.clone() for cache in caches]
        moves = [torch.tensor([1, 2], device=device), torch.tensor([5, 6], device=device)]
        moves[index][1] = bad
        if device == "cpu":
            message = rf"{name}\[1\] = {bad}: expected -1 \(skipped\) or a slot in \[0, 320\)$"
            with raises(rf"^copy_slots: {message}"):
                vllm_kernels.copy_slots(caches, *moves, "NHD")
        else:
            vllm_kernels.copy_slots(caches, *moves, "NHD")
            for cache in before:
                cache[0, 5] = cache[0, 1]
        assert all(torch.equal(x, y) for x, y in zip(caches, before))


def test_destination_that_occurs_twice():
    caches = layers("NHD", torch.float32, "cpu", count=1)
    with raises(r"^copy_slots: dst\[2\] = 9: expected a slot that no earlier element names$"):
        vllm_kernels.copy_slots(caches, torch.tensor([1, 2, 3]), torch.tensor([9, -1, 9]), "NHD")


def test_bad_input(device):
    keys, values = layers("NHD", torch.float32, device, count=1)
    src, dst = torch.tensor([1], device=device), torch.tensor([2], device=device)
    many = torch.full((16385,), -1, device=device)
    cases = [
        ((keys, src, dst, "NHD"),
         r"caches: expected a list of tensors, one a layer, got a tensor of shape \[20, "),
        (([keys, values[:9]], src, dst, "NHD"), r"caches: expected num_blocks = 20 \(from caches"),
        (([keys, values[:, :8].clone()], src, dst, "NHD"), r"caches: expected block_size = 16 \("),
        (([keys[..., ::2]], src, dst, "NHD"), r"caches: expected blocks without gaps in memory"),
        (([keys.long()], src, dst, "NHD"), r"caches: expected elements of at most 4 bytes, got s"),
        (([keys[:1].expand(20, 16, 2, 64)], src, dst, "NHD"), r"caches: is written, so its elem"),
        (([keys, keys], src, dst, "NHD"), r"caches\[[01]\] and caches\[[01]\] overlap in memory$"),
        (([keys[0, 0]], src, dst, "NHD"), r"caches: expected 3 to 4 dimensions"),
        (([keys], src.int(), dst, "NHD"), r"src: expected int64, got int32; cast it with .long"),
        (([keys], src, many, "NHD"), r"dst: expected num_slots = 1 \(from src\) at dimension 0"),
        (([keys], many, many, "NHD"), r"src: expected at most 16384 slots, got shape \[16385\]$"),
        (([keys], src, dst, "x"), r"layout: expected \"vllm\", \"NHD\" or \"HND\", got \"x\"$"),
    ]  # fmt: skip
    for args, message in cases:
        before = keys.clone()
        with raises(rf"^copy_slots: {message}"):
            vllm_kernels.copy_slots(*args)
        assert torch.equal(keys, before)
    with raises(r"^copy_slots: caches: requires grad, .*no_grad\(\)$"):
        vllm_kernels.copy_slots([keys.requires_grad_()], src, dst, "NHD")


def test_opcheck_and_compile(device):
    caches = layers("vllm", torch.float32, device)
    src, dst = torch.tensor([1, -1], device=device), torch.tensor([2, 5], device=device)
    opcheck("copy_slots", caches, src, dst)
    assert_compiles(vllm_kernels.copy_slots, caches, src, dst)


@needs_gpu
def test_graph_replay():
    caches = layers("vllm", torch.bfloat16, "cuda", count=40)
    src, dst = some_moves(320, 60, "cuda")
    vllm_kernels.copy_slots(caches, src, dst)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vllm_kernels.copy_slots(caches, src, dst)
    for new, old in zip(some_moves(320, 60, "cuda"), (src, dst)):
        old.copy_(new)
    want = reference.copy_slots(caches, src, dst)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(got, expected) for got, expected in zip(caches, want))
