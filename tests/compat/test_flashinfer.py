"""FlashInfer's attention functions in every call form, against plain PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from flashinfer_cases import (
    HEADS,
    KV_HEADS,
    LENS,
    PAGE,
    SIZE,
    Cache,
    attention,
    ints,
    near,
    workspace,
)
from helpers import needs_gpu, raises

import vllm_kernels.compat.flashinfer as flashinfer


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize(
    "plan, calls, expected",
    [
        ({}, {}, {}),
        ({"window_left": 9}, {}, {"left": 9}),
        ({"logits_soft_cap": 5.0, "sm_scale": 0.3}, {}, {"softcap": 5.0, "scale": 0.3}),
        ({}, {"window_left": 3}, {"left": 3}),
        ({}, {"q_scale": 0.5, "k_scale": 3.0}, {"scale": 1.5 * SIZE**-0.5}),
    ],
)
def test_decode(device, dtype, kv_layout, page, plan, calls, expected):
    cache = Cache(device, dtype, kv_layout, LENS, page)
    q = torch.randn(len(LENS), HEADS, SIZE).to(device, dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, page, q_data_type=dtype, **plan)
    want = [attention(q[i : i + 1], *kv, **expected) for i, kv in enumerate(cache.sequences)]
    for form in cache.forms():
        out, lse = wrapper.run(q, form, return_lse=True, **calls)
        near(out, torch.cat([x for x, _ in want]), dtype)
        near(
            lse,
            torch.cat([x for _, x in want]),
            torch.bfloat16 if dtype != torch.float32 else dtype,
        )
        assert torch.equal(wrapper.run(q, form, **calls), out)
    given, given_lse = torch.empty_like(out), torch.empty_like(lse)
    got = wrapper.run_return_lse(q, form, out=given, lse=given_lse, **calls)
    assert got[0] is given and got[1] is given_lse
    assert torch.equal(given, out) and torch.equal(given_lse, lse)


def test_decode_with_sinks_and_a_value_scale(device, kv_layout):
    cache = Cache(device, torch.float32, kv_layout, LENS)
    q, sinks = torch.randn(len(LENS), HEADS, SIZE, device=device), torch.randn(HEADS, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.begin_forward(*cache.table(), HEADS, KV_HEADS, SIZE, PAGE)
    out = wrapper.run(q, cache.both, sinks=sinks, v_scale=2.0)
    want = [attention(q[i : i + 1], *kv, sinks=sinks)[0] for i, kv in enumerate(cache.sequences)]
    near(out, 2 * torch.cat(want), torch.float32)
    wrapper.end_forward()
    assert torch.equal(wrapper.forward(q, cache.both, sm_scale=0.5, window_left=4),
                       wrapper.run(q, cache.both))  # fmt: skip
    out, lse = wrapper.forward_return_lse(q, cache.both)
    near(lse[0], attention(q[:1], *cache.sequences[0])[1][0], torch.float32)


def test_decode_of_several_tokens(device, kv_layout):
    cache = Cache(device, torch.float32, kv_layout, [37, 20])
    q = torch.randn(6, HEADS, SIZE, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, PAGE)
    out = wrapper.run(q, cache.both, q_len_per_req=3)
    for i, kv in enumerate(cache.sequences):
        want, _ = attention(q[3 * i : 3 * i + 3], *kv, causal=True)
        near(out[3 * i : 3 * i + 3], want, torch.float32)


def test_fp8_caches(device, kv_layout):
    cache = Cache(device, torch.float8_e4m3fn, kv_layout, LENS)
    q = torch.randn(len(LENS), HEADS, SIZE).to(device, torch.float16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, PAGE, kv_data_type=torch.float8_e4m3fn)
    out = wrapper.run(q, cache.both, k_scale=0.5, v_scale=0.25)
    scale = 0.5 * SIZE**-0.5
    want = [attention(q[i : i + 1], *kv, scale=scale)[0] for i, kv in enumerate(cache.sequences)]
    near(out, 0.25 * torch.cat(want), torch.float16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("longest", [None, 7], ids=["any", "known"])
def test_prefill(device, dtype, kv_layout, causal, longest):
    cache = Cache(device, dtype, kv_layout, [37, 0, 16, 5])
    counts = [7, 0, 1, 5]
    starts = ints(0, 7, 7, 8, 13, device=device)
    q = torch.randn(13, HEADS, SIZE).to(device, dtype)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(starts, *cache.table(), HEADS, KV_HEADS, SIZE, PAGE, causal=causal,
                 window_left=11, max_token_per_sequence=longest)  # fmt: skip
    options = {"causal": causal, "left": 11}
    want = [attention(x, *kv, **options) for x, kv in zip(q.split(counts), cache.sequences)]
    for form in cache.forms():
        out, lse = wrapper.run_return_lse(q, form)
        near(out, torch.cat([x for x, _ in want]), dtype)
        near(
            lse,
            torch.cat([x for _, x in want]),
            torch.bfloat16 if dtype != torch.float32 else dtype,
        )
        assert torch.equal(wrapper.run(q, form), out)


def test_a_plan_from_host_memory(device):
    cache = Cache("cpu", torch.float32, "NHD", [37, 20])
    q = torch.randn(5, HEADS, SIZE, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(ints(0, 3, 5), *cache.table(), HEADS, KV_HEADS, SIZE, PAGE, causal=True)
    out = wrapper.run(q, cache.both.to(device))
    want = [attention(x, *kv, causal=True)[0] for x, kv in zip(q.split([3, 2]), cache.sequences)]
    near(out, torch.cat(want), torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_prefill(device, dtype, causal):
    queries, keys = [3, 0, 4], [9, 2, 4]
    q = torch.randn(7, HEADS, SIZE).to(device, dtype)
    k, v = torch.randn(2, 15, KV_HEADS, SIZE).to(device, dtype)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.plan(ints(0, 3, 3, 7, device=device), ints(0, 9, 11, 15, device=device), HEADS,
                 KV_HEADS, SIZE, causal=causal, logits_soft_cap=20.0)  # fmt: skip
    parts = zip(q.split(queries), k.split(keys), v.split(keys))
    want = [attention(*part, causal=causal, softcap=20.0) for part in parts]
    out, lse = wrapper.run_return_lse(q, k, v)
    near(out, torch.cat([x for x, _ in want]), dtype)
    near(lse, torch.cat([x for _, x in want]), torch.bfloat16 if dtype != torch.float32 else dtype)
    assert torch.equal(wrapper.run(q, k, v), out)


def test_single_sequences(device, dtype, kv_layout):
    q = torch.randn(5, HEADS, SIZE).to(device, dtype)
    k, v = torch.randn(2, 9, KV_HEADS, SIZE).to(device, dtype)
    lie = [x.transpose(0, 1).contiguous() if kv_layout == "HND" else x for x in (k, v)]
    for causal in (False, True):
        options = {"causal": causal, "window_left": 4}
        want, want_lse = attention(q, k, v, causal=causal, left=4)
        out = flashinfer.single_prefill_with_kv_cache(q, *lie, kv_layout=kv_layout, **options)
        near(out, want, dtype)
        out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(
            q, *lie, kv_layout=kv_layout, **options
        )
        near(lse, want_lse, torch.bfloat16 if dtype != torch.float32 else dtype)
    want, want_lse = attention(q[:1], k, v)
    out, lse = flashinfer.single_decode_with_kv_cache(
        q[0], *lie, kv_layout=kv_layout, v_scale=2.0, return_lse=True
    )
    near(out, 2 * want[0], dtype)
    near(lse, want_lse[0], torch.bfloat16 if dtype != torch.float32 else dtype)
    assert flashinfer.single_decode_with_kv_cache(q[0], *lie, kv_layout).shape == q[0].shape


def test_merges_are_attention_over_all_keys(device, dtype):
    q = torch.randn(5, HEADS, SIZE).to(device, dtype)
    k, v = torch.randn(2, 30, KV_HEADS, SIZE).to(device, dtype)
    whole, whole_lse = attention(q, k, v)
    parts = [
        flashinfer.single_prefill_with_kv_cache_return_lse(q, k[part], v[part])
        for part in (slice(0, 4), slice(4, 20), slice(20, 30))
    ]
    bound = torch.bfloat16 if dtype != torch.float32 else dtype
    out, lse = flashinfer.merge_states(*(torch.stack(x, 1) for x in zip(*parts)))
    near(out, whole, bound)
    near(lse, whole_lse, bound)
    pair = flashinfer.merge_state(*flashinfer.merge_state(*parts[0], *parts[1]), *parts[2])
    near(pair[0], whole, bound)
    out, lse = (x.clone() for x in flashinfer.merge_state(*parts[0], *parts[1]))
    before, mask = out.clone(), torch.tensor([True, False, True, True, False], device=device)
    flashinfer.merge_state_in_place(out, lse, *parts[2], mask=mask)
    near(out[mask], whole[mask.cpu()], bound)
    assert torch.equal(out[~mask], before[~mask])


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


def test_what_is_not_served_raises_by_name():
    cache = Cache("cpu", torch.float32, "NHD", [5])
    q = torch.randn(1, HEADS, SIZE)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    sizes = HEADS, KV_HEADS, SIZE, PAGE
    cases = [
        (lambda: decode.run(q, cache.both), r"^Batch\w+.run: expected a plan\(\) before it$"),
        (
            lambda: decode.plan(*cache.table(), *sizes, pos_encoding_mode="ROPE_LLAMA"),
            r"^Batch\w+.plan: pos_encoding_mode: expected NONE, got 'ROPE_LLAMA': rotate with .*",
        ),
        (
            lambda: prefill.plan(ints(0, 1), *cache.table(), *sizes, custom_mask=torch.ones(1)),
            r"^Batch\w+.plan: custom_mask: not supported, got .*",
        ),
        (
            lambda: prefill.plan(ints(0, 1), *cache.table(), *sizes, head_dim_vo=32),
            r"^Batch\w+.plan: head_dim_vo: not supported, got 32$",
        ),
        (
            lambda: flashinfer.single_prefill_with_kv_cache(q, q, q, kv_layout="XHD"),
            r"^single_prefill_with_kv_cache: kv_layout: expected NHD or HND, got 'XHD'$",
        ),
        (
            lambda: flashinfer.single_prefill_with_kv_cache(q, q, q, o_dtype=torch.float16),
            r"^single_prefill_with_kv_cache: o_dtype: expected torch.float32 \(from q\), got .*",
        ),
        (
            lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), "HND"),
            r"^BatchPrefillWithRaggedKVCacheWrapper: kv_layout: not supported, got 'HND'$",
        ),
        (
            lambda: flashinfer.merge_states(q, q),
            r"^merge_states: s: expected the shape of v without its last dimension of 4, got .*",
        ),
        (
            lambda: flashinfer.append_paged_kv_cache(q, q, ints(0), ints(0), q, *cache.table()),
            r"^append_paged_kv_cache: paged_kv_cache: expected shape \[pages, 2, ...\] of .*",
        ),
        (lambda: flashinfer.BatchAttention, r"^flashinfer.BatchAttention: not supported$"),
        (
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(q, use_cuda_graph=True),
            r"^Batch\w+: paged_kv_indptr_buffer: expected a tensor, got None$",
        ),
    ]  # fmt: skip
    for call, message in cases:
        with raises(message):
            call()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flashinfer.nothing
