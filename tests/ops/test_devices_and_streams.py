"""Ops run on the device of their tensors and on its current stream, not on the default ones."""

from __future__ import annotations

import pytest
import torch

import vllm_kernels
from vllm_kernels import reference

EPS = 1e-6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device_while_the_first_is_current():
    x = torch.randn(64, 4096, device="cuda:1")
    weight = torch.randn(4096, device="cuda:1")
    out = torch.empty_like(x)
    assert torch.cuda.current_device() == 0
    vllm_kernels.rms_norm(out, x, weight, EPS)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, EPS))
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match=r"weight: expected a tensor on cuda:1 \(from input\)"):
        vllm_kernels.rms_norm(out, x, weight.to("cuda:0"), EPS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mixed_devices_are_named():
    x = torch.randn(4, 64, device="cuda")
    with pytest.raises(RuntimeError, match=r"weight: expected a tensor on cuda:0 .*, got cpu"):
        vllm_kernels.rms_norm(torch.empty_like(x), x, torch.randn(64), EPS)


def test_one_meta_tensor_among_others_is_named():
    x = torch.randn(4, 64)
    expected = r"^rms_norm: weight: expected a tensor on cpu \(from out\), got meta$"
    with pytest.raises(RuntimeError, match=expected):
        vllm_kernels.rms_norm(torch.empty_like(x), x, torch.randn(64, device="meta"), EPS)
    meta = x.to("meta")
    vllm_kernels.rms_norm(meta, meta, torch.randn(64, device="meta"), EPS)
    vllm_kernels.copy_blocks([meta], [meta.clone()], torch.tensor([[0, 1]]))
    slots, cache = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 16, 2, 32)
    rows, one = torch.zeros(4, 2, 32), torch.ones(1)
    with pytest.raises(RuntimeError, match=r"slot_mapping: expected a tensor on cpu .*, got meta"):
        vllm_kernels.reshape_and_cache_flash(
            rows, rows, cache, cache.clone(), slots.to("meta"), "auto", one, one
        )


def test_what_is_no_tensor_is_named():
    cache = torch.zeros(2, 16, 2, 32)
    rows, one = torch.zeros(4, 2, 32), torch.ones(1)
    with pytest.raises(
        TypeError, match=r"^reshape_and_cache_flash: slot_mapping: expected a tensor, got float"
    ):
        vllm_kernels.reshape_and_cache_flash(rows, rows, cache, cache, 1.0, "auto", one, one)
    lens = torch.ones(1, dtype=torch.int32)
    attention = (cache, cache, 2, 1.0, lens[None], lens, 16, 1, None, "auto", one, one)
    with pytest.raises(
        RuntimeError, match=r"^paged_attention_v1: out: expected a tensor, got None"
    ):
        vllm_kernels.paged_attention_v1(None, rows, *attention)
    with pytest.raises(RuntimeError, match=r"^paged_attention: query: expected a tensor, got None"):
        vllm_kernels.paged_attention(None, cache, cache, lens[None], lens)


def test_scales_and_slopes_that_require_grad_are_refused():
    cache, lens = torch.zeros(2, 16, 2, 32), torch.ones(1, dtype=torch.int32)
    for name in ("alibi_slopes", "k_scale", "v_scale"):
        given = {name: torch.ones(2, requires_grad=True)}
        with pytest.raises(RuntimeError, match=r"^paged_attention: .*inference only"):
            vllm_kernels.paged_attention(
                torch.zeros(1, 2, 32), cache, cache, lens[None], lens, layout="NHD", **given
            )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_current_stream_is_used():
    # A long copy on the side stream comes first; on any other stream the op would read zeros.
    side = torch.cuda.Stream()
    source = torch.randn(4096, 4096, device="cuda")
    weight = torch.randn(4096, device="cuda")
    x, out = torch.zeros_like(source), torch.empty_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(50):
            x.zero_()
        x.copy_(source)
        vllm_kernels.rms_norm(out, x, weight, EPS)
    side.synchronize()
    torch.testing.assert_close(out, reference.rms_norm(source, weight, EPS))
