"""paged_attention over one shard of each sequence (total_seq_lens), against the float64 reference,
and all shards of a sequence against the whole."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, needs_gpu, raises
from paged_attention_cases import (
    Case,
    alone,
    assert_right,
    check,
    make_case,
    per_head,
    with_token_scales,
    with_token_zeros,
)
from torch import Tensor

import vllm_kernels
from vllm_kernels.distributed import ContextParallel
from vllm_kernels.reference.cache import token_rows

BF16 = torch.bfloat16
SPLITS = [(2, 0, 1), (2, 1, 16), (3, 2, 1), (4, 1, 8), (8, 7, 64)]


def shard_case(
    device: str,
    dtype: torch.dtype,
    totals: list[int],
    queries: list[int] | None = None,
    split: tuple[int, int, int] = (3, 1, 4),
    **options: object,
) -> Case:
    """A shard of sequences of `totals` tokens."""
    shards, shard, interleave = split
    parallel = ContextParallel(shards=shards, interleave=interleave)
    lens = parallel.local_lens(torch.tensor(totals))[shard].tolist()
    return make_case(
        device, dtype, lens, queries, **options, shards=shards, shard=shard, interleave=interleave,
        total_seq_lens=torch.tensor(totals, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("window", [0, 1, 70])
def test_decode(device, dtype, layout, split, window):
    totals = [300, 0, 1, 65, 1000, 17]
    check(shard_case(device, dtype, totals, split=split, layout=layout, sliding_window=window))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("window", [0, 5, 100])
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_several_query_tokens(device, layout, split, window, block_size):
    options = {"split": split, "layout": layout, "sliding_window": window, "block_size": block_size}
    totals, queries = [300, 20, 0, 65, 40, 9], [6, 20, 0, 1, 33, 9]
    check(shard_case(device, BF16, totals, queries, **options))


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("window", [0, 90])
def test_alibi_and_other_scores(device, dtype, layout, split, window):
    options = {"alibi_slopes": per_head(8, 0.05, 0.2), "layout": layout, "sliding_window": window}
    check(shard_case(device, dtype, [500, 33], [9, 2], split=split, **options))
    others = {"softcap": 20.0, "sinks": per_head(8, -1, 1)}
    check(shard_case(device, dtype, [500, 33], split=split, **options, **others))


@pytest.mark.parametrize("heads", [(4, 4), (20, 2), (16, 1)], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("stored", [BF16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_heads_and_caches(device, layout, heads, head_size, stored):
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_size": head_size, "layout": layout}
    case = shard_case(
        device, BF16, [1500, 133], [8, 11], (4, 2, 16), stored=stored, sliding_window=200, **sizes
    )
    check(case)
    if stored == torch.int8:
        scaled = with_token_scales(case)
        check(scaled)
        if head_size % 32 == 0:  # as int4 needs it
            check(with_token_zeros(scaled))


def test_kv_ready_and_fixed_split_size(device, layout):
    """With splits of one size, a sequence's result has the same bits in any batch."""
    case = shard_case(device, BF16, [4000, 33, 900], [2, 9, 1], layout=layout, sliding_window=2000)
    split = case.with_options(fixed_split_size=256)
    got = split.run()
    assert_right(case, got, split.run_with_lse(), case.with_options(kv_ready=True).run())
    for seq in range(3):
        one, rows = alone(split, seq)
        totals = case.options["total_seq_lens"][seq : seq + 1]
        assert torch.equal(one.with_options(total_seq_lens=totals).run(), got[rows]), seq


@pytest.mark.parametrize("causal", [False, True])
def test_not_causal(device, layout, causal):
    case = shard_case(device, BF16, [300, 70], [6, 9], layout=layout)
    check(case.with_options(causal=causal, window_right=3))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 77}, {"alibi": True}], ids=str)
@pytest.mark.parametrize("interleave", [1, 4, 32])
def test_all_shards_are_the_whole(device, layout, options, interleave):
    """Their parts combined. Keys that are written by ContextParallel.slots."""
    shards, block_size, totals, queries = 3, 16, [333, 40, 5], [7, 1, 5]
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = per_head(8, 0.02, 0.1)
    whole = make_case(device, torch.float32, totals, queries, layout=layout, **options)
    parallel = ContextParallel(shards=shards, interleave=interleave)
    lens = parallel.local_lens(whole.seq_lens)
    tables = torch.arange(3 * 24, dtype=torch.int32).view(3, 24).flip(1).to(device)
    starts = torch.tensor([0, *totals]).cumsum(0).to(device, torch.int32)
    positions = torch.cat([torch.arange(total) for total in totals]).to(device)
    slots = parallel.slots(
        positions, tables.expand(shards, -1, -1), block_size=block_size, query_start_loc=starts
    )
    rows = []
    for cache in (whole.key_cache, whole.value_cache):
        tokens = token_rows(cache, layout).flatten(0, 1)
        at = [
            whole.block_tables[seq].long()[torch.arange(total, device=device) // 16] * 16
            + torch.arange(total, device=device) % 16
            for seq, total in enumerate(totals)
        ]
        rows.append(tokens[torch.cat(at)])
    parts, lses = [], []
    for shard in range(shards):
        caches = [torch.zeros_like(x[:1]).expand(72, *x.shape[1:]).clone()
                  for x in (whole.key_cache, whole.value_cache)]  # fmt: skip
        one = torch.ones(1, device=device)
        if layout == "vllm":
            vllm_kernels.reshape_and_cache(*rows, *caches, slots[shard], "auto", one, one)
        else:
            views = [x if layout == "NHD" else x.transpose(1, 2) for x in caches]
            vllm_kernels.reshape_and_cache_flash(*rows, *views, slots[shard], "auto", one, one)
        out, lse = vllm_kernels.paged_attention(
            whole.query, *caches, tables, lens[shard], **whole.options, max_query_len=7,
            return_lse=True, total_seq_lens=whole.seq_lens, shards=shards, shard=shard,
            interleave=interleave,
        )  # fmt: skip
        parts.append(out)
        lses.append(lse)
    merged = torch.empty_like(whole.query)
    vllm_kernels.combine_attn_partials(merged, torch.stack(parts), torch.stack(lses))
    assert_right(whole, merged)


def test_blocks_before_the_window_may_be_anything(device):
    """The shard's first 32 of 64 tokens are before the window of each query token."""
    case = shard_case(device, BF16, [120], [1], split=(2, 0, 16), layout="NHD", sliding_window=20)
    want = case.run()
    case.block_tables[:, :2] = -1
    assert torch.equal(case.run(), want)
    case.block_tables[:, 3] = -1  # visible
    if device == "cpu":
        with raises(re.escape("block_tables[0, 3] = -1")):
            case.run()


def test_explain(device):
    case = shard_case(device, BF16, [4000, 300], [60, 64], heads=32, kv_heads=8, head_size=128)
    text = vllm_kernels.explain(
        vllm_kernels.paged_attention, *case.tensors(), **case.options, max_query_len=64
    )
    assert device == "cpu" or "prefill kernels take whole sequences, no shards" in text


def test_bad_input(device):
    case = shard_case(device, BF16, [40, 90], [5, 8])
    lens = case.options["total_seq_lens"]
    for options, message in (
        ({"total_seq_lens": lens[:1]}, "total_seq_lens: expected num_seqs = 2 (from query_start_l"),
        ({"total_seq_lens": lens.long()}, "total_seq_lens: expected int32, got int64"),
        ({"total_seq_lens": None}, "shards: expected 1 without total_seq_lens, got 3"),
        (
            {"total_seq_lens": None, "shards": 1, "shard": 2},
            "shard: expected 0 without total_seq_l",
        ),
        ({"shards": 0}, "shards: expected 1 to 65536, got 0"),
        ({"shard": 3}, "shard: expected 0 to 2, got 3"),
        ({"interleave": 0}, "interleave: expected 1 to 16384, got 0"),
        ({"interleave": 12}, "interleave: expected a power of two, got 12"),
        ({"tree_mask": lens.new_ones(13)}, "total_seq_lens: expected no tree_mask"),
    ):
        with raises(re.escape(message)):
            case.with_options(**options).run()


def test_page_lists_are_refused(device):
    case = shard_case(device, BF16, [40, 90], [5, 8])
    query, key_cache, value_cache = case.tensors()[:3]
    indptr = torch.zeros(3, dtype=torch.int32, device=device)
    with raises("total_seq_lens: expected no kv_indptr"):
        vllm_kernels.paged_attention(
            query, key_cache, value_cache, kv_indptr=indptr, kv_indices=indptr[:0],
            last_page_len=indptr[:2], **case.options,
        )  # fmt: skip


def test_totals_must_fit_the_shard():
    case = shard_case("cpu", BF16, [40, 90], [5, 8], (2, 1, 4))  # 20 and 44 tokens are stored
    for totals, message in (
        ([4, 90], "total_seq_lens[0] = 4: expected at least its 5 query tokens"),
        ([40, -1], "total_seq_lens[1] = -1: expected a length in [0, 2147483648)"),
        ([39, 90], "total_seq_lens[0] = 39: expected a length that has the seq_lens tokens of this "
                   "shard, in [40, 2147483648)"),
    ):  # fmt: skip
        with raises(re.escape(message)):
            case.with_options(total_seq_lens=torch.tensor(totals, dtype=torch.int32)).run()


def test_opcheck_and_compile(device):
    case = shard_case(device, BF16, [40, 90], [5, 8])

    def call(query: Tensor, lens: Tensor) -> Tensor:
        options = {**case.options, "total_seq_lens": lens}
        return vllm_kernels.paged_attention(query, *case.tensors()[1:], **options, max_query_len=8)

    assert_compiles(call, case.query, case.options["total_seq_lens"])


@needs_gpu
def test_cuda_graph():
    case = shard_case("cuda", BF16, [400, 90], [5, 8], sliding_window=60)
    lens, other = case.options["total_seq_lens"].clone(), torch.tensor([420, 75]).int().cuda()
    out = torch.empty_like(case.query)
    call = case.with_options(total_seq_lens=lens, out=out)

    def run() -> None:
        vllm_kernels.paged_attention(*call.tensors(), **call.options, max_query_len=8)

    assert_graph_replays(
        run, lambda: lens.copy_(other), out, case.with_options(total_seq_lens=other).run
    )
