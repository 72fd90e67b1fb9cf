"""paged_attention of prompts and chunks of them, where a GPU has a kernel for many query rows.

That one takes more than 64 query rows a KV head, in pages of 16 tokens or more, where tiles of 128
rows keep half of the device busy: the cases are about as small as that allows. The CPU, which has
no such kernel, runs them with fewer tokens and heads. The cases of test_gathered_keys.py are those
whose K and V are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import LAYOUTS
from paged_attention_cases import (
    EIGHT_BITS,
    NAN,
    Case,
    assert_right,
    check,
    make_case,
    per_head,
    with_token_scales,
)

import vllm_kernels
from vllm_kernels.reference.attention import token_rows

BF16, F16 = torch.bfloat16, torch.float16


def make(device: str, dtype: torch.dtype, lens: list[int], queries: list[int], **options) -> Case:
    """make_case() of 24 KV heads, so that 3 tiles of 128 rows are enough; or less on the CPU."""
    if device == "cpu":
        lens, queries = ([n // 8 for n in numbers] for numbers in (lens, queries))
        options |= {"heads": options.get("heads", 24) // options.get("kv_heads", 24), "kv_heads": 1}
    return make_case(device, dtype, lens, queries, **{"heads": 24, "kv_heads": 24, **options})


@pytest.fixture
def cuda(device: str) -> str:
    if device != "cuda":
        pytest.skip("of CUDA kernels only")
    return device


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Which of the CUDA kernels of paged_attention ran."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        call()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    kinds = ("prefill", "prefill_sm80", "decode", "decode_wgmma", "simt")
    return [kind for kind in kinds if f"paged_attention_{kind}_kernel" in names]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of CUDA kernels only")
def test_which_kernel_runs(cuda):
    """The cases of this file are what they say they are."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernel")
    prompts = [300, 130], [300, 77]
    if "prefill_sm80" in kernels_of(make(cuda, BF16, *prompts, head_size=128).run):
        pytest.skip("built as before Hopper")
    for options in ({}, {"stored": torch.float8_e4m3fn}, {"causal": False}, {"softcap": 2.0}):
        ran = kernels_of(make(cuda, BF16, *prompts, head_size=128, **options).run)
        assert ran[0] == "prefill" and "simt" not in ran  # a launch beside it may find no decodes
    groups = {"heads": 32, "kv_heads": 8, "head_size": 128}
    ran = kernels_of(make(cuda, BF16, [9000, 400], [1, 290], **groups).run)
    assert ran[0] == "prefill" and len(ran) == 2
    assert "prefill" not in kernels_of(make(cuda, BF16, [9000, 400], [1, 1], **groups).run)


@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256, 32, 40, 72, 80, 104, 136, 160, 248])
def test_prompts(device, layout, head_size):
    """No prefix and some, one tile of rows and several, ends inside of pages and of tiles.

    The first five sizes have a kernel, which pads the others.
    """
    if device == "cpu" and head_size != 128:
        pytest.skip("the CPU's kernel is the one that other tests have")
    dtype = F16 if head_size in (96, 256) else BF16
    check(make(device, dtype, [300, 130], [300, 77], head_size=head_size, layout=layout))


@pytest.mark.parametrize("heads, kv_heads", [(24, 8), (20, 4), (16, 2), (71, 1)])
def test_groups(cuda, heads, kv_heads):
    """Tiles that begin inside of a query token's heads, and tiles that do not."""
    shapes = {"heads": heads, "kv_heads": kv_heads, "head_size": 64}
    tokens = 128 * 70 // heads + 5
    check(make(cuda, BF16, [tokens + 100], [tokens], layout="vllm", **shapes))


@pytest.mark.parametrize("names", [["alibi_slopes"], ["sliding_window"], ["softcap"], ["sinks"],
                                   ["alibi_slopes", "sliding_window", "softcap", "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
def test_options(cuda, layout, names):
    options = {
        "alibi_slopes": per_head(24, 0.01, 0.4),
        "sliding_window": 50,
        "softcap": 2.0,
        "sinks": per_head(24, -3.0, 4.0),
    }
    chosen = {name: options[name] for name in names}
    drawn = len(names) + LAYOUTS.index(layout) + sum(map(ord, names[0]))  # along with them
    shapes = {"head_size": [64, 128, 192, 256, 96][drawn % 5], "layout": layout}
    check(make(cuda, [BF16, F16][drawn % 2], [200, 301], [90, 301], **shapes, **chosen))


@pytest.mark.parametrize("window, head_size", [(1, 64), (16, 128), (127, 192), (128, 256),
                                               (300, 128)])  # fmt: skip
def test_windows(cuda, window, head_size):
    for dtype, layout in ((F16, "vllm"), (BF16, "NHD")):
        shapes = {"head_size": head_size, "layout": layout}
        check(make(cuda, dtype, [500, 131], [290, 131], sliding_window=window, **shapes))


@pytest.mark.parametrize("head_size, right", [(64, -1), (128, 0), (128, 37), (192, 200), (256, -1)])
def test_tokens_after_the_query(device, layout, head_size, right):
    """Without causality: all of them, some, with a window before the query, more than there are."""
    options = {"head_size": head_size, "layout": layout, "causal": False, "window_right": right}
    check(make(device, BF16, [300, 130], [300, 77], **options))
    check(make(device, F16, [300, 130], [290, 130], sliding_window=64, softcap=3.0, **options))


@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 48, 80, 112, 176])
@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
def test_eight_bits(cuda, layout, stored, head_size):
    shapes = {"stored": stored, "head_size": head_size, "layout": layout, "scales_per_head": True}
    check(make(cuda, BF16, [300, 130], [300, 77], **shapes))
    check(make(cuda, F16, [500, 131], [290, 131], block_size=32, sliding_window=90, **shapes))


@pytest.mark.parametrize("stored", [None, *EIGHT_BITS], ids=str)
@pytest.mark.parametrize("head_size", [144, 160, 192, 256])
def test_few_rows_of_heads_above_128(cuda, layout, stored, head_size):
    """From 17 rows on. 8-bit caches are read where they lie, or gathered: three sequences."""
    sizes = {"heads": 32, "kv_heads": 8, "head_size": head_size, "layout": layout, "stored": stored}
    lens, scaled = 2 * [300, 64, 17, 65, 190, 500, 16, 8], {"scales_per_head": stored is not None}
    for dtype in (BF16, F16):
        check(make_case(cuda, dtype, lens, 16 * [8], **scaled, **sizes))
    check(make_case(cuda, BF16, lens, 8 * [8, 5], sliding_window=90, **sizes))
    check(make_case(cuda, BF16, lens[:6], [40, 33, 17, 64, 32, 50], **sizes))
    check(make_case(cuda, F16, [300, 64, 4700], [100, 64, 90], sliding_window=200, **sizes))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of CUDA kernels only")
def test_kernel_of_few_rows_of_heads_above_128(cuda):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("of Hopper's kernel")
    for queries, kernels in (
        (16 * [8], ["prefill"]),
        (16 * [4], ["decode"]),
        (8 * [8, 3], ["prefill", "decode"]),
    ):
        case = make_case(cuda, BF16, [300] * 16, queries, heads=32, kv_heads=8, head_size=192)
        assert kernels_of(case.run) == kernels


@pytest.mark.parametrize("head_size", [160, 192])
def test_token_scales_of_heads_above_128(cuda, layout, head_size):
    """Fewer rows than are gathered: producers apply the scales."""
    case = make_case(
        cuda, BF16, 2 * [300, 64, 17, 65, 190, 500, 16, 8], 16 * [8], heads=32, kv_heads=8,
        head_size=head_size, stored=torch.int8, layout=layout,
    )  # fmt: skip
    check(with_token_scales(case))


@pytest.mark.parametrize("head_size, block_size, order, stored", [
    (112, 8, "NHD", None), (160, 4, "HND", None), (128, 8, "vllm", None), (256, 8, "vllm", None),
    (64, 1, "NHD", None), (128, 4, "HND", None), (256, 16, "vllm", torch.int8),
    (224, 16, "NHD", torch.float8_e4m3fn), (128, 8, "vllm", torch.float8_e5m2),
    (64, 1, "NHD", torch.float8_e4m3fn),
], ids=str)  # fmt: skip
def test_sizes_of_the_mma_kernel(cuda, head_size, block_size, order, stored):
    """What Hopper's own kernel leaves to the one that every architecture from sm_80 on has."""
    shapes = {"head_size": head_size, "block_size": block_size, "layout": order, "stored": stored}
    scaled = {"scales_per_head": stored is not None}
    lens, queries = [300, 130, 160], [100, 77, 120]  # fewer rows than are gathered
    check(make(cuda, BF16, lens, queries, **scaled, **shapes))
    check(make(cuda, F16, lens, queries, sliding_window=50, **shapes))


@pytest.mark.parametrize("order, stored", [
    ("vllm", None), ("NHD", None), ("vllm", torch.int8), ("HND", torch.float8_e4m3fn),
], ids=str)  # fmt: skip
def test_whole_blocks_of_the_mma_kernel(cuda, order, stored):
    """Items for every multiprocessor: 256 rows each, over one tile, two and more."""
    shapes = {"head_size": 112, "heads": 72, "kv_heads": 72, "layout": order, "stored": stored}
    shapes["block_size"] = 8 if stored is None or order != "vllm" else 16
    check(make(cuda, BF16, [300, 130, 40], [300, 77, 40], **shapes))
    check(make(cuda, F16, [500, 131, 64], [290, 131, 64], sliding_window=50, **shapes))


@pytest.mark.parametrize("head_size", [64, 112])
def test_a_scale_of_zero(device, layout, head_size):
    """Of keys that are all zero: every score is 0, and what is masked stays masked."""
    if device == "cpu":
        pytest.skip("a CPU refuses it")
    shapes = {"stored": torch.int8, "head_size": head_size, "layout": layout}
    case = make(device, BF16, [300, 130], [300, 77], scales_per_head=True, **shapes)
    case.options["k_scale"][::2] = 0
    check(case)


def test_options_of_eight_bits(cuda, layout):
    """Softcap and ALiBi over 8-bit caches: not of Hopper's own kernel."""
    options = {"softcap": 2.0, "alibi_slopes": per_head(24, 0.01, 0.4), "sliding_window": 60}
    check(make(cuda, BF16, [200, 301], [90, 301], layout=layout, stored=torch.int8, **options))


def test_mixed_batch(device, layout):
    """Decodes, verifications and chunks in one call: two launches, side by side."""
    lens = [400, 1, 33, 0, 900, 300, 17, 65, 64, 500]
    queries = [1, 1, 2, 0, 1, 290, 17, 65, 33, 4]
    case = make(device, BF16, lens, queries, heads=32, kv_heads=8, head_size=128, layout=layout)
    check(case)
    assert torch.equal(case.run(), case.run())


def test_side_by_side(cuda, layout):
    """Decodes so long that the prompt beside them gets few blocks, twice in a row."""
    shapes = {"heads": 32, "kv_heads": 8, "head_size": 128, "layout": layout}
    case = make(cuda, BF16, [9000, 300, 9001], [1, 300, 1], **shapes)
    other = case.with_options(scale=0.05)
    alone = []
    for each in (case, other):
        alone.append(each.run())
        torch.cuda.synchronize()
    assert_right(case, alone[0])
    for got, want in zip([c.run() for c in (case, other, case, other)], alone * 2, strict=True):
        assert torch.equal(got, want)


def test_reads_what_the_kernel_before_wrote(cuda):
    """The writer of the last tokens' pages, then 40 sequences of which some are decodes."""
    queries = [1 if i % 3 else 60 for i in range(40)]
    case = make(
        cuda, BF16, [q + 200 for q in queries], queries, heads=32, kv_heads=8, head_size=128
    )
    want = case.run()
    at = (case.seq_lens - 1).long()
    blocks, offsets = case.block_tables.long().gather(1, at[:, None] // 16)[:, 0], at % 16
    rows = [token_rows(c, "vllm")[blocks, offsets] for c in (case.key_cache, case.value_cache)]
    rows, one = [r.contiguous() for r in rows], torch.ones(1, device=cuda)
    for _ in range(3):
        case.key_cache[blocks, :, :, offsets] = 0
        case.value_cache[blocks, :, :, offsets] = 0
        vllm_kernels.reshape_and_cache(
            *rows, case.key_cache, case.value_cache, blocks * 16 + offsets, "auto", one, one
        )
        assert torch.equal(case.run(), want)


def test_any_strides_streams_and_workspaces(cuda, layout):
    """Slices of packed tensors, a workspace of the caller's, a stream beside: the same bits."""
    shapes = {"heads": 32, "kv_heads": 8, "head_size": 128, "layout": layout}
    case = make(cuda, BF16, [600, 130, 700], [290, 100, 1], **shapes)
    want = case.run()
    packed = torch.cat([case.query, case.query * 2], dim=1)[:, :32]
    key, value = (torch.stack([c, c], dim=1)[:, 0] for c in (case.key_cache, case.value_cache))
    sliced = replace(case, query=packed, key_cache=key, value_cache=value)
    assert torch.equal(sliced.run(), want)
    workspace = vllm_kernels.paged_attention_workspace(cuda)
    for options in ({"workspace": workspace}, {"kv_ready": True}):
        assert torch.equal(case.with_options(**options).run(), want)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = case.run()
    side.synchronize()
    assert torch.equal(got, want)


def test_many_sequences(device):
    """More than a warp's lanes; short ones and such that are longer than their context."""
    queries = [(i * 37) % 90 for i in range(40)]
    lens = [max(0, q - 3 + (i * 91) % 150) for i, q in enumerate(queries)]
    check(make(device, BF16, lens, queries, layout="NHD"))


@pytest.mark.parametrize("prefix", [4095, 65_500])
def test_long_prefixes(device, prefix):
    """Of one KV head, so that the float64 reference fits."""
    heads, new = (32, 280) if device == "cuda" else (1, 13)
    case = make_case(device, BF16, [prefix + new], [new], heads=heads, kv_heads=1, head_size=128)
    assert_right(case, case.run())


def test_long_prompt(device):
    heads, head_size = (4, 128) if device == "cuda" else (1, 32)
    shapes = {"heads": heads, "kv_heads": 1, "head_size": head_size, "layout": "NHD"}
    case = make_case(device, BF16, [4096], [4096], **shapes)
    assert_right(case, case.run())


@pytest.mark.parametrize("block_size", [32, 64, 128, 256])
@pytest.mark.parametrize("head_size", [64, 80, 128, 192, 256])
def test_longer_pages(cuda, layout, head_size, block_size):
    """In layout vllm a box of V has up to 64 tokens of a page, and rows of masked tokens in it."""
    shapes = {"head_size": head_size, "block_size": block_size, "layout": layout}
    check(make(cuda, BF16, [300, 130], [300, 77], **shapes))
    check(make(cuda, F16, [517, 131], [290, 131], sliding_window=77, **shapes))
    if head_size in (64, 192):  # tiles of 80 tokens
        check(make(cuda, BF16, [300, 131], [300, 77], softcap=2.0, sliding_window=50, **shapes))


def test_a_sequences_result_does_not_depend_on_the_batch(cuda, layout):
    lens, queries = [300, 700, 129], [290, 300, 129]
    case = make(cuda, BF16, lens, queries, layout=layout)
    whole = case.run()
    first = 0
    for seq, count in enumerate(queries):
        if count >= 290:
            alone = replace(
                case.with_options(
                    query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=cuda)
                ),
                query=case.query[first : first + count],
                block_tables=case.block_tables[seq : seq + 1],
                seq_lens=case.seq_lens[seq : seq + 1],
            )
            assert torch.equal(alone.run(), whole[first : first + count])
        first += count


def test_pages_that_no_row_sees_are_not_read(cuda, layout):
    """Behind the context, and before every window of a tile of rows."""
    case = make(cuda, BF16, [600], [290], layout=layout, sliding_window=40)
    want = case.run()
    gone = case.block_tables[0, : (600 - 290 - 40) // 16].long()
    case.key_cache[gone] = NAN
    case.value_cache[gone] = NAN
    case.block_tables[0, : (600 - 290 - 40) // 16] = -1
    assert torch.equal(case.run(), want)


def test_later_tokens_have_no_influence_on_earlier_tiles(cuda, layout):
    """A token that is NaN spoils the rows that see it and those of their tile, not those before."""
    case = make(cuda, BF16, [290], [290], layout=layout)
    want = case.run()
    page = case.block_tables[0, 200 // 16].long()
    case.value_cache[page] = NAN
    assert torch.equal(case.run()[:128], want[:128])


def test_bad_pages_are_contained(cuda, layout):
    """Tokens of a page that there is not are skipped, the other sequences are right."""
    case = make(cuda, BF16, [300, 310], [300, 290], layout=layout)
    want = case.run()
    table = case.block_tables[0, :19].long()
    rows = [
        token_rows(c, layout)[table].flatten(0, 1)[:300] for c in (case.key_cache, case.value_cache)
    ]
    keys, values = (r.double().transpose(0, 1) for r in rows)
    scores = case.query[:300].double().transpose(0, 1) @ keys.transpose(1, 2) * 64**-0.5
    token = torch.arange(300, device=cuda)
    scores.masked_fill_((token > token[:, None]) | (token // 16 == 2), -torch.inf)
    without = (scores.softmax(-1) @ values).transpose(0, 1)
    case.block_tables[0, 2] = 2**30
    got = case.run()
    assert torch.equal(got[300:], want[300:])
    assert (got[:300].double() - without).norm() < 3e-3 * without.norm()


def test_replayed_graph(cuda):
    """Other lengths than those of the capture; a batch that is padded with tokens of nobody."""
    case = make(cuda, BF16, [300, 20, 500], [290, 1, 200], heads=32, kv_heads=8, layout="vllm")
    case.run()
    graph = torch.cuda.CUDAGraph()
    out = torch.full_like(case.query, NAN)
    with torch.cuda.graph(graph):
        vllm_kernels.paged_attention(
            *case.tensors(), **case.options, max_query_len=case.max_query_len, out=out
        )
    for lens, starts in (([300, 20, 500], [0, 290, 291, 491]), ([200, 9, 131], [0, 70, 79, 210])):
        case.seq_lens.copy_(torch.tensor(lens))
        case.options["query_start_loc"].copy_(torch.tensor(starts))
        out.fill_(NAN)
        graph.replay()
        want = case.naive()[0][: starts[-1]]
        error = ((out[: starts[-1]].double() - want).norm() / want.norm()).item()
        assert error < 3e-3
