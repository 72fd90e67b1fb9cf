"""paged_attention_v1 and _v2 with ALiBi and block sparsity."""

from __future__ import annotations

import pytest
import torch
from paged_attention_v1_v2_cases import NAN, assert_right, make_case

SPARSE_NAMES = ("tp_rank", "blocksparse_local_blocks", "blocksparse_vert_stride",
                "blocksparse_block_size", "blocksparse_head_sliding_step")  # fmt: skip


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_alibi(device, dtype, version, kv_heads, kv_cache_dtype):
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(8)], device=device)
    case = make_case(
        device,
        dtype,
        [1, 17, 300, 1100],
        kv_heads=kv_heads,
        kv_cache_dtype=kv_cache_dtype,
        alibi_slopes=slopes,
    )
    assert_right(case, case.run(version))


@pytest.mark.parametrize("head_sliding_step", [0, 1, -1, 3, -2])
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("local_blocks, vert_stride, sparse_block", [(2, 4, 64), (0, 3, 32),
                                                                     (1, 8, 16)])  # fmt: skip
def test_block_sparse(
    device, version, head_sliding_step, tp_rank, local_blocks, vert_stride, sparse_block
):
    if head_sliding_step == 0 and tp_rank:
        tp_rank = 2**31 - 1  # has no effect then
    values = (tp_rank, local_blocks, vert_stride, sparse_block, head_sliding_step)
    for dtype, block_size in ((torch.float32, 16), (torch.bfloat16, 8)):
        case = make_case(
            device,
            dtype,
            [1, 63, 64, 65, 700, 1500],
            heads=6,
            kv_heads=2,
            block_size=block_size,
            sparse=dict(zip(SPARSE_NAMES, values)),
        )
        assert_right(case, case.run(version))


def test_block_sparse_with_alibi(device, dtype, version):
    slopes = torch.linspace(0.02, 0.3, 6, device=device)
    case = make_case(
        device,
        dtype,
        [10, 333, 2000],
        heads=6,
        kv_heads=3,
        alibi_slopes=slopes,
        sparse=dict(zip(SPARSE_NAMES, (0, 1, 5, 32, 1))),
    )
    assert_right(case, case.run(version))


def test_pages_no_head_sees_are_not_read(device, version):
    case = make_case(
        device,
        torch.float32,
        [1024],
        heads=4,
        kv_heads=2,
        sparse=dict(zip(SPARSE_NAMES, (0, 1, 4, 64, 0))),
    )
    want = case.run(version)
    # With step 0 every head sees sparse blocks 3, 7, 11, 15 and the local one, the last.
    for token in range(0, 1024, 16):
        if token // 64 % 4 != 3:
            block = case.block_tables[0, token // 16].item()
            case.key_cache[block] = NAN
            case.value_cache[block] = NAN
    assert torch.equal(case.run(version), want)


def test_nothing_seen_gives_zero(device, dtype, version):
    """Block-sparse without local blocks: short sequences see no block at all."""
    case = make_case(device, dtype, [20, 100], sparse=dict(zip(SPARSE_NAMES, (0, 0, 8, 16, 0))))
    out = case.run(version)
    assert torch.equal(out[0], torch.zeros_like(out[0]))  # blocks 0 and 1 of stride 8, offset 1
    assert torch.equal(out[1], torch.zeros_like(out[1]))
