"""ContextParallel with all ranks in this process: the result of one rank."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from helpers import LAYOUTS
from paged_attention_cases import EIGHT_BITS, per_head
from shards import dealt_case

from vllm_kernels.distributed import ContextParallel
from vllm_kernels.errors import Error

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
        dealt = dealt_case(parallel, LENS, queries, device, stored=stored, scales_per_head=True)
        dealt.check(parallel.attend(dealt.case.query, *dealt.arguments(), **dealt.options))


POSITIONS = {"window": {"sliding_window": 50}, "alibi": {"alibi_slopes": per_head(8, 0.02, 0.2)}}


@pytest.mark.parametrize("queries", [None, CHUNKS], ids=["decode", "chunks"])
@pytest.mark.parametrize(("shards", "interleave"), [(1, 1), (2, 1), (4, 16), (8, 64)])
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


def test_one_token_with_its_key(device):
    """The cache may lack the new token, if the call has it."""
    parallel = ContextParallel(shards=4, interleave=1)
    dealt = dealt_case(parallel, LENS, [1] * len(LENS), device)
    del dealt.options["query_start_loc"], dealt.options["max_query_len"]
    dealt.check(parallel.attend(dealt.case.query, *dealt.arguments(), **dealt.options))


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
        ({}, "group: expected one of group and shards, got none"),
        ({"shards": 0}, "shards: expected at least 1, got 0"),
        ({"shards": 2, "interleave": 0}, "interleave: expected at least 1, got 0"),
    ],
)
def test_constructor(arguments, message):
    with pytest.raises(Error) as raised:
        ContextParallel(**arguments)
    assert str(raised.value) == f"ContextParallel: {message}"


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
