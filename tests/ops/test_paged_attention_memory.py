"""paged_attention over strided tensors; nothing but the tokens that a query sees matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import to_layout
from paged_attention_cases import NAN, assert_right, make_case

import vllm_kernels
from vllm_kernels import reference

# --- strides


@pytest.mark.parametrize("queries", [None, [3, 1, 9]], ids=["decode", "several"])
def test_strided_query_and_out(device, dtype, layout, queries):
    case = make_case(device, dtype, [5, 90, 200], queries, layout=layout)
    want, want_lse = case.run_with_lse()
    packed = torch.full((want.shape[0], 12, 64), NAN, device=device, dtype=dtype)
    packed[:, :8] = case.query
    out = torch.full((want.shape[0], 20, 64), 7.0, device=device, dtype=dtype)
    got, lse = vllm_kernels.paged_attention(
        packed[:, :8], *case.tensors()[1:], **case.options, max_query_len=case.max_query_len,
        out=out[:, 4:12], return_lse=True,
    )  # fmt: skip
    assert torch.equal(got, want) and torch.equal(lse, want_lse)
    assert (out[:, :4] == 7).all() and (out[:, 12:] == 7).all()


@pytest.mark.parametrize("queries", [None, [3, 1, 9], [5, 90, 200]], ids=["decode", "few", "many"])
@pytest.mark.parametrize("offset, stride", [(1, 0), (0, 1), (3, 2)])
def test_out_of_any_alignment(device, dtype, layout, queries, offset, stride):
    """Base and token stride of out in elements, not in vectors."""
    case = make_case(device, dtype, [5, 90, 200], queries, layout=layout)
    row = case.query[0].numel() + stride
    memory = torch.full((offset + len(case.query) * row,), NAN, device=device, dtype=dtype)
    out = memory.as_strided(case.query.shape, (row, 64, 1), offset)
    vllm_kernels.paged_attention(
        *case.tensors(), **case.options, max_query_len=case.max_query_len, out=out
    )
    assert_right(case, out)


@pytest.mark.parametrize("queries", [None, [3, 1, 9]], ids=["decode", "several"])
def test_cache_slices_of_a_packed_tensor(device, dtype, layout, queries):
    case = make_case(device, dtype, [5, 90, 200], queries, layout=layout)
    want = case.run()
    both = torch.stack([case.key_cache.flatten(2), case.value_cache.flatten(2)])  # [2, blocks, ..]
    shape = case.key_cache.shape[2:], case.value_cache.shape[2:]
    first = replace(
        case, key_cache=both[0].unflatten(-1, shape[0]), value_cache=both[1].unflatten(-1, shape[1])
    )
    assert torch.equal(first.run(), want)
    # One layer of three with K beside V, and more heads than are looked at.
    layers = torch.full((both.shape[1], 3, 2, both.shape[2] + 1, both.shape[3]), NAN)
    layers = layers.to(device, dtype)
    layers[:, 1, :, :-1] = both.transpose(0, 1)
    key, value = layers[:, 1, 0, :-1], layers[:, 1, 1, :-1]
    second = replace(
        case, key_cache=key.unflatten(-1, shape[0]), value_cache=value.unflatten(-1, shape[1])
    )
    assert not second.key_cache.is_contiguous()
    assert torch.equal(second.run(), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("queries", [None, [3, 1, 9]], ids=["decode", "several"])
def test_any_outer_strides(device, layout, queries):
    """NHD is HND with two dimensions swapped, and tokens may lie anywhere."""
    case = make_case(device, torch.float32, [5, 90, 200], queries, layout=layout)
    want = case.run()
    other = "HND" if layout == "NHD" else "NHD"
    swapped = replace(
        case.with_options(layout=other),
        key_cache=case.key_cache.transpose(1, 2),
        value_cache=case.value_cache.transpose(1, 2),
    )
    if queries is None and device == "cpu":  # its tiles and tasks follow from the layout
        assert_right(case, swapped.run())
    else:
        assert torch.equal(swapped.run(), want)
    wide = [cache.new_full((*cache.shape[:-1], 67), NAN) for cache in case.tensors()[1:3]]
    for to, cache in zip(wide, case.tensors()[1:3]):
        to[..., 2:66] = cache
    padded = replace(case, key_cache=wide[0][..., 2:66], value_cache=wide[1][..., 2:66])
    if queries is None and device == "cpu":
        assert_right(case, padded.run())
    else:
        assert torch.equal(padded.run(), want)


@pytest.mark.parametrize("queries", [None, [3]], ids=["decode", "several"])
def test_strides_past_int32(device, layout, queries):
    """Block strides of more than 2^31 elements: a few pages at the ends of a sparse mapping."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    stride = 2**31 + 64
    case = make_case(
        device, torch.float16, [40], queries, heads=2, kv_heads=1, layout=layout, spare_blocks=0
    )
    want = case.run()
    # The CPU maps untouched pages lazily; only three pages of each cache become real.
    storage = torch.empty(2 * stride + 4096, device=device, dtype=torch.float16)
    key, value = case.key_cache, case.value_cache
    far_key = storage.as_strided(key.shape, (stride, *key.stride()[1:]))
    far_value = storage[2048:].as_strided(value.shape, (stride, *value.stride()[1:]))
    far_key.copy_(key)
    far_value.copy_(value)
    assert torch.equal(replace(case, key_cache=far_key, value_cache=far_value).run(), want)


def test_table_with_row_stride(device, layout):
    case = make_case(device, torch.float32, [5, 90, 200], [1, 2, 3], layout=layout)
    wide = torch.nn.functional.pad(case.block_tables, (0, 7), value=-1)
    strided = replace(case, block_tables=wide[:, : case.block_tables.shape[1]])
    assert not strided.block_tables.is_contiguous()
    assert torch.equal(strided.run(), case.run())


# --- what must not matter


@pytest.mark.parametrize("queries", [None, [1, 4, 9, 2]], ids=["decode", "several"])
def test_unused_slots_and_ids_have_no_influence(device, dtype, layout, queries):
    case = make_case(device, dtype, [1, 15, 17, 313], queries, layout=layout)
    want = case.run()
    for poison, garbage in ((float("inf"), -5), (0.0, 7), (-float("inf"), 2**31 - 1)):
        caches = [cache.nan_to_num(poison) for cache in case.tensors()[1:3]]
        tables = case.block_tables.clone()
        for seq, length in enumerate(case.seq_lens.tolist()):
            tables[seq, -(-length // 16) :] = garbage
        mutated = replace(case, key_cache=caches[0], value_cache=caches[1], block_tables=tables)
        assert torch.equal(mutated.run(), want)


@pytest.mark.parametrize("queries", [None, [5, 2]], ids=["decode", "several"])
def test_pages_before_the_window_are_not_read(device, layout, queries):
    """Their slots may hold NaN, and the table anything: engines give such pages back."""
    case = make_case(device, torch.float32, [100, 50], queries, layout=layout, sliding_window=20)
    want, want_lse = case.run_with_lse()
    for seq, length in enumerate(case.seq_lens.tolist()):
        first = length - (queries[seq] if queries else 1) - 20 + 1  # token of the first query token
        gone = case.block_tables[seq, : first // 16].long()
        assert gone.numel() > 0
        case.key_cache[gone] = NAN
        case.value_cache[gone] = NAN
        case.block_tables[seq, : first // 16] = -1
    got, lse = case.run_with_lse()
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


def test_tokens_a_query_does_not_see_have_no_influence(device, layout):
    """Later tokens, and those before the window, may be NaN within pages that are read."""
    case = make_case(device, torch.float32, [37], [6], layout=layout, sliding_window=9)
    want = case.run()
    rows = [reference.token_rows(cache, layout).clone() for cache in case.tensors()[1:3]]
    page = case.block_tables[0].tolist()
    for token in [*range(23), 34, 35, 36]:  # query token 2 at position 33 sees 25 .. 33
        for cache in rows:
            cache[page[token // 16], token % 16] = NAN
    poisoned = replace(
        case,
        key_cache=to_layout(rows[0], layout, True),
        value_cache=to_layout(rows[1], layout, False),
    )
    got = poisoned.run()
    assert torch.equal(got[:3], want[:3])
    assert got[3:].isnan().any(-1).all()


def test_nan_of_a_later_query_token_stays_in_its_kv_head(device, dtype, layout):
    """K never reaches the query tokens before it; V in 16 bits on CUDA may, for 0 * NaN is NaN."""
    case = make_case(device, dtype, [37, 40], [6, 3], layout=layout)
    want = case.run()
    block = case.block_tables[0, 2]
    for name in ("key_cache", "value_cache"):
        rows = reference.token_rows(getattr(case, name), layout).clone()
        rows[block, 36 % 16, 0] = NAN  # the last of the 6, KV head 0
        poisoned = {name: to_layout(rows, layout, name == "key_cache")}
        got = replace(case, **poisoned).run()
        assert got[5, :4].isnan().all()
        assert torch.equal(got[:, 4:], want[:, 4:]) and torch.equal(got[6:], want[6:])
        if name == "key_cache" or dtype == torch.float32 or device == "cpu":
            assert torch.equal(got[:5], want[:5])


def test_nan_stays_in_its_row(device, dtype, layout):
    case = make_case(device, dtype, [40, 130, 70], [2, 1, 3], layout=layout)
    want, want_lse = case.run_with_lse()
    case.query[3, 5, 7] = NAN
    got, lse = case.run_with_lse()
    assert got[3, 5].isnan().all() and lse[3, 5].isnan()
    keep = torch.ones(6, 8, dtype=torch.bool, device=device)
    keep[3, 5] = False
    assert torch.equal(got[keep], want[keep]) and torch.equal(lse[keep], want_lse[keep])


def test_two_runs_agree_bit_for_bit(device, dtype, layout):
    case = make_case(device, dtype, [1000, 3, 513, 77], [1, 3, 9, 70], heads=16, layout=layout)
    assert torch.equal(case.run(), case.run())
