"""paged_attention with a block table for each KV head, against the float64 reference of each head.

The pages of a case belong to one KV head of one sequence, so no two heads read the same block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, ints, needs_cuda_library, raises
from paged_attention_cases import (
    EIGHT_BITS,
    Case,
    assert_right,
    make_case,
    with_token_scales,
    with_token_zeros,
)

import vllm_kernels

LENS = [300, 0, 1, 16, 17, 80]
ATTEND = vllm_kernels.paged_attention


def head_tables(
    device: str, dtype: torch.dtype, lens: list[int] = LENS, *, kv_heads: int = 2,
    change: Callable[[Case], Case] = lambda case: case, **sizes: object,
) -> Case:  # fmt: skip
    of_heads = [length for length in lens for _ in range(kv_heads)]
    case = change(make_case(device, dtype, of_heads, kv_heads=kv_heads, **sizes))
    return replace(
        case,
        query=case.query[: len(lens)].contiguous(),
        block_tables=case.block_tables.unflatten(0, (len(lens), kv_heads)),
        seq_lens=ints(lens, device),
    )


def of_head(case: Case, head: int) -> tuple[Case, slice]:
    """The case of one KV head, with a table for each sequence, and its query heads."""
    group = case.query.shape[1] // case.block_tables.shape[1]
    mine = slice(head * group, (head + 1) * group)
    dim = 2 if case.options["layout"] == "NHD" else 1
    options = {
        name: x[:, head : head + 1] if "_token_" in name else x for name, x in case.options.items()
    }
    lens = case.seq_lens if case.seq_lens.dim() == 1 else case.seq_lens[:, head].contiguous()
    one = replace(
        case,
        query=case.query[:, mine].contiguous(),
        key_cache=case.key_cache.narrow(dim, head, 1),
        value_cache=case.value_cache.narrow(dim, head, 1),
        block_tables=case.block_tables[:, head].contiguous(),
        seq_lens=lens,
        options=options,
    )
    return one, mine


def check(case: Case) -> None:
    """A given out and a new one, without lse and with it."""
    written, (out, lse) = case.run(), case.run_with_lse()
    new = ATTEND(*case.tensors(), **case.options)
    assert torch.equal(new, written)
    for head in range(case.block_tables.shape[1]):
        one, mine = of_head(case, head)
        assert_right(one, written[:, mine], (out[:, mine], lse[:, mine]))


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_layouts(device, dtype, layout, block_size):
    check(head_tables(device, dtype, block_size=block_size, layout=layout))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 1), (48, 2), (12, 3)])
def test_heads(device, layout, heads, kv_heads):
    case = head_tables(device, torch.bfloat16, heads=heads, kv_heads=kv_heads, layout=layout)
    check(case)


def test_one_kv_head(device, layout):
    """The stride of a dimension of size 1 means nothing."""
    case = head_tables(device, torch.float32, kv_heads=1, layout=layout)
    strides = list(case.key_cache.stride())
    strides[2 if layout == "NHD" else 1] = 24
    odd = replace(case, key_cache=case.key_cache.as_strided(case.key_cache.shape, strides))
    assert torch.equal(odd.run(), case.run())
    check(case)


def test_one_sequence_of_one_block(device, layout):
    case = make_case(device, torch.float32, [9], layout=layout, spare_blocks=0)
    case.block_tables = case.block_tables[:, None].expand(-1, 2, -1)
    want = case.run()
    odd = [x.as_strided(x.shape, (24, *x.stride()[1:])) for x in (case.key_cache, case.value_cache)]
    assert torch.equal(replace(case, key_cache=odd[0], value_cache=odd[1]).run(), want)
    check(case)


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
def test_eight_bits(device, dtype, layout, stored):
    check(head_tables(device, dtype, stored=stored, layout=layout))


@pytest.mark.parametrize("layout", ["vllm", "HND"])
@pytest.mark.parametrize("bits", [8, 4])
def test_scales_of_tokens(device, layout, bits):
    def change(case: Case) -> Case:
        case = with_token_scales(case)
        return case if bits == 8 else with_token_zeros(case)

    sizes = {"stored": torch.int8, "layout": layout, "change": change}
    check(head_tables(device, torch.bfloat16, **sizes))


def test_options(device, layout):
    case = head_tables(device, torch.float16, layout=layout, scale=0.3, softcap=2.0)
    check(case)
    split = case.with_options(fixed_split_size=64).run()
    for head in range(case.block_tables.shape[1]):
        one, mine = of_head(case, head)
        assert_right(one, split[:, mine])


def test_a_length_for_each_head(device, layout):
    case = head_tables(device, torch.float32, layout=layout)
    lens = case.seq_lens[:, None].repeat(1, 2)
    lens[0, 1], lens[5, 0] = 33, 0
    check(replace(case, seq_lens=lens))


def test_equal_tables_give_the_result_of_one_table(device, dtype, layout):
    one = make_case(device, dtype, LENS, layout=layout)
    each = replace(one, block_tables=one.block_tables[:, None].expand(-1, 2, -1))
    for got, want in zip(each.run_with_lse(), one.run_with_lse()):
        if device == "cpu":
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want)


def test_strides(device, layout):
    """Blocks with gaps, K and V in one tensor, and tables and queries that are slices."""
    case = head_tables(device, torch.float32, layout=layout)
    want = case.run()
    blocks, numel = len(case.key_cache), case.key_cache[0].numel()
    packed = torch.full((blocks, 2, numel + 16), float("nan"), device=device)[:, :, :numel]
    packed[:, 0], packed[:, 1] = case.key_cache.flatten(1), case.value_cache.flatten(1)
    wide = torch.zeros(len(LENS), 12, 64, device=device)
    wide[:, :8] = case.query
    sliced = replace(
        case,
        query=wide[:, :8],
        key_cache=packed[:, 0].unflatten(1, case.key_cache.shape[1:]),
        value_cache=packed[:, 1].unflatten(1, case.value_cache.shape[1:]),
        block_tables=case.block_tables.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    )
    assert sliced.key_cache.stride(0) % 16 == 0 and not sliced.key_cache.is_contiguous()
    assert torch.equal(ATTEND(*sliced.tensors(), **sliced.options), want)
    if layout == "NHD":  # in memory it is HND
        key, value = (
            x.transpose(1, 2).contiguous().transpose(1, 2)
            for x in (case.key_cache, case.value_cache)
        )
        assert torch.equal(replace(case, key_cache=key, value_cache=value).run(), want)


def test_selected_pages(device, layout):
    """select_pages' tables as they are. A budget for all tokens gives dense attention."""
    case = make_case(device, torch.float32, LENS, layout=layout)
    bounds = torch.zeros(len(case.key_cache), 2, 2, 64, device=device)
    slots = [case.block_tables[i, t // 16].item() * 16 + t % 16
             for i, n in enumerate(LENS) for t in range(n)]  # fmt: skip
    slots = torch.tensor(slots, device=device)
    vllm_kernels.page_bounds_update(bounds, case.key_cache, slots, layout=layout)
    select = vllm_kernels.select_pages
    tensors = case.query, bounds, case.block_tables, case.seq_lens
    for budget in (96, 10**9):
        tables, lens = select(*tensors, budget, block_size=16, per_kv_head=True)
        kept = replace(case, block_tables=tables, seq_lens=lens)
        check(kept)
    torch.testing.assert_close(kept.run(), case.run())
    tables, _ = select(*tensors, 96, block_size=16, per_kv_head=True)
    assert not torch.equal(tables[0, 0], tables[0, 1])


@pytest.mark.parametrize("bad", [-1, 60, 2**30, 2**31 - 1, -(2**31)])
def test_bad_ids(device, layout, bad):
    """With 4 KV heads in a block, 2^30 blocks further is the same page in 32 bits."""
    lens = [80, 70, 64]
    case = head_tables(device, torch.float32, lens, kv_heads=4, layout=layout, spare_blocks=0)
    assert len(case.key_cache) == 56 and case.block_tables.shape[2] == 7
    want = case.run()
    case.block_tables[2, 3, 4:] = bad  # past the sequence's end
    assert torch.equal(case.run(), want)
    case.block_tables[1, 2, 3] = bad
    if device == "cpu":
        with raises(
            rf"^paged_attention: block_tables\[1, 2, 3\] = {bad}: expected a block in \[0, 56\)$"
        ):
            case.run()
        return
    got = case.run()
    mine = slice(4, 6)
    rest = case.block_tables[1:2, 2, [0, 1, 2, 4]].contiguous()
    one, _ = of_head(case, 2)
    one = replace(one, query=one.query[1:2], block_tables=rest, seq_lens=ints([54], device))
    torch.testing.assert_close(got[1:2, mine], one.run())  # as if the page were masked
    got[1, mine] = want[1, mine]
    assert torch.equal(got, want)


def test_bad_lengths(device, layout):
    case = head_tables(device, torch.float32, layout=layout)
    good, text = case.run(), "expected a length that fits block_tables in"
    for place, bad in (((3,), -1), ((3, 1), 10**6)):
        lens = case.seq_lens if len(place) == 1 else case.seq_lens[:, None].repeat(1, 2)
        wrong = replace(case, seq_lens=lens.clone())
        wrong.seq_lens[place] = bad
        if device == "cpu":
            with raises(rf"^paged_attention: seq_lens\[{str(list(place))[1:-1]}\] = {bad}: {text}"):
                wrong.run()
        else:
            got = wrong.run()
            assert torch.equal(got[:3], good[:3]) and torch.equal(got[4:], good[4:])


def test_nothing_to_do(device):
    case = head_tables(device, torch.float32, [0, 0])
    out, lse = case.run_with_lse()
    assert (out == 0).all() and (lse == -torch.inf).all()
    empty = replace(
        case, query=case.query[:0], block_tables=case.block_tables[:0], seq_lens=case.seq_lens[:0]
    )
    assert empty.run_with_lse()[0].shape == (0, 8, 64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(device, layout, dynamic):
    case = head_tables(device, torch.float32, layout=layout)

    def call(*tensors):
        return ATTEND(*tensors, layout=layout, return_lse=True)

    assert_compiles(call, *case.tensors())
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for got, want in zip(compiled(*case.tensors()), call(*case.tensors())):
        assert torch.equal(got, want)


@needs_cuda_library
def test_cuda_graph(layout):
    case = head_tables("cuda", torch.bfloat16, layout=layout)
    out = torch.empty_like(case.query)

    def call():
        return ATTEND(*case.tensors(), out=out, layout=layout)

    def refill():
        case.query.normal_()
        case.block_tables.copy_(case.block_tables.flip(1))
        case.seq_lens.copy_(case.seq_lens.clamp_max(70))

    assert_graph_replays(call, refill, out, lambda: call().clone())


def test_refused(device):
    case = head_tables(device, torch.float32, layout="HND")
    query, key, value, tables, lens = case.tensors()
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
    given = dict(zip(names, case.tensors())) | case.options
    floats, each = torch.ones(8, device=device), "with a block table for each KV head"
    apart = replace(case, value_cache=value.transpose(1, 2).contiguous().transpose(1, 2))
    outside = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value)]
    meta = torch.empty(2**28, 8, 2, 32, device="meta")
    huge = {
        "query": meta[0, :, 0].clone()[None], "key_cache": meta, "value_cache": meta,
        "block_tables": torch.empty(1, 8, 4, dtype=torch.int32, device="meta"),
        "seq_lens": torch.empty(1, dtype=torch.int32, device="meta"),
    }  # fmt: skip
    for changed, message in (
        ({"query_start_loc": lens}, f"query_start_loc: expected None {each}$"),
        ({"alibi_slopes": floats}, f"alibi_slopes: expected None {each}$"),
        ({"sinks": floats}, f"sinks: expected None {each}$"),
        ({"sliding_window": 9}, f"sliding_window: expected 0 {each}$"),
        ({"tree_mask": lens}, f"tree_mask: expected None {each}$"),
        ({"total_seq_lens": lens}, f"total_seq_lens: expected None {each}$"),
        ({"kv_indptr": lens}, "kv_indptr: expected no block_tables and seq_lens, got some$"),
        ({"k_scale": floats[:2]}, rf"k_scale: expected one element {each}, got \[2\]$"),
        ({"shards": 2}, "shards: expected 1 without total_seq_lens, got 2$"),
        ({"query": query[0]}, r"query: expected shape \[num_tokens, num_heads, head_size\], got"),
        ({"query": query[:, :7]}, "query: expected num_heads to be a multiple of num_kv_heads = 2"),
        ({"query": query.half()}, "key_cache: expected float16"),
        ({"key_cache": key[0]}, r"key_cache: expected shape \[num_blocks, num_kv_heads, block_s"),
        ({"value_cache": value[1:]}, "value_cache: expected num_blocks = 59"),
        ({"layout": "NHD"}, "query: expected num_heads to be a multiple of num_kv_heads = 16"),
        ({"layout": "x"}, 'layout: expected "vllm", "NHD" or "HND", got "x"$'),
        ({"block_tables": tables[:, :1]}, r"block_tables: expected shape \[6, 2, max_blocks_per_s"),
        ({"block_tables": tables.long()}, "block_tables: expected int32, got int64"),
        ({"seq_lens": lens[:5]}, r"seq_lens: expected shape \[6\] or \[6, 2\] \(from"),
        ({"seq_lens": lens.long()}, "seq_lens: expected int32, got int64"),
        ({"seq_lens": None}, "seq_lens: expected a tensor, got None$"),
        ({"out": query[:5]}, rf"out: expected shape \[6, 8, 64\], contiguous, {each}, got shape"),
        ({"out": query}, "(out and query|query and out) overlap in memory$"),
        ({"value_cache": apart.value_cache}, r"value_cache: expected blocks and KV heads \(2, 1\)"),
        (dict(zip(names[1:3], outside)), r"key_cache: expected less than 2\^31 pages of one KV"),
        (huge, r"key_cache: expected less than 2\^31 pages of one KV head, those of a block next"),
    ):  # fmt: skip
        with raises(rf"^paged_attention: {message}"):
            ATTEND(**(given | changed))
    scaled = make_case(device, torch.float32, LENS, stored=torch.int8, layout="NHD")
    scaled = with_token_scales(scaled)
    scaled.block_tables = scaled.block_tables[:, None].expand(-1, 2, -1)
    with raises(
        r"^paged_attention: k_token_scales: expected blocks and KV heads \(32, 1\) pages apart "
        rf'{each}, as key_cache has them, got \(2, 1\); layouts "HND" and "vllm"'
    ):
        scaled.run()
