"""paged_attention_v1 and _v2 over strided tensors; nothing but a sequence's own tokens matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_attention_v1_v2_cases import NAN, assert_right, make_case

import vllm_kernels

# --- strides


def test_strided_query(device, dtype, version):
    case = make_case(device, dtype, [5, 90, 200])
    want = case.run(version)
    packed = torch.full((3, 12, 64), NAN, device=device, dtype=dtype)
    packed[:, :8] = case.query
    out = torch.empty_like(case.query)
    scratch = () if version == 1 else case.scratch()
    call = vllm_kernels.paged_attention_v1 if version == 1 else vllm_kernels.paged_attention_v2
    call(out, *scratch, *replace(case, query=packed[:, :8]).arguments())
    assert torch.equal(out, want)


def test_out_of_any_alignment(device, dtype, version):
    case = make_case(device, dtype, [5, 90, 200])
    memory = torch.full((case.query.numel() + 1,), NAN, device=device, dtype=dtype)
    out = memory[1:].view(case.query.shape)
    if version == 1:
        vllm_kernels.paged_attention_v1(out, *case.arguments())
    else:
        vllm_kernels.paged_attention_v2(out, *case.scratch(), *case.arguments())
    assert_right(case, out)


def test_cache_slices_of_a_packed_tensor(device, dtype, version):
    """K and V of two layers as engines allocate them: slices with a large block stride."""
    case = make_case(device, dtype, [5, 90, 200])
    want = case.run(version)
    num_blocks, kv_heads = case.value_cache.shape[:2]
    page = case.value_cache[0, 0].numel()
    packed = torch.full((num_blocks, 3, kv_heads + 1, 2, page), NAN, device=device, dtype=dtype)
    key = packed[:, 1, :kv_heads, 0].unflatten(-1, case.key_cache.shape[2:])
    value = packed[:, 1, :kv_heads, 1].unflatten(-1, case.value_cache.shape[2:])
    key.copy_(case.key_cache)
    value.copy_(case.value_cache)
    assert torch.equal(replace(case, key_cache=key, value_cache=value).run(version), want)


def test_strides_past_int32(device, version):
    """Block strides of more than 2^31 elements: a few pages at the ends of a sparse mapping."""
    stride = 2**31 + 64
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    case = make_case(device, torch.float16, [40], heads=2, kv_heads=1, spare_blocks=0)
    want = case.run(version)
    # The CPU maps untouched pages lazily; only three pages of each cache become real.
    storage = torch.empty(2 * stride + 4096, device=device, dtype=torch.float16)
    key = storage.as_strided(case.key_cache.shape, (stride, 1024, *case.key_cache.stride()[2:]))
    value = storage[2048:].as_strided(
        case.value_cache.shape, (stride, 1024, *case.value_cache.stride()[2:])
    )
    key.copy_(case.key_cache)
    value.copy_(case.value_cache)
    far = replace(case, key_cache=key, value_cache=value)
    assert torch.equal(far.run(version), want)


def test_table_with_row_stride(device, version):
    case = make_case(device, torch.float32, [5, 90, 200])
    wide = torch.full((3, case.block_tables.shape[1] + 7), -1, dtype=torch.int32, device=device)
    wide[:, : case.block_tables.shape[1]] = case.block_tables
    strided = replace(case, block_tables=wide[:, : case.block_tables.shape[1]])
    assert torch.equal(strided.run(version), case.run(version))


# --- what must not matter


def test_unused_slots_and_ids_have_no_influence(device, dtype, version):
    case = make_case(device, dtype, [1, 15, 17, 500, 513], block_size=16)
    want = case.run(version)
    mutated = replace(case, block_tables=case.block_tables.clone())
    for poison in (float("inf"), 0.0, -float("inf")):
        key = case.key_cache.clone()
        value = case.value_cache.clone()
        key[key.isnan()] = poison
        value[value.isnan()] = poison
        for seq, length in enumerate(case.seq_lens.tolist()):
            mutated.block_tables[seq, -(-length // 16) :] = 7 if poison == 0 else -5
        got = replace(mutated, key_cache=key, value_cache=value).run(version)
        assert torch.equal(got, want)


def test_unused_fp8_slots_have_no_influence(device, version):
    case = make_case(device, torch.bfloat16, [1, 15, 17, 500, 513], kv_cache_dtype="fp8")
    want = case.run(version)
    for cache in (case.key_cache, case.value_cache):
        unused = (cache & 0x7F) == 0x7F
        assert unused.any()
        cache[unused] = 0x35
    assert torch.equal(case.run(version), want)


def test_nan_stays_in_its_row(device, dtype, version):
    case = make_case(device, dtype, [40, 130, 70], heads=8, kv_heads=2)
    want = case.run(version)
    case.query[1, 3, 7] = NAN
    got = case.run(version)
    assert got[1, 3].isnan().all()
    case.query[1, 3] = 0
    keep = torch.ones(3, 8, dtype=torch.bool, device=device)
    keep[1, 3] = False
    assert torch.equal(got[keep], want[keep])


def test_nan_in_a_used_value_shows(device, version):
    case = make_case(device, torch.float32, [40, 130], heads=4, kv_heads=2)
    block = case.block_tables[1, 2].item()
    case.value_cache[block, 1, 5, 3] = NAN
    got = case.run(version)
    assert got[1, 2:, 5].isnan().all()
    got[1, 2:, 5] = 0
    assert not got.isnan().any()


def test_two_runs_agree_bit_for_bit(device, dtype, version):
    case = make_case(device, dtype, [1000, 3, 513, 77], heads=16, kv_heads=4, head_size=128)
    assert torch.equal(case.run(version), case.run(version))
