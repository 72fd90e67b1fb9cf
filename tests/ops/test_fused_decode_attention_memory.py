"""fused_decode_attention: rows that are padded or broken stay alone; tensors may be strided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_decode_attention_cases import assert_like_apart, check, make_case
from helpers import EPSILON, bits
from paged_attention_cases import NAN

import vllm_kernels

# --- rows of a batch


def test_padded_rows(device, dtype, layout):
    """Length 0 and slot -1, as a CUDA graph has them: they give 0 and store nothing."""
    case = make_case(device, dtype, [40, 0, 17, 0], layout=layout, bias=True)
    case.block_tables[1] = -1
    assert case.slot_mapping.tolist()[1::2] == [-1, -1]
    got = check(case)
    assert not got[1::2].any() and got[::2].any(-1).all()
    check(make_case(device, dtype, [0, 0, 0], layout=layout))


def test_token_left_out(device, dtype, layout):
    """Slot -1 with a length: attention reads what the cache holds."""
    case = make_case(device, dtype, [40, 33], layout=layout)
    stored = case.copy()
    stored.run()
    again = replace(case.copy(), key_cache=stored.key_cache, value_cache=stored.value_cache)
    again.slot_mapping = torch.tensor([-1, -1], device=device)
    again.qkv[:, 8 * 64 :] = NAN  # of key and value nothing is used
    before = [bits(cache).clone() for cache in (again.key_cache, again.value_cache)]
    assert_like_apart(again.run(), case.copy().run())
    assert torch.equal(bits(again.key_cache), before[0])
    assert torch.equal(bits(again.value_cache), before[1])


def test_shorter_length_than_the_slot(device, layout):
    """The token is stored where its slot is, and not seen by a length that ends before it."""
    case = make_case(device, torch.float32, [40, 33], layout=layout)
    case.seq_lens -= 1
    assert check(case).isfinite().all()


def test_nan_stays_in_its_sequence(device, dtype, layout):
    case = make_case(device, dtype, [40, 130, 17], layout=layout, bias=True)
    want = case.copy().run()
    case.qkv[1] = NAN
    got = case.run()
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and got[1].isnan().all()


def test_nan_stays_in_its_head(device, dtype, layout):
    case = make_case(device, dtype, [40, 130, 17], layout=layout, norm=True)
    want = case.copy().run()
    broken = case.copy()
    broken.qkv[1, 5 * 64 + 7] = NAN  # query head 5
    got = broken.run()
    keep = torch.ones(3, 8, dtype=torch.bool, device=device)
    keep[1, 5] = False
    assert torch.equal(got[keep], want[keep]) and got[1, 5].isnan().all()
    for head in (9, 11):  # of KV head 1: key, value
        broken = case.copy()
        broken.qkv[1, head * 64 + 7] = NAN
        got = broken.run()
        keep = torch.ones(3, 8, dtype=torch.bool, device=device)
        keep[1, 4:] = False
        assert torch.equal(got[keep], want[keep]) and got[1, 4:].isnan().any(-1).all()


def test_two_runs_agree_bit_for_bit(device, dtype, layout):
    case = make_case(device, dtype, [1000, 3, 513, 77], heads=16, layout=layout)
    assert torch.equal(case.copy().run(), case.copy().run())


# --- strides


@pytest.mark.parametrize("first, behind", [(0, 8), (8, 16), (2, 2), (1, 0)])
def test_strided(device, dtype, layout, first, behind):
    """Tokens of qkv and out inside of wider rows; what lies between stays as it is."""
    case = make_case(device, dtype, [40, 17, 3], layout=layout, bias=True)
    want = case.copy().run()
    rows = torch.randn(3, first + 12 * 64 + behind).to(device, dtype)
    inside = rows[:, first : first + 12 * 64]
    inside.copy_(case.qkv)
    before = rows.clone()
    wide = torch.full((3, 9 * 64), NAN, device=device, dtype=dtype)
    out = wide[:, : 8 * 64].unflatten(1, (8, 64))
    strided = replace(case.copy(), qkv=inside)
    got = vllm_kernels.fused_decode_attention(*strided.tensors(), **case.options, out=out)
    assert got is out and wide[:, 8 * 64 :].isnan().all()
    if first % 8 == 0:  # else CUDA may take another kernel
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype])
    assert torch.equal(rows[:, :first], before[:, :first])
    assert torch.equal(rows[:, first + 8 * 64 :], before[:, first + 8 * 64 :])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_caches_of_one_tensor(device, dtype, layout):
    """Key and value caches as slices, with another layer's beside them."""
    case = make_case(device, dtype, [40, 17, 3], layout=layout)
    want = case.copy().run()
    shape = case.key_cache.shape
    packed = torch.full((shape[0], 2, 2, *shape[1:]), 5.0, device=device, dtype=dtype)
    packed[:, 1, 0], packed[:, 1, 1] = case.key_cache, case.value_cache
    slices = replace(case.copy(), key_cache=packed[:, 1, 0], value_cache=packed[:, 1, 1])
    assert torch.equal(slices.run(), want)
    assert (packed[:, 0] == 5).all()
