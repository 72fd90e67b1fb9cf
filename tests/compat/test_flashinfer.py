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
    near_both,
    workspace,
)
from helpers import raises

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
        near_both((out, lse), want, dtype)
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


def test_decode_forward_replaces_the_options_of_plan(device, kv_layout):
    cache = Cache(device, torch.float32, kv_layout, LENS)
    q = torch.randn(len(LENS), HEADS, SIZE, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, PAGE, window_left=2)
    got = wrapper.forward_return_lse(q, cache.both)
    want = [attention(q[i : i + 1], *kv) for i, kv in enumerate(cache.sequences)]
    near_both(got, want, torch.float32)
    assert torch.equal(wrapper.forward(q, cache.both), got[0])
    # pos_encoding_mode, q_scale, k_scale, v_scale, window_left, cap, scale
    options = "NONE", 0.5, 3.0, 2.0, 4, 5.0, 0.3
    out, lse = wrapper.forward_return_lse(q, cache.both, *options)
    expected = {"left": 4, "softcap": 5.0, "scale": 1.5 * 0.3}
    want = [attention(q[i : i + 1], *kv, **expected) for i, kv in enumerate(cache.sequences)]
    near_both((out / 2, lse), want, torch.float32)
    assert torch.equal(wrapper.forward(q, cache.both, *options), out)


@pytest.mark.parametrize("page", [1, PAGE])
def test_decode_of_several_tokens(device, dtype, kv_layout, page):
    cache = Cache(device, dtype, kv_layout, [37, 20], page)
    q = torch.randn(6, HEADS, SIZE).to(device, dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, page)
    want = [attention(x, *kv, causal=True) for x, kv in zip(q.split(3), cache.sequences)]
    near_both(wrapper.run(q, cache.both, q_len_per_req=3, return_lse=True), want, dtype)


def test_fp8_caches(device, kv_layout):
    cache = Cache(device, torch.float8_e4m3fn, kv_layout, LENS)
    q = torch.randn(len(LENS), HEADS, SIZE).to(device, torch.float16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(*cache.table(), HEADS, KV_HEADS, SIZE, PAGE, kv_data_type=torch.float8_e4m3fn)
    out = wrapper.run(q, cache.both, k_scale=0.5, v_scale=0.25)
    scale = 0.5 * SIZE**-0.5
    want = [attention(q[i : i + 1], *kv, scale=scale)[0] for i, kv in enumerate(cache.sequences)]
    near(out, 0.25 * torch.cat(want), torch.float16)


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


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, {}),
        ({"window_left": 3}, {"left": 3}),
        ({"logits_soft_cap": 5.0, "sm_scale": 0.3}, {"softcap": 5.0, "scale": 0.3}),
        ({"q_scale": 0.5, "k_scale": 3.0}, {"scale": 1.5 * SIZE**-0.5}),
    ],
)
def test_single_decode(device, dtype, kv_layout, options, expected):
    q = torch.randn(HEADS, SIZE).to(device, dtype)
    k, v = torch.randn(2, 9, KV_HEADS, SIZE).to(device, dtype)
    lie = [x.transpose(0, 1).contiguous() if kv_layout == "HND" else x for x in (k, v)]
    call = flashinfer.single_decode_with_kv_cache
    out, lse = call(q, *lie, kv_layout, return_lse=True, **options)
    near_both((out[None], lse[None]), [attention(q[None], k, v, **expected)], dtype)
    assert torch.equal(call(q, *lie, kv_layout, **options), out)
    assert torch.equal(call(q, *lie, kv_layout, v_scale=2.0, **options), 2 * out)


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


def test_what_is_not_served_raises_by_name():
    cache = Cache("cpu", torch.float32, "NHD", [5])
    q = torch.randn(1, HEADS, SIZE)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    sizes = HEADS, KV_HEADS, SIZE, PAGE
    cases = [
        (lambda: decode.run(q, cache.both), r"^Batch\w+.run: expected a plan\(\) before it$"),
        (
            lambda: prefill.forward(q, cache.both),
            r"^BatchPrefill\w+.forward: expected a plan\(\) before it$",
        ),
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
        (
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(q, use_cuda_graph=True),
            r"^Batch\w+: paged_kv_indptr_buffer: expected a tensor, got None$",
        ),
    ]  # fmt: skip
    for call, message in cases:
        with raises(message):
            call()


def test_queries_in_8_bits_are_refused():
    """The result has the query's dtype, which no kernel writes."""
    cache = Cache("cpu", torch.float32, "NHD", [5])
    q, pages = (x.to(torch.float8_e4m3fn) for x in (torch.ones(1, HEADS, SIZE), cache.both))
    keys, sizes = pages[0, 0], (HEADS, KV_HEADS, SIZE)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    decode.plan(*cache.table(), *sizes, PAGE)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    prefill.plan(ints(0, 1), *cache.table(), *sizes, PAGE)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    ragged.plan(ints(0, 1), ints(0, PAGE), *sizes)
    refused = "q: expected float32, float16 or bfloat16, got float8_e4m3fn$"
    for name, call in (
        (r"Batch\w+.run", lambda: decode.run(q, pages)),
        (r"Batch\w+.run", lambda: prefill.run(q, pages)),
        (r"Batch\w+.run", lambda: ragged.run(q, keys, keys)),
        ("single_decode_with_kv_cache",
         lambda: flashinfer.single_decode_with_kv_cache(q[0], keys, keys)),
        ("single_prefill_with_kv_cache",
         lambda: flashinfer.single_prefill_with_kv_cache(q, keys, keys)),
    ):  # fmt: skip
        with raises(f"^{name}: {refused}"):
            call()


@pytest.mark.parametrize(
    "name", ["BatchAttention", "fast_decode_plan", "rmsnorm", "xqa", "nothing"]
)
def test_a_name_that_is_not_served(name):
    """The error is of both kinds, so that hasattr() and getattr() work as with any module."""
    assert not hasattr(flashinfer, name)
    assert getattr(flashinfer, name, None) is None
    for kind in (NotImplementedError, AttributeError):
        with pytest.raises(kind) as error:
            getattr(flashinfer, name)
        assert str(error.value).startswith(f"flashinfer.{name}: not supported: there are Batch")
        assert str(error.value).endswith(", top_p_sampling_from_probs")
    with pytest.raises(ImportError):
        exec(f"from vllm_kernels.compat.flashinfer import {name}")


def test_sampling_functions_are_at_the_top_too():
    for name in set(flashinfer.sampling.__all__) - {"top_k_renorm_prob", "top_p_renorm_prob"}:
        assert name in flashinfer.__all__
        assert getattr(flashinfer, name) is getattr(flashinfer.sampling, name)
