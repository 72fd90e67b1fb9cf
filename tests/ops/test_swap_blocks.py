"""swap_blocks against its reference, bit for bit, for every pair of devices."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

ROUTES = [("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")]


@pytest.fixture(params=ROUTES, ids=lambda route: "-to-".join(route))
def route(request: pytest.FixtureRequest) -> tuple[str, str]:
    if "cuda" in request.param and not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        pytest.skip("needs a GPU and the CUDA library")
    return request.param


def pool(blocks: int, device: str, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randint(0, 127, (blocks, 16, 2, 64), device=device).to(dtype)


def check(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    want = reference.swap_blocks(src, dst, pairs)
    vllm_kernels.swap_blocks(src, dst, pairs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert torch.equal(dst, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_matches_reference(route, dtype):
    src, dst = pool(30, route[0], dtype), pool(40, route[1], dtype)
    check(src, dst, torch.tensor([[0, 0], [3, 39], [29, 5], [3, 6]]))


def test_runs_and_single_blocks(route):
    src, dst = pool(30, route[0]), pool(40, route[1])
    run = torch.stack([torch.arange(5, 15), torch.arange(20, 30)], 1)
    check(src, dst, run)
    check(src, dst, torch.cat([run.flip(0), torch.tensor([[1, 2], [2, 3], [3, 5], [5, 6]])]))


def test_pinned_memory():
    if not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        pytest.skip("needs a GPU and the CUDA library")
    host, gpu = pool(30, "cpu").pin_memory(), pool(30, "cuda")
    pairs = torch.tensor([[1, 2], [2, 3], [9, 9]])
    check(host, gpu, pairs)
    check(gpu, host, pairs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("direction", ["out", "in", "on the GPU"])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_side_stream_beside_computing(direction, pinned):
    """Single blocks in random order, many of them: one batched copy where the memory is pinned."""
    blocks = 400
    host, gpu = pool(blocks, "cpu"), pool(blocks, "cuda")
    host = host.pin_memory() if pinned else host
    src, dst = {"out": (gpu, host), "in": (host, gpu), "on the GPU": (gpu, gpu.clone())}[direction]
    dst = dst.pin_memory() if pinned and dst.device.type == "cpu" else dst
    order = torch.randperm(blocks)
    pairs = torch.stack([order[:150], torch.randperm(blocks)[:150]], 1)
    want = reference.swap_blocks(src, dst, pairs)
    copies = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        vllm_kernels.swap_blocks(src, dst, pairs)
    for _ in range(4):
        busy = busy @ busy * 1e-3
    torch.cuda.current_stream().wait_stream(copies)
    torch.cuda.synchronize()
    assert torch.equal(dst, want)
    # And again after the stream was written to: the copies come in the stream's order.
    with torch.cuda.stream(copies):
        if src.device.type == "cuda":
            src.add_(1)
        vllm_kernels.swap_blocks(src, dst, pairs)
    copies.synchronize()
    assert torch.equal(dst, reference.swap_blocks(src, dst, pairs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_side_stream_does_not_wait_for_the_host():
    """With pinned memory the call returns while the stream is still held up."""
    host, gpu = pool(400, "cpu").pin_memory(), pool(400, "cuda")
    pairs = torch.stack([torch.randperm(400)[:150], torch.randperm(400)[:150]], 1)
    want = reference.swap_blocks(gpu, host, pairs)
    copies, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        torch.cuda._sleep(2_000_000_000)  # about a second
        vllm_kernels.swap_blocks(gpu, host, pairs)
        done.record()
    assert not done.query()
    copies.synchronize()
    assert torch.equal(host, want)


def test_packed_tensors(route):
    src, dst = pool(30, route[0]), pool(40, route[1])
    packed_src = torch.stack([src, src + 1], 1)
    packed_dst = torch.stack([dst, dst + 1], 1)
    before = packed_dst.clone()
    run = torch.stack([torch.arange(5, 15), torch.arange(20, 30)], 1)
    check(packed_src[:, 1], packed_dst[:, 0], run)
    assert torch.equal(packed_dst[:, 1], before[:, 1])


def test_within_one_tensor(route):
    if route[0] != route[1]:
        pytest.skip("one tensor is on one device")
    cache = pool(30, route[0])
    chain = torch.tensor([[0, 1], [1, 2], [2, 3]])  # in the order of the list
    want = cache.clone()
    for source, destination in chain.tolist():
        want[destination] = want[source]
    vllm_kernels.swap_blocks(cache, cache, chain)
    assert torch.equal(cache, want)


def test_slices_of_one_tensor(route):
    """Blocks may coincide, as in slices of a cache and in every second block of it; not in part."""
    if route[0] != route[1]:
        pytest.skip("one tensor is on one device")
    cache, pairs = pool(30, route[0]), torch.tensor([[0, 5]])
    for src, dst in ((cache[3:], cache[:20]), (cache[::2], cache), (cache[4:5], cache)):
        want = cache.clone()
        place = (dst.data_ptr() - cache.data_ptr()) // (16 * 2 * 64 * 2) + 5
        want[place] = src[0]
        vllm_kernels.swap_blocks(src, dst, pairs)
        assert torch.equal(cache, want)
    part = torch.as_strided(cache, (9, 16, 2, 64), cache.stride(), 64)
    thirds = torch.as_strided(cache, (9, 16, 2, 64), (3 * cache.stride(0), *cache.stride()[1:]))
    halves = torch.as_strided(cache, (9, 16, 2, 64), (2 * cache.stride(0), *cache.stride()[1:]))
    before = cache.clone()
    for src, dst in ((cache, part), (part, cache), (cache[:1], part[:1]), (halves, thirds)):
        with raises(r"^swap_blocks: dst and src overlap in memory, and not by whole blocks$"):
            vllm_kernels.swap_blocks(src, dst, torch.tensor([[0, 0]]))
    assert torch.equal(cache, before)


@pytest.mark.parametrize(("pairs", "where", "bad", "limit"), [
    ([[1, 2], [30, 3]], r"1, 0", 30, 30), ([[1, 2], [3, 40]], r"1, 1", 40, 40),
    ([[-1, 2]], r"0, 0", -1, 30), ([[2**40, 2]], r"0, 0", 2**40, 30),
])  # fmt: skip
def test_bad_blocks(route, pairs, where, bad, limit):
    src, dst = pool(30, route[0]), pool(40, route[1])
    before = dst.clone()
    message = rf"block_mapping\[{where}\] = {bad}: expected a block in \[0, {limit}\)$"
    with raises("^swap_blocks: " + message):
        vllm_kernels.swap_blocks(src, dst, torch.tensor(pairs))
    assert torch.equal(dst, before)


def test_bad_input(route):
    src, dst = pool(30, route[0]), pool(40, route[1])
    pairs = torch.tensor([[1, 2]])
    cases = [
        ((src.float(), dst, pairs), r"dst: expected float32 \(from src\), got float16$"),
        ((src[:, :8], dst, pairs), r"dst: expected blocks of the shape and strides of src's, got"),
        ((src[..., ::2], dst[..., ::2], pairs), r"src: expected blocks without gaps in memory"),
        ((src, dst[:1].expand(40, -1, -1, -1), pairs), r"dst: is written, so its elements"),
        ((src, dst, pairs.int()), r"block_mapping: expected int64, got int32; cast it with .long"),
        ((src, dst, pairs[0]), r"block_mapping: expected shape \[num_pairs, 2\], got shape \[2\]$"),
    ]
    if "cuda" in route:
        cases.append(
            ((src, dst, pairs.cuda()), r"block_mapping: expected a tensor on cpu, got cuda:0$")
        )
    for args, message in cases:
        with raises(rf"^swap_blocks: {message}"):
            vllm_kernels.swap_blocks(*args)


def test_nothing_to_do(route):
    check(pool(3, route[0]), pool(3, route[1]), torch.empty(0, 2, dtype=torch.int64))


def test_inference_only(route):
    src = pool(3, route[0]).requires_grad_()
    with raises(r"^swap_blocks: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.swap_blocks(src, pool(3, route[1]), torch.tensor([[1, 2]]))


def test_opcheck_and_compile(route):
    args = (pool(3, route[0]), pool(3, route[1]), torch.tensor([[1, 2]]))
    opcheck("swap_blocks", *args)
    assert_compiles(vllm_kernels.swap_blocks, *args)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay():
    host, gpu = pool(30, "cpu").pin_memory(), pool(30, "cuda")
    pairs = torch.tensor([[1, 2], [2, 3], [9, 9]])
    vllm_kernels.swap_blocks(host, gpu, pairs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vllm_kernels.swap_blocks(host, gpu, pairs)
    host.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(gpu.cpu()[[2, 3, 9]], host[[1, 2, 9]])


def addresses(cache: Tensor, blocks: list[int]) -> Tensor:
    return torch.tensor([cache[block].data_ptr() for block in blocks])


def batch(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three copies: two of a block, one of its first 64 bytes."""
    size = src[0].nbytes
    return addresses(src, [2, 0, 7]), addresses(dst, [1, 9, 4]), torch.tensor([size, size, 64])


def after(src: Tensor, dst: Tensor) -> Tensor:
    want = dst.clone()
    want[1], want[9] = src[2], src[0]
    want[4].view(torch.uint8).flatten()[:64] = (
        src[7].view(torch.uint8).flatten()[:64].to(want.device)
    )
    return want


@pytest.mark.parametrize("any_order", [False, True])
def test_batch_of_addresses(route, any_order):
    src, dst = pool(10, route[0]), pool(10, route[1])
    want, pointers = after(src, dst), batch(src, dst)
    vllm_kernels.swap_blocks_batch(*pointers, any_order)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert torch.equal(dst, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("any_order", [False, True])
def test_batch_of_addresses_on_a_side_stream(any_order):
    """Pinned memory on another stream than the default one: one batched copy."""
    src, dst = pool(400, "cpu").pin_memory(), pool(400, "cuda")
    order = torch.randperm(400).tolist()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        size = torch.full((400,), src[0].nbytes)
        vllm_kernels.swap_blocks_batch(
            addresses(src, list(range(400))), addresses(dst, order), size, any_order
        )
    stream.synchronize()
    assert torch.equal(dst[order].cpu(), src)


def test_batch_without_copies(route):
    none = torch.empty(0, dtype=torch.int64)
    vllm_kernels.swap_blocks_batch(none, none, none)
    zero = torch.zeros(2, dtype=torch.int64)
    vllm_kernels.swap_blocks_batch(zero, zero, zero)


def test_bad_batch(route):
    src, dst = pool(10, route[0]), pool(10, route[1])
    before, (from_, to, size) = dst.clone(), batch(src, dst)
    name = "swap_blocks_batch"
    cases = [
        ((from_.int(), to, size), r"src_ptrs: expected int64, got int32; cast it with .long\(\)$"),
        (
            (from_, to[:2], size),
            r"dst_ptrs: expected num_copies = 3 \(from src_ptrs\) at dimension",
        ),
        ((from_, to, size[:2]), r"sizes: expected num_copies = 3 \(from src_ptrs\) at dimension 0"),
        ((from_, to, size[:, None]), r"sizes: expected shape \[num_copies\], got shape \[3, 1\]$"),
        ((from_, to, torch.arange(6)[::2]), r"sizes: expected a contiguous tensor"),
        ((from_, to, -size), r"sizes\[0\] = -4096: expected a size >= 0$"),
        ((from_ * torch.tensor([1, 0, 1]), to, size), r"src_ptrs\[1\] = 0: expected an address$"),
        ((from_, to * torch.tensor([1, 1, 0]), size), r"dst_ptrs\[2\] = 0: expected an address$"),
        (([1], to, size), r"src_ptrs: expected a tensor, got list$"),
    ]
    if "cuda" in route:
        cases.append(((from_, to.cuda(), size), r"dst_ptrs: expected a tensor on cpu, got cuda:0$"))
    for args, message in cases:
        with raises(rf"^{name}: {message}"):
            vllm_kernels.swap_blocks_batch(*args)
    assert torch.equal(dst, before)


def test_opcheck_of_a_batch_and_no_compile(route):
    src, dst = pool(10, route[0]), pool(10, route[1])
    on = torch.empty(0, device="cuda") if "cuda" in route else None
    opcheck("swap_blocks_batch", *batch(src, dst), False, on)
    with pytest.raises(Exception, match=r"expected a call outside of torch\.compile"):
        assert_compiles(vllm_kernels.swap_blocks_batch, *batch(src, dst))
