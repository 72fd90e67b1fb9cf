"""Prompts whose K and V a GPU first gathers to contiguous keys of 16 bits.

These are small pages from 1024 query rows a KV head on, and 8-bit caches from 128 to 6144 on. From
16384 on they are 16-bit rows of NHD and HND that begin within a sector of 32 bytes.

The CPU gathers nothing. It runs smaller cases, for the same options.
"""

from __future__ import annotations

import pytest
import torch
from paged_attention_cases import EIGHT_BITS, NAN, Case, assert_right, check, make_case, per_head

import vllm_kernels

BF16, F16 = torch.bfloat16, torch.float16
KV_HEADS, GROUP = 4, 8


def make(device: str, dtype: torch.dtype, lens: list[int], queries: list[int], **options) -> Case:
    """make_case() of 4 KV heads with 8 query heads each: 128 query tokens are 1024 rows."""
    if device == "cpu":
        lens, queries = ([n // 8 for n in numbers] for numbers in (lens, queries))
    kv_heads = KV_HEADS if device == "cuda" else 1
    shape = {"heads": GROUP * kv_heads, "kv_heads": kv_heads}
    return make_case(device, dtype, lens, queries, **{**shape, **options})


def explained(case: Case) -> str:
    return vllm_kernels.explain(
        vllm_kernels.paged_attention,
        *case.tensors(),
        **case.options,
        max_query_len=case.max_query_len,
    )


@pytest.fixture
def hopper(device: str) -> str:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of Hopper's kernel")
    return device


def skip_before_hopper() -> None:
    if "prefill sm80" in explained(make("cuda", BF16, [400, 300], [300, 290], head_size=128)):
        pytest.skip("built as before Hopper")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of CUDA kernels only")
def test_what_is_gathered(hopper):
    """The cases of this file are what they say they are."""
    skip_before_hopper()
    prompts = [400, 300], [300, 290]
    for options, gathered in (
        ({"stored": torch.int8}, True),
        ({"stored": torch.int8, "softcap": 2.0}, True),
        ({"block_size": 4}, True),
        ({"layout": "NHD", "head_size": 72}, False),
        ({"layout": "vllm", "head_size": 72}, False),
        ({}, False),
    ):
        text = explained(make(hopper, BF16, *prompts, **{"head_size": 128, **options}))
        assert ("are gathered" in text) == gathered, (options, text)
    many = make(hopper, BF16, [2100], [2100], head_size=72, layout="NHD")
    assert "are gathered" in explained(many)
    short = make(hopper, BF16, [400] * 9, [100] * 9, head_size=128, stored=torch.int8)
    assert "are gathered" not in explained(short)


@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
def test_eight_bits(hopper, layout, stored, head_size):
    shapes = {"stored": stored, "head_size": head_size, "layout": layout, "scales_per_head": True}
    check(make(hopper, BF16, [400, 131], [300, 131], **shapes))
    window = {"block_size": 64, "sliding_window": 90}
    check(make(hopper, F16, [517, 160], [290, 131], **window, **shapes))
    if head_size == 64:
        check(make(hopper, BF16, [1000, 131], [800, 131], **shapes))


@pytest.mark.parametrize("names", [["alibi_slopes"], ["softcap"], ["sinks"],
                                   ["alibi_slopes", "sliding_window", "softcap", "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_options_of_eight_bits(hopper, layout, names, stored):
    case = make(hopper, BF16, [400, 301], [290, 301], head_size=128, layout=layout, stored=stored)
    heads = case.query.shape[1]
    options = {
        "alibi_slopes": per_head(heads, 0.01, 0.4),
        "sliding_window": 50,
        "softcap": 2.0,
        "sinks": per_head(heads, -3.0, 4.0),
    }
    shapes = {"head_size": 128, "layout": layout, "stored": stored, "scales_per_head": True}
    chosen = {name: options[name] for name in names}
    check(make(hopper, BF16, [400, 301], [290, 301], **shapes, **chosen))


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_small_pages(hopper, layout, block_size):
    for dtype, head_size, window in ((BF16, 128, 0), (F16, 80, 61)):
        shapes = {"head_size": head_size, "block_size": block_size, "layout": layout}
        check(make(hopper, dtype, [400, 131], [300, 131], sliding_window=window, **shapes))


@pytest.mark.parametrize("head_size", [40, 72, 104, 248])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_rows_that_begin_within_a_sector(hopper, order, head_size):
    lens = [2300, 331]
    check(make(hopper, BF16, lens, [2100, 290], head_size=head_size, layout=order))


def test_without_causality(hopper, layout):
    options = {"head_size": 128, "layout": layout, "stored": torch.int8, "causal": False}
    check(make(hopper, BF16, [400, 131], [300, 131], window_right=-1, **options))
    check(make(hopper, F16, [400, 160], [290, 131], window_right=37, **options))


def test_mixed_batch(hopper, layout):
    """Only the prompts are gathered; a second launch has the sequences of few tokens."""
    lens = [400, 1, 33, 0, 900, 300, 17, 65, 64, 500]
    queries = [1, 1, 2, 0, 1, 290, 17, 65, 33, 4]
    shapes = {"head_size": 128, "layout": layout, "stored": torch.float8_e4m3fn}
    case = make(hopper, BF16, lens, queries, **shapes)
    check(case)
    assert torch.equal(case.run(), case.run())


def test_more_than_there_is_room_for(hopper):
    """A wide block table: the sequences that fit are gathered, the others are not."""
    if hopper == "cpu":
        pytest.skip("a CPU gathers nothing")
    lens, queries = [20_000, 400, 0, 3000, 15_000, 300], [130, 140, 0, 1, 128, 290]
    case = make(hopper, BF16, lens, queries, heads=128, kv_heads=16, head_size=128,
                stored=torch.float8_e4m3fn, layout="NHD")  # fmt: skip
    skip_before_hopper()
    assert "without that for other sequences" in explained(case)
    check(case)


def test_many_sequences(hopper):
    """More than the threads of the block that adds up the lengths."""
    if hopper == "cpu":
        pytest.skip("a CPU gathers nothing")
    queries = [140 if i % 100 == 7 else i % 5 for i in range(1300)]
    lens = [q + i % 90 for i, q in enumerate(queries)]
    check(make(hopper, BF16, lens, queries, head_size=64, stored=torch.int8, layout="HND"))


def test_pages_that_no_row_sees_are_not_used(hopper, layout):
    """NaN and bad ids before every window, and behind the context."""
    if hopper == "cpu":
        pytest.skip("a CPU gathers nothing")
    case = make(hopper, BF16, [600], [290], head_size=128, layout=layout, sliding_window=40,
                block_size=4)  # fmt: skip
    want = case.run()
    length, count = int(case.seq_lens[0]), case.query.shape[0]
    hidden = (length - count - 40) // 4
    gone = case.block_tables[0, :hidden].long()
    case.key_cache[gone] = NAN
    case.value_cache[gone] = NAN
    case.block_tables[0, :hidden:2] = -1
    case.block_tables[0, 1:hidden:2] = 2**30
    assert torch.equal(case.run(), want)


def test_replayed_graph(hopper):
    """Other lengths than those of the capture."""
    if hopper == "cpu":
        pytest.skip("a CPU has no graphs")
    case = make(hopper, BF16, [500, 20, 500], [290, 1, 200], head_size=128, stored=torch.int8)
    case.run()
    graph = torch.cuda.CUDAGraph()
    out = torch.full_like(case.query, NAN)
    with torch.cuda.graph(graph):
        vllm_kernels.paged_attention(
            *case.tensors(), **case.options, max_query_len=case.max_query_len, out=out
        )
    for lens in ([500, 20, 500], [291, 9, 431], [290, 0, 201]):
        case.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, case.run())
    assert_right(case, out)


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
def test_contiguous_keys(hopper, stored):
    """varlen_attention, with its keys as the pages of a reference that is paged_attention."""
    lens, queries = [400, 131, 256], [300, 131, 200]
    case = make(hopper, BF16, lens, queries, head_size=128, layout="NHD", stored=stored,
                block_size=1, scales_per_head=True)  # fmt: skip
    tables, seq_lens = case.block_tables.long(), case.seq_lens.tolist()
    slots = torch.cat([tables[i, :n] for i, n in enumerate(seq_lens)])
    keys, values = (c[slots, 0].contiguous() for c in (case.key_cache, case.value_cache))
    ends = [0]
    for n in seq_lens:
        ends.append(ends[-1] + n)
    options = dict(case.options)
    for name in ("layout", "causal", "sliding_window"):
        options.pop(name, None)
    got = vllm_kernels.varlen_attention(
        case.query, keys, values, options.pop("query_start_loc"),
        torch.tensor(ends, dtype=torch.int32, device=hopper),
        max_query_len=case.max_query_len, window=(-1, 0), **options,
    )  # fmt: skip
    assert_right(case, got)
