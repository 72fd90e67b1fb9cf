"""FlashInfer's writers of a paged cache: every token in its slot, and no token anywhere else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from flashinfer_cases import KV_HEADS, PAGE, SIZE, Cache, ints
from helpers import raises
from torch import Tensor

import vllm_kernels.compat.flashinfer as flashinfer


def rows_of(cache: Cache, kv_layout: str) -> Tensor:
    """[pages, 2, page_size, num_kv_heads, head_dim], a view."""
    return cache.both.transpose(2, 3) if kv_layout == "HND" else cache.both


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize("form", [0, 1], ids=["tensor", "tuple"])
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_append(device, dtype, kv_layout, page, form, stored):
    cache = Cache(device, stored or dtype, kv_layout, [37, 20], page)
    new = torch.randn(2, 5, KV_HEADS, SIZE).to(device, dtype)
    lens = flashinfer.get_seq_lens(cache.indptr, cache.last, page)
    assert lens.tolist() == [37, 20]
    starts = ints(0, 3, 5, device=device)
    batch, positions = flashinfer.get_batch_indices_positions(starts, lens, 5)
    assert batch.tolist() == [0, 0, 0, 1, 1] and positions.tolist() == [34, 35, 36, 18, 19]
    want = rows_of(cache, kv_layout).float()
    for i, (row, position) in enumerate(zip(batch.tolist(), positions.tolist())):
        block = int(cache.indices[int(cache.indptr[row]) + position // page])
        want[block, :, position % page] = new[:, i].to(stored or dtype).float()
    flashinfer.append_paged_kv_cache(
        *new, batch, positions, cache.forms()[form], *cache.table_of_append(), kv_layout
    )
    got = rows_of(cache, kv_layout).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_append_leaves_out_tokens_without_a_place(device, page, integers):
    """The last one alone has a place: position 7 of the second sequence."""
    cache = Cache(device, torch.float32, "NHD", [37, 20, 0], page)
    batch = [-1, -(2**31), 3, 2**31 - 1, 0, 1, 0, 1, 2, 1, 1]
    room = -(-20 // page) * page
    positions = [0, 0, 0, 0, -1, -(2**31), 37 + PAGE, room, 0, 2**31 - 1, 7]
    new = torch.randn(2, len(batch), KV_HEADS, SIZE, device=device)
    want = cache.both.clone()
    block = int(cache.indices[int(cache.indptr[1]) + 7 // page])
    want[block, :, 7 % page] = new[:, -1]
    places = (torch.tensor(x, dtype=integers, device=device) for x in (batch, positions))
    flashinfer.append_paged_kv_cache(*new, *places, cache.both, *cache.table_of_append())
    torch.testing.assert_close(cache.both, want, rtol=0, atol=0, equal_nan=True)


def test_append_with_a_table_of_nothing(device):
    cache = torch.zeros(2, 2, PAGE, KV_HEADS, SIZE, device=device)
    new = torch.ones(2, 1, KV_HEADS, SIZE, device=device)
    zero, none = ints(0, device=device), ints(device=device)
    for indices, indptr in ((none, ints(0, 0, device=device)), (zero, zero)):
        flashinfer.append_paged_kv_cache(*new, zero, zero, cache, indices, indptr, none)
    assert not cache.any()


@pytest.mark.parametrize("starts", [[0, 3, 3, 5], [2, 3, 3, 5], [0]])
def test_batch_indices_of_more_tokens_than_there_are(device, starts):
    """Tokens before the first and after the last sequence have no place."""
    lens = ints(37, 9, 20, device=device)[: len(starts) - 1]
    got = flashinfer.get_batch_indices_positions(ints(*starts, device=device), lens, 8)
    want = [(-1, -1)] * 8
    for row, (start, end) in enumerate(pairwise(starts)):
        want[start:end] = [(row, int(lens[row]) - end + i) for i in range(start, end)]
    assert [x.dtype for x in got] == [torch.int32] * 2
    assert list(zip(*(x.tolist() for x in got))) == want


def test_batch_indices_need_a_length_of_each_sequence():
    message = r"^get_batch_indices_positions: seq_lens: expected shape \[2\], got \[1\]$"
    with raises(message):
        flashinfer.get_batch_indices_positions(ints(0, 1, 2), ints(5), 2)
    # More than that are fine: buffers may be longer.
    got = flashinfer.get_batch_indices_positions(ints(0, 1, 2), ints(5, 6, 7), 2)
    assert [x.tolist() for x in got] == [[0, 1], [4, 5]]
