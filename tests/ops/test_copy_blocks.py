"""copy_blocks against its reference, bit for bit: layers, layouts, packed caches, bad input."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]


def layers(shape: tuple[int, ...], dtype: torch.dtype, device: str, count: int = 3) -> list[Tensor]:
    return [torch.randint(0, 127, shape, device=device).to(dtype) for _ in range(count)]


def check(keys: list[Tensor], values: list[Tensor], pairs: Tensor) -> None:
    want = [reference.copy_blocks(cache, pairs) for cache in keys + values]
    vllm_kernels.copy_blocks(keys, values, pairs)
    for got, expected in zip(keys + values, want):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shapes",
    [
        ((20, 2, 8, 16, 8), (20, 2, 64, 16)),
        ((20, 16, 2, 64), (20, 16, 2, 64)),
        ((20, 7), (20, 7)),  # no multiple of 16 bytes
        ((20, 32, 8, 256), (20, 32, 8, 256)),
    ],
    ids=["vllm", "flash", "odd", "large"],
)
def test_matches_reference(device, dtype, shapes):
    pairs = torch.tensor([[3, 7], [3, 8], [19, 0], [5, 5]], device=device)
    check(layers(shapes[0], dtype, device), layers(shapes[1], dtype, device), pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_mla(device, dtype):
    pairs = torch.tensor([[3, 7], [3, 8], [19, 0], [5, 5]], device=device)
    caches = layers((20, 16, 576), dtype, device)
    want = [reference.copy_blocks(cache, pairs) for cache in caches]
    vllm_kernels.copy_blocks_mla(caches, pairs)
    assert all(torch.equal(got, expected) for got, expected in zip(caches, want))
    vllm_kernels.copy_blocks_mla([], pairs)
    opcheck("copy_blocks_mla", caches, pairs)
    assert_compiles(vllm_kernels.copy_blocks_mla, caches, pairs)
    with raises(
        r"^copy_blocks_mla: kv_caches: expected blocks of \d+ bytes \(from kv_caches\[0\]\)"
    ):
        vllm_kernels.copy_blocks_mla([caches[0], caches[1][..., :575].contiguous()], pairs)
    with raises(r"^copy_blocks_mla: block_mapping\[0, 1\] = 20: expected a block in \[0, 20\)$"):
        vllm_kernels.copy_blocks_mla(caches, torch.tensor([[0, 20]]))


def test_many_layers_and_pairs(device):
    order = torch.randperm(600)
    pairs = torch.stack([order[:300], order[300:]], 1).to(device)
    check(
        layers((600, 4, 8), torch.float16, device, 150),
        layers((600, 4, 8), torch.float16, device, 150),
        pairs,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mapping_on_the_cpu_for_caches_on_the_gpu():
    order = torch.randperm(600)
    pairs = torch.stack([order[:300], order[300:]], 1)
    check(
        layers((600, 4, 8), torch.float16, "cuda"),
        layers((600, 4, 8), torch.float16, "cuda"),
        pairs,
    )
    cache = layers((8, 4), torch.float16, "cuda", 1)
    with raises(r"^copy_blocks: block_mapping\[0, 1\] = 8: expected a block in \[0, 8\)$"):
        vllm_kernels.copy_blocks(cache, [c.clone() for c in cache], torch.tensor([[1, 8]]))


def test_slices_of_a_packed_tensor(device):
    packed = torch.randint(0, 99, (20, 3, 2, 16, 2, 64), device=device).half()
    before = packed.clone()
    pairs = torch.tensor([[3, 7], [4, 8]], device=device)
    check([packed[:, 1, 0]], [packed[:, 1, 1]], pairs)
    assert torch.equal(packed[:, ::2], before[:, ::2])
    hnd = packed.transpose(3, 4)
    check([hnd[:, 0, 0]], [hnd[:, 0, 1]], pairs)


def test_block_stride_beyond_32_bits(device):
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of GPU memory")
    memory = torch.empty(2**32 + 4096, dtype=torch.bfloat16, device=device)
    keys, values = (memory.as_strided((3, 512), (2**31, 1), at) for at in (0, 1024))
    for cache in (keys, values):
        cache.copy_(torch.randn(3, 512))
    check([keys], [values], torch.tensor([[2, 0], [1, 1]], device=device))


def test_nothing_to_do(device):
    cache = layers((4, 8), torch.float32, device, 1)
    check(cache, [c.clone() for c in cache], torch.empty(0, 2, dtype=torch.int64, device=device))
    if device == "cpu":  # without tensors on the GPU the CPU op is called
        vllm_kernels.copy_blocks([], [], torch.empty(0, 2, dtype=torch.int64))


@pytest.mark.parametrize("bad", [-1, 20, 2**40])
def test_bad_blocks(device, bad):
    keys, values = (layers((20, 8), torch.float32, device, 2) for _ in range(2))
    before = [cache.clone() for cache in keys + values]
    pairs = torch.tensor([[1, 2], [3, bad], [bad, 4]], device=device)
    if device == "cpu":
        with raises(
            rf"^copy_blocks: block_mapping\[1, 1\] = {bad}: expected a block in \[0, 20\)$"
        ):
            vllm_kernels.copy_blocks(keys, values, pairs)
    else:
        vllm_kernels.copy_blocks(keys, values, pairs)
        for cache in before:
            cache[2] = cache[1]
    for cache, want in zip(keys + values, before):
        assert torch.equal(cache, want)


def test_caches_that_overlap(device):
    memory = torch.arange(320.0, device=device)
    pairs = torch.tensor([[0, 1]], device=device)
    first, second = memory[:256].view(4, 64), memory[32:288].view(4, 64)
    overlap = r"overlap in memory$"
    for args, message in (
        (([first], [second]), rf"key_caches\[0\] and value_caches\[0\] {overlap}"),
        (([second], [first]), rf"value_caches\[0\] and key_caches\[0\] {overlap}"),
        (([first], [first]), rf"(key|value)_caches\[0\] and (key|value)_caches\[0\] {overlap}"),
        (([first, second.clone()], [second, first.clone()]),
         rf"key_caches\[0\] and value_caches\[0\] {overlap}"),
    ):  # fmt: skip
        before = memory.clone()
        with raises(rf"^copy_blocks: {message}"):
            vllm_kernels.copy_blocks(*args, pairs)
        assert torch.equal(memory, before)
    with raises(rf"^copy_blocks_mla: kv_caches\[0\] and kv_caches\[2\] {overlap}"):
        vllm_kernels.copy_blocks_mla([first, first.clone(), second], pairs)
    whole = memory[:64].view(1, 64)  # of one block: any stride of blocks
    with raises(rf"^copy_blocks_mla: kv_caches\[0\] and kv_caches\[1\] {overlap}"):
        vllm_kernels.copy_blocks_mla([whole, memory[32:96].view(1, 64)], pairs * 0)


def test_layers_of_one_tensor_do_not_overlap(device):
    """Slices that interleave: their ranges overlap, their blocks do not."""
    layers, pairs = 40, torch.tensor([[3, 7]], device=device)
    packed = torch.randn(20, layers, 2, 8, 4, device=device)
    slices = packed.unbind(1)
    check([s[:, 0] for s in slices], [s[:, 1] for s in slices], pairs)
    outer = torch.randn(layers, 2, 20, 8, 4, device=device)
    check(list(outer[:, 0]), list(outer[:, 1]), pairs)
    # Other strides in the same range: rows 0 to 9 of one layer, and every second one of another.
    halves = torch.randn(40, 2, 32, device=device)
    check([halves[:10, 0]], [halves[20:40:2, 1]], pairs)
    check([halves[:20:2, 0]], [halves[1:11, 1]], pairs)
    shifted = packed.view(20, -1)
    with raises(r"^copy_blocks: key_caches\[0\] and value_caches\[0\] overlap in memory$"):
        vllm_kernels.copy_blocks([shifted[:, :64]], [shifted[:, 63:127]], pairs)
    with raises(r"^copy_blocks: value_caches\[0\] and key_caches\[0\] overlap in memory$"):
        # Around the end of a row: its last elements are those before the next row's first ones.
        width = shifted.shape[1]
        ends = packed.view(-1).as_strided((18, 64), (width, 1), 2 * width - 32)
        vllm_kernels.copy_blocks([shifted[2:, :64]], [ends], pairs)


@pytest.mark.parametrize("count", [2, 300])
def test_destination_that_occurs_twice(count):
    order = torch.randperm(600)
    pairs = torch.stack([order[:count], order[300 : 300 + count]], 1)
    pairs[-1, 1] = pairs[0, 1]
    cache = torch.randn(600, 4)
    before = cache.clone()
    message = rf"block_mapping\[{count - 1}, 1\] = {int(pairs[0, 1])}: expected a block that no ear"
    with raises(rf"^copy_blocks: {message}"):
        vllm_kernels.copy_blocks([cache], [cache.clone()], pairs)
    with raises(rf"^copy_blocks_mla: {message}"):
        vllm_kernels.copy_blocks_mla([cache], pairs)
    with raises(rf"^swap_blocks: {message}"):
        vllm_kernels.swap_blocks(before, cache, pairs)
    assert torch.equal(cache, before)
    vllm_kernels.swap_blocks(cache, cache, pairs)  # within one tensor the order is the list's


def test_bad_input(device):
    cache = layers((20, 4, 8), torch.float32, device, 1)[0]
    other = cache.clone()
    pairs = torch.tensor([[1, 2]], device=device)
    cases = [
        ((cache, [other], pairs),
         r"key_caches: expected a list of tensors, one a layer, got a tensor of shape \[20, "),
        (([cache], other, pairs), r"value_caches: expected a list of tensors"),
        (([cache], [], pairs),
         r"value_caches: expected as many layers as key_caches = 1, got 0$"),
        (([cache], [other[:10]], pairs),
         r"value_caches: expected num_blocks = 20 \(from key_caches\) at dimension 0, got"),
        (([cache], [other[:, :2]], pairs), r"value_caches: expected blocks of 128 bytes"),
        (([cache[..., ::2]], [other[..., ::2]], pairs),
         r"key_caches: expected blocks without gaps in memory, got 16 elements over a span of 31"),
        (([cache[:1].expand(20, 4, 8)], [other], pairs), r"key_caches: is written, so its elem"),
        (([cache], [other], pairs.int()),
         r"block_mapping: expected int64, got int32; cast it with .long\(\)$"),
        (([cache], [other], pairs[0]), r"block_mapping: expected shape \[num_pairs, 2\], got"),
        (([cache], [other], torch.zeros(2, 3, dtype=torch.int64, device=device)),
         r"block_mapping: expected 2 = 2 at dimension 1, got shape \[2, 3\]$"),
        (([cache], [other], torch.zeros(3, 4, dtype=torch.int64, device=device)[:, ::2]),
         r"block_mapping: expected a contiguous tensor"),
        (([cache[0, 0]], [other[0, 0]], pairs), r"key_caches: expected 2 to 8 dimensions"),
    ]  # fmt: skip
    for args, message in cases:
        before = cache.clone()
        with raises(rf"^copy_blocks: {message}"):
            vllm_kernels.copy_blocks(*args)
        assert torch.equal(cache, before)


def test_inference_only(device):
    cache = torch.randn(20, 8, device=device)
    pairs = torch.tensor([[1, 2]], device=device)
    with raises(r"^copy_blocks: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.copy_blocks([cache], [cache.clone().requires_grad_()], pairs)


def test_opcheck_and_compile(device):
    keys, values = (layers((20, 8), torch.float32, device, 2) for _ in range(2))
    pairs = torch.tensor([[1, 2]], device=device)
    opcheck("copy_blocks", keys, values, pairs)
    assert_compiles(vllm_kernels.copy_blocks, keys, values, pairs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay():
    keys, values = (layers((64, 16, 2, 64), torch.bfloat16, "cuda", 70) for _ in range(2))
    pairs = torch.tensor([[1, 2], [3, 4]], device="cuda")
    vllm_kernels.copy_blocks(keys, values, pairs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vllm_kernels.copy_blocks(keys, values, pairs)
    pairs.copy_(torch.tensor([[60, 2], [-1, 4]]))  # -1: a padded pair
    want = [reference.copy_blocks(cache, pairs[:1]) for cache in keys + values]
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(keys + values, want):
        assert torch.equal(got, expected)


def test_source_that_another_pair_writes():
    cache = torch.randn(8, 4)
    before = cache.clone()
    for pairs, message in (
        ([[0, 1], [1, 2]], r"block_mapping\[1, 0\] = 1: expected a block that no other pair"),
        ([[5, 4], [3, 5]], r"block_mapping\[0, 0\] = 5: expected a block that no other pair"),
        ([[0, 1], [1, 0]], r"block_mapping\[0, 0\] = 0: expected a block that no other pair"),
    ):
        with raises(rf"^copy_blocks: {message} writes$"):
            vllm_kernels.copy_blocks([cache], [before.clone()], torch.tensor(pairs))
        with raises(rf"^copy_blocks_mla: {message} writes$"):
            vllm_kernels.copy_blocks_mla([cache], torch.tensor(pairs))
    assert torch.equal(cache, before)
    vllm_kernels.copy_blocks_mla([cache], torch.tensor([[0, 0], [0, 1]]))  # nothing is written to 0
    assert torch.equal(cache[1], before[0])
