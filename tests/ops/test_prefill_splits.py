"""Prompts of few work tiles and many keys, which several CTAs of prefill sm90 share, on CUDA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fp8_query_cases import BF16, E4M3, check_varlen, e4m3_case, rows_of
from helpers import assert_graph_replays, needs_cuda_library
from paged_attention_cases import (
    EIGHT_BITS,
    Case,
    check,
    make_case,
    per_head,
    query_scales,
    with_token_scales,
)
from torch import Tensor

import vllm_kernels

pytestmark = needs_cuda_library
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SIZES = {"heads": 8, "kv_heads": 2, "head_size": 128}
SHARED = "CTAs may share the keys"  # as explain has it


def make(lens: list[int], queries: list[int], dtype: torch.dtype = BF16, **options) -> Case:
    return make_case("cuda", dtype, lens, queries, **{**SIZES, **options})


def shares_keys(case: Case) -> bool:
    return SHARED in case.explained()


def check_shared(case: Case, expected: bool = True) -> None:
    """check() of a case whose keys CTAs may share, or not."""
    assert shares_keys(case) == (expected and ON_HOPPER)
    check(case)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("head_size", [64, 128, 32, 112])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_few_tiles(layout, head_size, page, dtype):
    """One tile of query rows and several; the kernels of both head sizes, and heads between."""
    for queries in (40, 200):
        case = make(
            [4100, 3000], 2 * [queries], dtype, head_size=head_size, block_size=page, layout=layout
        )
        check_shared(case)


@pytest.mark.parametrize("stored", [None, E4M3])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("queries", [9, 16])
def test_few_rows(layout, head_size, queries, stored):
    """Up to 64 rows: one consumer warpgroup has them all, and a slot has room for them alone."""
    shape = {"head_size": head_size, "stored": stored, "layout": layout}
    check_shared(make([4100, 700, 3000], 3 * [queries], **shape))


def test_rows_of_decode(layout):
    check_shared(make([4100, 3000], [8, 8], layout=layout), False)


@pytest.mark.parametrize("queries", [16, 32])
@pytest.mark.parametrize("seqs", [24, 70])
def test_one_long_sequence(layout, queries, seqs):
    """Equal lengths would not gain by splits. Only the long sequence has them, at any place."""
    for place in (0, seqs - 2):
        lens = [40 + i for i in range(seqs)]
        lens[place] = 9000
        check_shared(make(lens, seqs * [queries], heads=32, kv_heads=8, layout=layout))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4000}, {"causal": False}], ids=str)
def test_classes(layout, options):
    """Every class of lengths has its own number of splits. Query tokens are two tiles."""
    lens = [1000 * i + 3 for i in range(1, 17)]
    check_shared(make(lens, 16 * [60], layout=layout, **options))


def test_classes_of_several_rounds(layout):
    """A warp counts and schedules 32 sequences at a time."""
    lens = [500 + 220 * i for i in range(40)]
    check_shared(make(lens, 40 * [40], layout=layout))


@pytest.mark.parametrize("stored", [None, E4M3])
@pytest.mark.parametrize("length", [2047, 2048, 2049, 2175, 2176, 2177, 2559, 4095, 4096, 4097])
def test_ends_of_splits(layout, length, stored):
    check_shared(make([length], [32], layout=layout, stored=stored))


@pytest.mark.parametrize("seqs", [3, 40])
def test_unequal_lengths(layout, seqs):
    """Short sequences have fewer splits, or one. A warp schedules 32 sequences at a time."""
    lens = [9000, 64, 700, *(64 + 13 * i for i in range(seqs - 3))]
    check_shared(make(lens, seqs * [64], layout=layout))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 3000},
        {"causal": False},
        {"sinks": per_head(8, -1.0, 4.0)},
        {"scale": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("stored", [None, E4M3])
def test_options(layout, options, stored):
    check_shared(make([4100, 2100], [64, 64], layout=layout, stored=stored, **options))


@pytest.mark.parametrize(
    "name, options",
    [
        ("a softcap", {"softcap": 5.0}),
        ("heads of 96", {"head_size": 96}),
    ],
)
def test_not_shared(name, options):
    check_shared(make([4100, 2100], [64, 64], **options), False)


def test_fixed_splits(layout):
    """Then the batch must not decide whether there are splits."""
    case = make([4100, 2100], [64, 64], layout=layout, causal=False)
    assert shares_keys(case) == ON_HOPPER
    assert not shares_keys(case.with_options(fixed_split_size=1024))


@pytest.mark.parametrize("contiguous", [False, True])
def test_the_batch_decides(contiguous):
    """So many tiles are not split. Other bits show that a few are: they are as right."""
    few = make([5000], [64], layout="NHD", heads=64, kv_heads=4)
    many = make(32 * [5000], 32 * [64], layout="NHD", heads=64, kv_heads=4)
    many.query[:64] = few.query
    for name in ("key_cache", "value_cache"):
        cache, table = getattr(many, name), many.block_tables[0, :313].long()
        cache[table] = getattr(few, name)[few.block_tables[0, :313].long()]
    attend = varlen if contiguous else Case.run
    alone, in_batch = attend(few), attend(many)[:64]
    if ON_HOPPER:
        assert not torch.equal(alone, in_batch)
    torch.testing.assert_close(alone, in_batch, atol=2e-3, rtol=2e-2)
    if contiguous:
        alone, in_batch = varlen(few, fixed_split_size=1), varlen(many, fixed_split_size=1)[:64]
        assert torch.equal(alone, in_batch)


def varlen(case: Case, **options) -> Tensor:
    """The case over contiguous keys."""
    return vllm_kernels.varlen_attention(*contiguous(case), max_query_len=64, **options)


def contiguous(case: Case) -> tuple:
    """The tensors of varlen_attention."""
    key, value, starts = rows_of(case)
    return case.query, key, value, case.options["query_start_loc"], starts


def test_mixed_batches():
    """A concurrent decode launch uses the same workspace."""
    check_shared(make([9000, 4100, 5], [256, 64, 1], layout="NHD"), False)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": (2000, 0)}, {"causal": False, "window": (900, 30)}],
    ids=str,
)
def test_contiguous_keys(options):
    """Sequences of one token are tiles, too. One is empty, and one has more queries than keys."""
    for lens, queries in (
        ([4100, 3000], [64, 64]), ([9000, 40, 700], [1, 40, 3]), ([6000, 0, 5, 20], [64, 64, 9, 0]),
        ([9000, 0], [64, 64]), ([9000, 8900, 3], [64, 64, 64]),
    ):  # fmt: skip
        check_varlen(make(lens, queries, layout="NHD"), **options)
    case = e4m3_case("cuda", [4100, 3000], [64, 64], query_scales(2), layout="NHD", **SIZES)
    assert check_varlen(case, **options) == ON_HOPPER


@pytest.mark.parametrize("stored", [None, E4M3])
def test_the_longest_of_contiguous_keys(stored):
    """If the host knows it, keys of unequal lengths are split. With any, the result is right."""
    shape = {"heads": 32, "kv_heads": 8, "head_size": 128, "layout": "NHD", "stored": stored}
    case = make([11000, *15 * [300]], 16 * [16], **shape)
    for longest in (0, 1, 300, 11000, 2**40):
        check_varlen(case, longest)
    for longest, expected in ((None, False), (300, False), (11000, ON_HOPPER)):
        text = vllm_kernels.explain(
            vllm_kernels.varlen_attention, *contiguous(case), max_query_len=16, max_key_len=longest
        )
        assert (SHARED in text) == expected


@pytest.mark.parametrize("stored", [E4M3, torch.int8])
@pytest.mark.parametrize("head_size", [64, 128])
def test_contiguous_8_bit_keys(head_size, stored):
    """With 16-bit queries. Of 9 tokens one warpgroup has all rows."""
    for queries in (9, 40):
        shape = {"head_size": head_size, "stored": stored, "layout": "NHD"}
        check_varlen(make([4100, 700, 3000], 3 * [queries], **shape))


@pytest.mark.parametrize("stored", [None, E4M3])
@pytest.mark.parametrize("group, queries", [(7, 50), (7, 9), (71, 7), (71, 50)])
def test_other_groups(layout, group, queries, stored):
    """They do not divide the rows of a tile, so no TMA box has its queries."""
    shape = {"heads": group, "kv_heads": 1, "layout": layout, "stored": stored}
    check_shared(make([4100], [queries], **shape))


def test_gathered_rows():
    """Heads of 104 in NHD and many rows: K and V are gathered first."""
    case = make([5000], [280], heads=64, kv_heads=1, head_size=104, layout="NHD")
    assert "gathered" in case.explained() or not ON_HOPPER
    check(case)


def test_a_given_workspace(layout):
    workspace = vllm_kernels.paged_attention_workspace("cuda")
    case = make([4100, 700], [64, 64], layout=layout)
    assert torch.equal(case.with_options(workspace=workspace).run(), case.run())


def test_several_head_sizes_in_turn(layout):
    """Without a wait in between: one workspace has all their results."""
    cases = [make([4100], [64], head_size=size, layout=layout) for size in (64, 128)]
    cases.append(make([9000, 5], [1, 1], layout=layout))
    want = [case.run() for case in cases]
    torch.cuda.synchronize()
    for _ in range(10):
        assert all(torch.equal(case.run(), result) for case, result in zip(cases, want))


@pytest.mark.parametrize("stored", EIGHT_BITS)
@pytest.mark.parametrize("head_size", [64, 128, 112])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_8_bit_caches(layout, head_size, stored, dtype):
    """With 16-bit queries. Their producers dequantize the keys of a split."""
    shape = {"head_size": head_size, "stored": stored, "layout": layout}
    for queries in (40, 120):
        check_shared(make([4100, 3000], 2 * [queries], dtype, **shape))
    check_shared(make([4100, 700], [64, 64], dtype, sliding_window=3000, **shape))


@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_rows_of_any_magnitude(layout, stored):
    """bfloat16 queries become fp16: each row is moved into its range, whatever the others are."""
    case = make([4100, 3000], [40, 40], layout=layout, stored=stored)
    ordinary, scale = case.run(), 128**-0.5
    for power in (-80, 80):
        moved = replace(case, query=case.query * 2.0**power)
        assert torch.equal(moved.with_options(scale=scale * 2.0**-power).run(), ordinary)
    case.query[1::2] *= 2.0**20
    out, want = case.run(), case.naive()[0]
    assert torch.equal(out[::2], ordinary[::2])
    torch.testing.assert_close(out[1::2].double(), want[1::2], atol=2e-3, rtol=2e-2)


def test_a_scale_of_zero(layout):
    """Beside small queries, whose scale is small, too: what is masked stays masked."""
    case = make([4100, 3000], [40, 40], layout=layout, stored=torch.int8, scales_per_head=True)
    case.options["k_scale"][::2] = 0
    case.query[1::2] *= 2.0**-40
    check_shared(case)


@pytest.mark.parametrize("head_size", [64, 128])
def test_token_scales(layout, head_size):
    """int8 with a scale for each token: producers apply it."""
    for lens, queries in (([4100, 3000], [40, 40]), ([9000, 300, 40, 4000], 4 * [40])):
        case = make(lens, queries, head_size=head_size, stored=torch.int8, layout=layout)
        check_shared(with_token_scales(case))


def test_gathered_8_bit_caches(layout):
    """Splits are of gathered keys: 2080 rows."""
    case = make([5000, 4100], [520, 520], stored=E4M3, layout=layout)
    assert "gathered" in case.explained() or not ON_HOPPER
    check_shared(case)


@pytest.mark.parametrize("head_size", [64, 128])
def test_8_bit_products(layout, head_size):
    sizes = {**SIZES, "head_size": head_size, "layout": layout}
    case = e4m3_case("cuda", [4100, 3000], [64, 64], query_scales(2), **sizes)
    assert case.multiplies_in_8_bits() == ON_HOPPER
    check_shared(case)


@pytest.mark.parametrize("stored", [None, E4M3])
def test_bad_block_ids(layout, stored):
    """Such tokens are not there, also where they are all of a split."""
    case = make([4096], [64], layout=layout, stored=stored)
    case.block_tables[0, 64:128] = -1
    assert shares_keys(case) == ON_HOPPER
    tables = torch.cat([case.block_tables[:, :64], case.block_tables[:, 128:]], 1)
    without = replace(case, block_tables=tables.contiguous(), seq_lens=case.seq_lens - 64 * 16)
    torch.testing.assert_close(case.run(), without.run(), atol=2e-3, rtol=2e-2)


def test_same_bits_each_time(layout):
    """Whichever CTA ends first. Launches on two streams have workspaces of their own."""
    case = make([9000, 4000], [64, 64], layout=layout)
    want = case.run()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(case.run())
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in results)


def test_two_threads_on_one_stream(layout):
    """The launches of a call follow each other: those of other threads use the same workspace."""
    cases = [make([9000, 4000], [64, 64], layout=layout), make([5000], [48], layout=layout)]
    wanted = [case.run() for case in cases]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda case: [case.run() for _ in range(100)], cases))
    torch.cuda.synchronize()
    for of_thread, want in zip(results, wanted, strict=True):
        assert all(torch.equal(got, want) for got in of_thread)


def test_decode_afterwards(layout):
    """A launch leaves nothing that the next one reads."""
    prompt, step = make([9000], [64], layout=layout), make([9000, 5], [1, 1], layout=layout)
    for _ in range(3):
        check_shared(prompt)
        check(step)


@pytest.mark.parametrize("lens", [[9000, 4100], [600, 70], [64, 64]], ids=str)
def test_cuda_graph(layout, lens):
    """Captured for long sequences, replayed with other lengths: the device chooses the splits."""
    case = make([9000, 9000], [64, 64], layout=layout)
    lengths, out = case.seq_lens.clone(), case.unset_out()
    call = replace(case, seq_lens=lengths)
    other = torch.tensor(lens, dtype=torch.int32, device="cuda")

    def attend(case: Case, out: Tensor) -> Tensor:
        return vllm_kernels.paged_attention(
            *case.tensors(), **case.options, max_query_len=64, out=out
        )

    assert_graph_replays(
        lambda: attend(call, out),
        lambda: lengths.copy_(other),
        out,
        lambda: attend(replace(case, seq_lens=other), case.unset_out()),
    )
    check(replace(case, seq_lens=other))
