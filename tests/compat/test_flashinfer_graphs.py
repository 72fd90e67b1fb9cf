"""FlashInfer's wrappers with CUDA graphs, and that nothing waits for the GPU."""

from __future__ import annotations

import pytest
import torch
from flashinfer_cases import HEADS, KV_HEADS, PAGE, SIZE, Cache, attention, ints, near, workspace
from helpers import needs_gpu, raises
from torch import Tensor

import vllm_kernels.compat.flashinfer as flashinfer

SIZES = HEADS, KV_HEADS, SIZE


def test_cuda_graph_wrapper_keeps_its_buffers(device):
    big, small = (
        Cache(device, torch.float32, "NHD", [37, 20]),
        Cache(device, torch.float32, "NHD", [5, 9]),
    )
    buffers = (
        ints(0, 0, 0, device=device),
        ints(*[0] * 20, device=device),
        ints(0, 0, device=device),
    )
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    assert wrapper.is_cuda_graph_enabled
    for cache in (big, small):
        wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, PAGE)
        assert torch.equal(buffers[0], cache.indptr) and torch.equal(buffers[2], cache.last)
        q = torch.randn(2, HEADS, SIZE, device=device)
        want = [attention(q[i : i + 1], *kv)[0] for i, kv in enumerate(cache.sequences)]
        near(wrapper.run(q, cache.both), torch.cat(want), torch.float32)
    with raises(r"^CUDAGraph\w+.plan: indptr: expected 3 elements \(from the wrapper's buffer\), "):
        wrapper.plan(ints(0, 1), ints(1), ints(1), HEADS, KV_HEADS, SIZE, PAGE)


@needs_gpu
def test_a_graph_replays_with_the_next_plan():
    caches = [Cache("cuda", torch.bfloat16, "NHD", lens) for lens in ([900, 33], [5, 800])]
    both = torch.cat([cache.both for cache in caches])
    caches[1].indices += len(caches[0].both)
    buffers = (
        ints(0, 0, 0, device="cuda"),
        ints(*[0] * 99, device="cuda"),
        ints(0, 0, device="cuda"),
    )
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cuda"), *buffers)
    wrapper.plan(*caches[0].table(), HEADS, KV_HEADS, SIZE, PAGE)
    q = torch.randn(2, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    out, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, both, out=out)
    for cache in (caches[1], caches[0]):
        wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, PAGE)
        graph.replay()
        torch.cuda.synchronize()
        want = [attention(q[i : i + 1], *kv)[0] for i, kv in enumerate(cache.sequences)]
        near(out, torch.cat(want), torch.bfloat16)


class PagedPrefill:
    """Two plans of a wrapper with buffers: 8 query tokens of two sequences of other lengths.

    The second plan has the longest query: a graph of the first one must not keep its bound.
    """

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.caches = [Cache(device, dtype, "NHD", lens) for lens in ([90, 33], [6, 80])]
        self.both = torch.cat([cache.both for cache in self.caches])
        self.caches[1].indices += len(self.caches[0].both)
        self.counts = [[3, 5], [6, 2]]
        self.starts = [ints(0, n, 8, device=device) for n, _ in self.counts]
        self.q = torch.randn(8, HEADS, SIZE).to(device, dtype)
        pair, pages = ints(0, 0, 0, device=device), ints(*[0] * 20, device=device)
        self.buffers = [pair, pair.clone(), pages, pair[:2].clone()]
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(device), "NHD", True, *self.buffers
        )

    def plan(self, i: int) -> None:
        self.wrapper.plan(self.starts[i], *self.caches[i].table(), *SIZES, PAGE, causal=True,
                          max_token_per_sequence=max(self.counts[i]))  # fmt: skip

    def run(self, **options: Tensor) -> Tensor:
        return self.wrapper.run(self.q, self.both, **options)

    def want(self, i: int) -> Tensor:
        parts = zip(self.q.split(self.counts[i]), self.caches[i].sequences)
        return torch.cat([attention(q, *kv, causal=True)[0] for q, kv in parts])


class RaggedPrefill:
    """The same of a wrapper without pages: 60 keys of two sequences."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.q = torch.randn(8, HEADS, SIZE).to(device, dtype)
        self.k, self.v = torch.randn(2, 60, KV_HEADS, SIZE).to(device, dtype)
        self.counts, self.keys = [[3, 5], [6, 2]], [[20, 40], [50, 10]]
        self.starts = [ints(0, n, 8, device=device) for n, _ in self.counts]
        self.key_starts = [ints(0, n, 60, device=device) for n, _ in self.keys]
        self.buffers = [ints(0, 0, 0, device=device), ints(0, 0, 0, device=device)]
        self.wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(device), "NHD", True, *self.buffers
        )

    def plan(self, i: int) -> None:
        self.wrapper.plan(self.starts[i], self.key_starts[i], *SIZES, causal=True,
                          max_token_per_sequence=max(self.counts[i]))  # fmt: skip

    def run(self, **options: Tensor) -> Tensor:
        return self.wrapper.run(self.q, self.k, self.v, **options)

    def want(self, i: int) -> Tensor:
        keys = self.keys[i]
        parts = zip(self.q.split(self.counts[i]), self.k.split(keys), self.v.split(keys))
        return torch.cat([attention(*part, causal=True)[0] for part in parts])


prefills = pytest.mark.parametrize("prefill", [PagedPrefill, RaggedPrefill])


@prefills
def test_prefill_wrappers_keep_their_buffers(device, prefill):
    case = prefill(device, torch.float32)
    assert case.wrapper.is_cuda_graph_enabled
    for i in (0, 1):
        case.plan(i)
        assert case.buffers[0].tolist() == [0, case.counts[i][0], 8]
        near(case.run(), case.want(i), torch.float32)


@prefills
def test_prefill_wrappers_need_their_buffers(prefill):
    wrapper = type(prefill("cpu", torch.float32).wrapper)
    with raises(r"^BatchPrefill\w+: qo_indptr_buf: expected a tensor, got None$"):
        wrapper(workspace("cpu"), use_cuda_graph=True)


@needs_gpu
@prefills
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_prefill_replays_with_the_next_plan(prefill, dtype):
    case = prefill("cuda", dtype)
    case.plan(0)
    out, graph = torch.empty_like(case.q), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(out=out)
    for i in (1, 0):
        case.plan(i)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        near(out, case.want(i), dtype)


@needs_gpu
@pytest.mark.parametrize("tables", ["cpu", "cuda"])
def test_nothing_waits_for_the_gpu(tables):
    """plan() and run() of each wrapper, and the writer of the cache."""
    dtype = torch.bfloat16
    cache = Cache("cuda", dtype, "NHD", [37, 20])
    q = torch.randn(5, HEADS, SIZE, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 5, KV_HEADS, SIZE, device="cuda", dtype=dtype)
    table = [x.to(tables) for x in cache.table()]
    starts, keys = ints(0, 3, 5, device="cuda"), ints(0, 3, 5, device=tables)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cuda"))
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cuda"))
    fixed = PagedPrefill("cuda", dtype)

    def step() -> None:
        decode.plan(*table, *SIZES, PAGE)
        decode.run(q[:2], cache.both, v_scale=2.0, return_lse=True)
        decode.run(q[:4], cache.both, q_len_per_req=2)
        paged.plan(keys, *table, *SIZES, PAGE, causal=True)
        paged.run(q, cache.both, return_lse=True)
        ragged.plan(keys, keys, *SIZES, causal=True)
        ragged.run(q, k, v, return_lse=True)
        fixed.plan(0)
        fixed.run()
        lens = flashinfer.get_seq_lens(cache.indptr, cache.last, PAGE)
        places = flashinfer.get_batch_indices_positions(starts, lens, 5)
        flashinfer.append_paged_kv_cache(k, v, *places, cache.both, *cache.table_of_append())

    step()  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            q[0, 0, 0].item()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
