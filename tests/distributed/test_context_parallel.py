"""ContextParallel with all ranks in this process: the result of one rank."""

from __future__ import annotations

import doctest
from itertools import product
from typing import Any

import pytest
import torch
from helpers import LAYOUTS
from paged_attention_cases import EIGHT_BITS, per_head
from shards import dealt_case

from vllm_kernels import reference, reshape_and_cache_flash
from vllm_kernels.distributed import ContextParallel
from vllm_kernels.errors import Error
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

LENS = [1, 7, 40, 129, 300]
CHUNKS = [1, 5, 40, 3, 100]  # query tokens: decode, verify, a whole prompt, a chunk
SHARDS = [(1, 1), (2, 1), (3, 5), (4, 16), (8, 3), (8, 64)]


@pytest.mark.parametrize("queries", [None, CHUNKS], ids=["decode", "chunks"])
@pytest.mark.parametrize(("shards", "interleave"), SHARDS)
def test_shards_give_the_result_of_one_rank(device, dtype, shards, interleave, queries):
    parallel = ContextParallel(shards=shards, interleave=interleave)
    dealt = dealt_case(parallel, LENS, queries, device, dtype)
    dealt.check(parallel.attend(dealt.case.query, *dealt.arguments(), **dealt.options))


@pytest.mark.parametrize("queries", [None, CHUNKS], ids=["decode", "chunks"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_options(device, layout, queries):
    parallel = ContextParallel(shards=3, interleave=2)
    dealt = dealt_case(
        parallel, LENS, queries, device, layout=layout, sinks=torch.randn(8), softcap=2.0,
        scale=0.3,
    )  # fmt: skip
    dealt.check(parallel.attend(dealt.case.query, *dealt.arguments(), **dealt.options))


@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_8_bit_caches(device, stored):
    parallel = ContextParallel(shards=4, interleave=1)
    for queries in (None, CHUNKS):
        for window in (0, 50):
            dealt = dealt_case(
                parallel, LENS, queries, device, stored=stored, scales_per_head=True,
                sliding_window=window,
            )  # fmt: skip
            lens = dealt.case.seq_lens if window else None
            options = dealt.options | {"seq_lens": lens}
            dealt.check(parallel.attend(dealt.case.query, *dealt.arguments(), **options))


POSITIONS = {"window": {"sliding_window": 50}, "alibi": {"alibi_slopes": per_head(8, 0.02, 0.2)}}


@pytest.mark.parametrize("queries", [None, CHUNKS], ids=["decode", "chunks"])
@pytest.mark.parametrize(("shards", "interleave"), [(1, 1), (2, 1), (3, 4), (4, 16), (8, 64)])
@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
def test_positions(device, dtype, shards, interleave, queries, options):
    """Windows and ALiBi, with the new tokens as key and value."""
    parallel = ContextParallel(shards=shards, interleave=interleave)
    dealt = dealt_case(parallel, LENS, queries, device, dtype, **options)
    lens = dealt.case.seq_lens
    got = parallel.attend(dealt.case.query, *dealt.arguments(), seq_lens=lens, **dealt.options)
    dealt.check(got)


@pytest.mark.parametrize("options", [{}, *POSITIONS.values()], ids=["plain", *POSITIONS])
def test_stored_query_tokens(device, dtype, options):
    """Several query tokens per sequence that the shards have stored."""
    parallel = ContextParallel(shards=3, interleave=4)
    dealt = dealt_case(parallel, LENS, CHUNKS, device, dtype, all_stored=True, **options)
    lens = dealt.case.seq_lens
    got = parallel.attend(dealt.case.query, *dealt.arguments(), seq_lens=lens, **dealt.options)
    dealt.check(got)


@pytest.mark.parametrize("options", [{}, *POSITIONS.values()], ids=["plain", *POSITIONS])
def test_one_token_with_its_key(device, options):
    """The cache may lack the new token, if the call has it."""
    parallel = ContextParallel(shards=4, interleave=1)
    dealt = dealt_case(parallel, LENS, [1] * len(LENS), device, **options)
    del dealt.options["query_start_loc"], dealt.options["max_query_len"]
    lens = dealt.case.seq_lens if options else None
    got = parallel.attend(dealt.case.query, *dealt.arguments(), seq_lens=lens, **dealt.options)
    dealt.check(got)


@pytest.mark.parametrize("interleave", [1, 8])
def test_managers_of_the_ranks(device, interleave):
    """KVCacheManager fills the tables, slots and lengths of its rank."""
    shards, blocks, size = 3, 9, 16
    parallel = ContextParallel(shards=shards, interleave=interleave)
    ranks = [
        KVCacheManager(blocks, size, shards=shards, shard=rank, interleave=interleave)
        for rank in range(shards)
    ]
    for manager, sequence in product(ranks, (0, 1)):
        manager.allocate(sequence, 0)
    buffers = [BatchBuffers.zeros(2, 4, 102) for _ in ranks]
    rows = [torch.randn(3, length, 4, 64, device=device) for length in (150, 51)]
    caches = torch.full((2, shards, blocks, size, 4, 64), torch.nan, device=device)
    one, done = torch.ones(1, device=device), [0, 0]
    for counts in ([90, 7], [59, 43], [1, 1]):
        new = [of[:, at : at + count] for of, at, count in zip(rows, done, counts)]
        query, key, value = torch.cat(new, 1)
        before = [[manager.num_local_tokens(0), manager.num_local_tokens(1)] for manager in ranks]
        for manager, mine, cache in zip(ranks, buffers, zip(*caches)):
            manager.step([0, 1], counts, mine)
            slots = mine.slot_mapping[: sum(counts)].to(device)
            reshape_and_cache_flash(key, value, *cache, slots, "auto", one, one)
        done = [at + count for at, count in zip(done, counts)]
        ends = torch.tensor([0, *done], dtype=torch.int32, device=device)
        starts = buffers[0].query_start_loc.to(device)
        tables, local = (
            torch.stack([getattr(mine, name) for mine in buffers]).to(device)
            for name in ("block_tables", "seq_lens")
        )
        options = {"query_start_loc": starts, "layout": "NHD"}
        stored = parallel.attend(
            query, *caches, tables, local, seq_lens=ends[1:], sliding_window=30, **options
        )
        keyed = parallel.attend(
            query, *caches, tables, torch.tensor(before).int().to(device), key=key, value=value,
            **options,
        )  # fmt: skip
        keys, values = torch.cat([of[1:, :end] for of, end in zip(rows, done)], 1)
        for got, window in ((stored, 29), (keyed, -1)):
            want, _ = reference.varlen_attention(
                query, keys, values, starts, ends.cumsum(0), window=(window, -1)
            )
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_later_tokens_are_invisible(device):
    """A NaN in a later query token's key leaves earlier results as they are."""
    parallel = ContextParallel(shards=2)
    dealt = dealt_case(parallel, [40], [8], device)
    expected = parallel.attend(dealt.case.query, *dealt.arguments(), **dealt.options)
    dealt.options["key"][5:] = torch.nan
    got = parallel.attend(dealt.case.query, *dealt.arguments(), **dealt.options)
    assert torch.equal(got[:5], expected[:5])
    assert got[5:].isnan().all()


def test_no_tokens(device):
    parallel = ContextParallel(shards=2)
    dealt = dealt_case(parallel, [40], device=device)
    none = parallel.attend(dealt.case.query[:0], *dealt.arguments(), layout="NHD")
    assert none.shape == (0, 8, 64)


@pytest.mark.parametrize(("shards", "interleave"), [(1, 1), (3, 1), (2, 16), (4, 5)])
def test_tokens_are_dealt(device, shards, interleave):
    """Each token has one rank, its slots are consecutive there, and the lengths count them."""
    parallel = ContextParallel(shards=shards, interleave=interleave)
    block_size, blocks = 8, 20
    tables = torch.randperm(shards * blocks).view(shards, 1, blocks).int().to(device)
    period = shards * interleave
    for length in (0, 1, interleave, period + 1, 3 * period - 1, 100):
        starts = torch.tensor([0, length], dtype=torch.int32, device=device)
        positions = torch.arange(length, device=device)
        slots = parallel.slots(positions, tables, block_size=block_size, query_start_loc=starts)
        lens = parallel.local_lens(starts[1:])
        assert lens.dtype == torch.int32
        assert slots.dtype == torch.int64
        for rank in range(shards):
            mine = [i for i in range(length) if i // interleave % shards == rank]
            assert lens[rank, 0] == len(mine)
            expected = [-1] * length
            for local, token in enumerate(mine):
                block = int(tables[rank, 0, local // block_size])
                expected[token] = block * block_size + local % block_size
            assert slots[rank].tolist() == expected


def test_slots_of_a_decode_step(device):
    parallel = ContextParallel(shards=2, interleave=2)
    tables = torch.tensor([[[4, 1], [0, 2]], [[3, 5], [1, 0]]], dtype=torch.int32, device=device)
    slots = parallel.slots(torch.tensor([9, 6], device=device), tables, block_size=4)
    assert slots.tolist() == [[5, -1], [-1, 6]]


def test_slots_of_padding(device):
    """Tokens behind the last sequence, and those of a negative position."""
    parallel = ContextParallel(shards=2)
    tables = torch.tensor([[[4]], [[3]]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([0, -1, 1, 2], device=device)
    slots = parallel.slots(positions, tables, block_size=4, query_start_loc=starts)
    assert slots.tolist() == [[16, -1, -1, -1], [-1, -1, -1, -1]]


def test_a_table_that_is_too_short(device):
    parallel = ContextParallel(shards=2)
    tables = torch.zeros(2, 1, 1, dtype=torch.int32, device=device)
    positions = torch.tensor([8], device=device)
    if device == "cuda":
        assert parallel.slots(positions, tables, block_size=4).tolist() == [[-1], [-1]]
        return
    with pytest.raises(IndexError) as raised:
        parallel.slots(positions, tables, block_size=4)
    assert str(raised.value) == (
        "ContextParallel.slots: block_tables: expected a block for local token 4 of rank 0, got 1 "
        "blocks of 4"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            "group: expected one of group and shards, got none; dist.group.WORLD is None before "
            "init_process_group",
        ),
        (
            {"group": 2},
            "group: expected a ProcessGroup, got 2; for shards in one process give shards=N",
        ),
        ({"shards": 0}, "shards: expected at least 1, got 0"),
        ({"shards": 2, "interleave": 0}, "interleave: expected at least 1, got 0"),
    ],
)
def test_constructor(arguments, message):
    with pytest.raises(Error) as raised:
        ContextParallel(**arguments)
    assert str(raised.value) == f"ContextParallel: {message}"


def test_lengths_are_integers():
    message = r"local_lens: seq_lens: expected integers, got torch\.float32"
    with pytest.raises(TypeError, match=message):
        ContextParallel(shards=2).local_lens(torch.tensor([40.0]))


def test_examples() -> None:
    tests = doctest.DocTestFinder().find(ContextParallel, globs={"torch": torch})
    assert sum(bool(test.examples) for test in tests) == 3
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"alibi_slopes": torch.ones(8)},
            ".attend: seq_lens: expected lengths of all ranks' tokens with alibi_slopes, got none",
        ),
        (
            {"sliding_window": 8},
            ".attend: seq_lens: expected lengths of all ranks' tokens with sliding_window, got "
            "none",
        ),
        ({"exchange": "ring"}, ".attend: exchange: expected all_to_all or gather, got 'ring'"),
        ({"value": None}, ".attend: key: expected key and value, got one of them"),
        (
            {"key": None, "value": None},
            ".attend: key: expected the new tokens' keys and values, or seq_lens, with "
            "query_start_loc, got none",
        ),
        (
            {"key": torch.ones(8, 2, 64).half()},
            ".attend: key: expected torch.float32 (from query), got torch.float16",
        ),
        ({"key_cache": []}, ": expected tensors of 2 shards, got 0"),
    ],
)
def test_bad_calls(change: dict[str, Any], message: str) -> None:
    parallel = ContextParallel(shards=2)
    dealt = dealt_case(parallel, [40], [8])
    names = ("key_cache", "value_cache", "block_tables", "local_lens")
    arguments = dict(zip(names, dealt.arguments())) | dealt.options | change
    with pytest.raises(Error) as raised:
        parallel.attend(dealt.case.query, **arguments)
    assert str(raised.value) == f"ContextParallel{message}"


def test_queries_in_8_bits_are_refused() -> None:
    parallel = ContextParallel(shards=2)
    dealt = dealt_case(parallel, [40], stored=torch.float8_e4m3fn)
    with pytest.raises(Error) as raised:
        parallel.attend(
            dealt.case.query.to(torch.float8_e4m3fn), *dealt.arguments(), **dealt.options
        )
    expected = "query: expected float32, float16 or bfloat16, got float8_e4m3fn"
    assert str(raised.value) == f"ContextParallel.attend: {expected}"


def test_positions_need_a_power_of_two() -> None:
    parallel = ContextParallel(shards=2, interleave=3)
    dealt = dealt_case(parallel, [40])
    with pytest.raises(Error) as raised:
        parallel.attend(
            dealt.case.query, *dealt.arguments(), seq_lens=dealt.case.seq_lens, layout="NHD"
        )
    assert str(raised.value) == "paged_attention: interleave: expected a power of two, got 3"
