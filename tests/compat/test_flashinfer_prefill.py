"""FlashInfer's prefill wrappers in every call form, against plain PyTorch in float64."""

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
from torch import Tensor

import vllm_kernels.compat.flashinfer as flashinfer
from vllm_kernels.compat.flashinfer import prefill

SIZES = HEADS, KV_HEADS, SIZE
COUNTS = [7, 0, 1, 5]
"""Query tokens of the sequences, the last ones of LENS."""


def starts_of(counts: list[int], device: str) -> Tensor:
    return ints(0, *torch.tensor(counts).cumsum(0).tolist(), device=device)


def queries(device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(sum(COUNTS), HEADS, SIZE).to(device, dtype)


def expected(q: Tensor, cache: Cache, **options: object) -> list[tuple[Tensor, Tensor]]:
    return [attention(x, *kv, **options) for x, kv in zip(q.split(COUNTS), cache.sequences)]


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "plan, calls, options",
    [
        ({}, {}, {}),
        ({"window_left": 11}, {}, {"left": 11}),
        ({"logits_soft_cap": 5.0, "sm_scale": 0.3}, {}, {"softcap": 5.0, "scale": 0.3}),
        ({"window_left": 11}, {"window_left": 3}, {"left": 3}),
        ({}, {"q_scale": 0.5, "k_scale": 3.0}, {"scale": 1.5 * SIZE**-0.5}),
    ],
)
def test_paged(device, dtype, kv_layout, page, causal, plan, calls, options):
    cache, q = Cache(device, dtype, kv_layout, LENS, page), queries(device, dtype)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout)
    want = expected(q, cache, causal=causal, **options)
    for longest in (None, max(COUNTS)):
        wrapper.plan(starts_of(COUNTS, device), *cache.table(), *SIZES, page, causal=causal,
                     max_token_per_sequence=longest, **plan)  # fmt: skip
        for form in cache.forms():
            out, lse = wrapper.run_return_lse(q, form, **calls)
            near_both((out, lse), want, dtype)
            assert torch.equal(wrapper.run(q, form, **calls), out)
    given, given_lse = torch.empty_like(out), torch.empty_like(lse)
    got = wrapper.run(q, form, out=given, lse=given_lse, return_lse=True, **calls)
    assert got[0] is given and got[1] is given_lse
    assert torch.equal(given, out) and torch.equal(given_lse, lse)


def test_paged_with_sinks_and_a_value_scale(device, dtype, kv_layout):
    cache, q = Cache(device, dtype, kv_layout, LENS), queries(device, dtype)
    sinks = torch.randn(HEADS, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.begin_forward(starts_of(COUNTS, device), *cache.table(), *SIZES, PAGE, causal=True)
    out, lse = wrapper.run(q, cache.both, sinks=sinks, v_scale=2.0, return_lse=True)
    near_both((out / 2, lse), expected(q, cache, causal=True, sinks=sinks), dtype)


def test_paged_fp8(device, kv_layout):
    cache, q = Cache(device, torch.float8_e4m3fn, kv_layout, LENS), queries(device, torch.float16)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(starts_of(COUNTS, device), *cache.table(), *SIZES, PAGE, causal=True,
                 kv_data_type=torch.float8_e4m3fn)  # fmt: skip
    out, lse = wrapper.run(q, cache.both, k_scale=0.5, v_scale=0.25, return_lse=True)
    want = expected(q, cache, causal=True, scale=0.5 * SIZE**-0.5)
    near_both((4 * out, lse), want, torch.float16)


def test_paged_forward_replaces_the_options_of_plan(device, kv_layout):
    cache, q = Cache(device, torch.float32, kv_layout, LENS), queries(device, torch.float32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), kv_layout)
    wrapper.plan(starts_of(COUNTS, device), *cache.table(), *SIZES, PAGE, causal=True,
                 window_left=2)  # fmt: skip
    got = wrapper.forward_return_lse(q, cache.both)
    near_both(got, expected(q, cache), torch.float32)
    assert torch.equal(wrapper.forward(q, cache.both), got[0])
    # causal, pos_encoding_mode, use_fp16_qk_reduction, k_scale, v_scale, window_left, cap, scale
    options = True, "NONE", False, 3.0, 2.0, 4, 5.0, 0.3
    out, lse = wrapper.forward_return_lse(q, cache.both, *options)
    want = expected(q, cache, causal=True, left=4, softcap=5.0, scale=3.0 * 0.3)
    near_both((out / 2, lse), want, torch.float32)
    assert torch.equal(wrapper.forward(q, cache.both, *options), out)


def test_a_plan_from_host_memory(device):
    cache, q = Cache("cpu", torch.float32, "NHD", LENS), queries(device, torch.float32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(starts_of(COUNTS, "cpu"), *cache.table(), *SIZES, PAGE, causal=True)
    got = wrapper.run_return_lse(q, cache.both.to(device))
    near_both(got, expected(q, cache, causal=True), torch.float32)


KEYS = [9, 2, 4, 5]
"""Keys of the ragged sequences, of which COUNTS has the query tokens."""


def ragged(device: str, dtype: torch.dtype, causal: bool, **plan: object):
    """A planned wrapper, its tensors, and a function that computes what to expect of them."""
    tensors = [
        torch.randn(sum(counts), heads, SIZE).to(device, dtype)
        for counts, heads in ((COUNTS, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
    ]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(
        starts_of(COUNTS, device), starts_of(KEYS, device), *SIZES, causal=causal, **plan
    )

    def want(**options: object) -> list[tuple[Tensor, Tensor]]:
        parts = (x.split(counts) for x, counts in zip(tensors, (COUNTS, KEYS, KEYS)))
        return [attention(*part, **options) for part in zip(*parts)]

    return wrapper, tensors, want


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "plan, calls, options",
    [
        ({}, {}, {}),
        ({"window_left": 3}, {}, {"left": 3}),
        ({"logits_soft_cap": 5.0, "sm_scale": 0.3}, {}, {"softcap": 5.0, "scale": 0.3}),
        ({}, {"q_scale": 0.5, "k_scale": 3.0, "o_scale": 1.0}, {"scale": 1.5 * SIZE**-0.5}),
    ],
)
def test_ragged(device, dtype, causal, plan, calls, options):
    wrapper, tensors, want = ragged(device, dtype, causal, **plan)
    out, lse = wrapper.run_return_lse(*tensors, **calls)
    near_both((out, lse), want(causal=causal, **options), dtype)
    assert torch.equal(wrapper.run(*tensors, **calls), out)
    assert torch.equal(wrapper.run(*tensors, v_scale=2.0, **calls), 2 * out)
    given, given_lse = torch.empty_like(out), torch.empty_like(lse)
    got = wrapper.run(*tensors, out=given, lse=given_lse, return_lse=True, **calls)
    assert got[0] is given and got[1] is given_lse
    assert torch.equal(given, out) and torch.equal(given_lse, lse)


def test_starts_in_host_memory_tell_the_longest_keys(monkeypatch):
    """What are no starts is refused by run(), as on a device."""
    given = []
    op = prefill.varlen_attention
    monkeypatch.setattr(
        prefill, "varlen_attention",
        lambda *a, **options: given.append(options["max_key_len"]) or op(*a, **options),
    )  # fmt: skip
    wrapper, tensors, _ = ragged("cpu", torch.float32, True)
    wrapper.run(*tensors)
    for starts in (ints(9, 7, 5, 3, 0), torch.tensor(5, dtype=torch.int32), torch.ones(2, 1).int()):
        wrapper.begin_forward(starts_of(COUNTS, "cpu"), starts, *SIZES, causal=True)
        with raises(r"^varlen_attention: key_start_loc.*: expected "):
            wrapper.run(*tensors)
    assert given == [max(KEYS), None, None, None]


def test_ragged_forward_replaces_the_options_of_plan(device):
    wrapper, tensors, want = ragged(device, torch.float32, True, window_left=2)
    wrapper.reset_workspace_buffer(workspace(device), workspace(device))
    got = wrapper.forward_return_lse(*tensors)
    near_both(got, want(), torch.float32)
    assert torch.equal(wrapper.forward(*tensors), got[0])
    # causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, cap, scale
    options = True, "NONE", False, 4, 5.0, 0.3
    out = wrapper.forward(*tensors, *options)
    wanted = want(causal=True, left=4, softcap=5.0, scale=0.3)
    near(out, torch.cat([x for x, _ in wanted]), torch.float32)


def test_ragged_scales_of_other_outputs_are_refused():
    wrapper, tensors, _ = ragged("cpu", torch.float32, True)
    for given in ({"o_scale": 0.5}, {"kv_cache_sf": torch.ones(1)}):
        (name,) = given
        message = rf"^Batch\w+.run: {name}: not supported, got"
        with pytest.raises(NotImplementedError, match=message):
            wrapper.run(*tensors, **given)
