"""Tensors whose storage is freed or cut are refused by name, before anything is read."""

from __future__ import annotations

import pytest
import torch
from helpers import raises
from torch import Tensor

import vllm_kernels

EPS = 1e-6


def freed(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def test_freed_storage(device):
    x, weight = torch.randn(4, 64, device=device), torch.ones(64, device=device)
    out = torch.empty_like(x)
    gone = (
        r"expected memory for all elements, got shape \[4, 64\] in a storage of 0 bytes at a null"
    )
    with raises(rf"^rms_norm: input: {gone} pointer; was it freed\?$"):
        vllm_kernels.rms_norm(out, freed(x.clone()), weight, EPS)
    with raises(rf"^rms_norm: out: {gone}"):
        vllm_kernels.rms_norm(freed(out.clone()), x, weight, EPS)
    with raises(r"^rms_norm: weight: expected memory for all elements, got shape \[64\] in a stor"):
        vllm_kernels.rms_norm(out, x, freed(weight.clone()), EPS)


def test_a_slice_of_a_freed_storage(device):
    """Its pointer is not null: null plus an offset."""
    x, weight = torch.randn(9, 64, device=device), torch.ones(64, device=device)
    part = x[5:]
    freed(x)
    with raises(r"^rms_norm: input: .* got shape \[4, 64\] in a storage of 0 bytes at a null poi"):
        vllm_kernels.rms_norm(torch.empty(4, 64, device=device), part, weight, EPS)


def test_cut_storage(device):
    x, weight = torch.randn(4, 64, device=device), torch.ones(64, device=device)
    out = torch.empty_like(x)
    x.untyped_storage().resize_(4 * 64 * 4 - 4)
    with raises(
        r"^rms_norm: input: .* got shape \[4, 64\] in a storage of 1020 bytes; was it freed"
    ):
        vllm_kernels.rms_norm(out, x, weight, EPS)
    x.untyped_storage().resize_(4 * 64 * 4)
    vllm_kernels.rms_norm(out, x, weight, EPS)


def test_caches_and_tables(device):
    cache = torch.zeros(4, 16, 1, 32, device=device)
    tables = torch.zeros(2, 2, dtype=torch.int32, device=device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    call = [torch.randn(2, 1, 32, device=device), cache, cache, tables, lens]
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
    for place, name in enumerate(names):
        bad = [freed(x.clone()) if i == place else x for i, x in enumerate(call)]
        with raises(rf"^paged_attention: {name}: expected memory for all elements, got"):
            vllm_kernels.paged_attention(*bad, layout="NHD")
    pairs = torch.tensor([[0, 1]])
    with raises(r"^swap_blocks: src: expected memory for all elements"):
        vllm_kernels.swap_blocks(freed(cache.clone()), cache, pairs)
    with raises(r"^swap_blocks: block_mapping: expected memory for all elements"):
        vllm_kernels.swap_blocks(cache.clone(), cache, freed(pairs.clone()))


@pytest.mark.parametrize("shape", [(0, 64), (4, 64)])
def test_empty_and_expanded_tensors_are_fine(device, shape):
    out = torch.empty(shape, device=device)
    x = torch.randn(64, device=device).expand(shape)
    vllm_kernels.rms_norm(out, x, torch.ones(64, device=device), EPS)
    nothing = freed(torch.empty(0, 64, device=device))
    vllm_kernels.rms_norm(nothing, nothing, torch.ones(64, device=device), EPS)
