"""paged_attention and varlen_attention of e4m3 queries, against the float64 reference."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from fp8_query_cases import BF16, E4M3, check_varlen, e4m3_case, moved
from helpers import assert_compiles, ints, opcheck_float8, raises
from paged_attention_cases import NAN, Case, assert_right, check, per_head, query_scales
from torch import Tensor

import vllm_kernels

TAILS = [1, 127, 128, 129, 257]


@pytest.fixture(params=[torch.float16, BF16], ids=["f16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of out."""
    return request.param


def upcast(case: Case) -> Case:
    """The case with the query that the upcast makes."""
    query, scale = case.query.float(), case.options["q_scale"]
    if scale is not None:
        scales = scale.expand(case.kv_heads())
        query = query * scales.repeat_interleave(query.shape[1] // case.kv_heads())[:, None]
    return replace(case.with_options(q_scale=None), query=query.to(case.dtype), dtype=None)


# --- right results


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (16, 2)], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_decode(device, dtype, layout, heads, head_size):
    lens, sizes = [300, 0, 1, 16, 129], {"heads": heads[0], "kv_heads": heads[1]}
    sizes |= {"head_size": head_size, "layout": layout, "scales_per_head": True, "dtype": dtype}
    for q_scale in (None, query_scales(1), query_scales(2)):
        check(e4m3_case(device, lens, None, q_scale, **sizes))


@pytest.mark.parametrize("group, head_size", [(1, 64), (1, 256), (4, 80), (4, 128), (8, 64),
                                              (8, 256)])  # fmt: skip
def test_prompts(device, layout, group, head_size):
    kv_heads = 2 if group == 1 else 1
    sizes = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_size": head_size}
    case = e4m3_case(device, TAILS, TAILS, query_scales(kv_heads), **sizes, layout=layout)
    assert group == 1 or len(case.query) * group >= 1024
    check(case)


OPTIONS = [
    {"sliding_window": 70},
    {"causal": False},
    {"causal": False, "sliding_window": 90, "window_right": 20},
    {"sinks": per_head(8, -1, 1)},
    {"softcap": 20.0},
    {"alibi_slopes": per_head(8, 0.01, 0.4)},
    {"scale": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_options(device, layout, options):
    sizes = {"kv_heads": 2, "head_size": 128, "layout": layout, **options}
    case = e4m3_case(device, [40, 300], None, query_scales(2), **sizes)
    check(case)
    assert_right(case, case.with_options(fixed_split_size=256).run())
    check(e4m3_case(device, [200, 129], [200, 100], query_scales(2), **sizes))


def test_trees_shards_and_page_lists(device, layout):
    words = torch.randint(2**31, (13,), dtype=torch.int64)
    check(e4m3_case(device, [90, 20], [8, 5], query_scales(1), layout=layout, tree_mask=words))
    shard = {"shards": 3, "shard": 1, "interleave": 1, "layout": layout}
    totals = torch.tensor([270, 60], dtype=torch.int32)
    check(e4m3_case(device, [90, 20], [8, 5], query_scales(2), **shard, total_seq_lens=totals))
    case = e4m3_case(device, [90, 20], [8, 5], query_scales(2), layout=layout)
    ids = torch.cat([case.block_tables[0, :6], case.block_tables[1, :2]])
    pages = {"kv_indptr": ints([0, 6, 8], device), "last_page_len": ints([10, 4], device)}
    got = vllm_kernels.paged_attention(
        *case.tensors()[:3], **pages, kv_indices=ids, **case.options, max_query_len=8
    )
    assert_right(case, got)


def test_a_table_for_each_kv_head(device):
    case = e4m3_case(device, [90, 20], None, query_scales(1), layout="HND")
    tables = case.block_tables[:, None].expand(-1, 2, -1).contiguous()
    got, lse = replace(case, block_tables=tables).run_with_lse()
    assert_right(case, (got, lse))
    two = {"q_scale": torch.ones(2, device=device)}
    with raises(r"^paged_attention: q_scale: expected one element with a block table for each KV"):
        replace(case.with_options(**two), block_tables=tables).run()


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (70, 0)},
                                     {"causal": False, "window": (40, 20)}, {"softcap": 20.0},
                                     {"sinks": per_head(8, -1, 1)}],
                         ids=lambda options: "+".join(options) or "causal")  # fmt: skip
def test_varlen(device, dtype, options):
    options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
    for heads, head_size in ((8, 128), (1, 64), (2, 80)):
        sizes = {"kv_heads": heads, "head_size": head_size, "layout": "NHD", "dtype": dtype}
        keys = [300, 127, 128, 140]
        check_varlen(e4m3_case(device, keys, TAILS[:4], query_scales(heads), **sizes), **options)


def test_bits_of_the_upcast_query(device, layout, dtype):
    """Scales of any bits: the product is rounded once."""
    for lens, queries in (([90, 20, 3], None), ([90, 40, 20], [50, 3, 20])):
        case = e4m3_case(device, lens, queries, torch.tensor([0.3, 0.7]), dtype, layout=layout)
        if device == "cpu":
            assert torch.equal(case.run(), upcast(case).run())
        assert_right(upcast(case), case.run())


# --- memory


def test_strided_query(device):
    for lens, queries in (([40, 20], None), ([40, 130], [7, 130])):
        case = e4m3_case(device, lens, queries, query_scales(2), layout="HND", head_size=80)
        tokens, heads, size = case.query.shape
        packed = torch.full((tokens, heads + 4, size), NAN, device=device).to(E4M3)
        packed[:, 2:-2] = case.query
        assert torch.equal(replace(case, query=packed[:, 2:-2]).run(), case.run())


def test_query_of_an_odd_address_or_of_one_row(device):
    case = e4m3_case(device, [40, 400], [7, 300], query_scales(2), head_size=128)
    assert_right(case, replace(case, query=moved(case.query, 1)).run())
    one = replace(case, query=case.query[:1].expand(len(case.query), -1, -1))
    assert one.query.stride(0) == 0 and not one.multiplies_in_8_bits()
    out = case.unset_out()
    vllm_kernels.paged_attention(
        *one.tensors(), **case.options, max_query_len=case.max_query_len, out=out
    )
    assert_right(one, out)


def test_out(device):
    """bfloat16 if it is made, else its own; tokens of nobody give 0."""
    case = e4m3_case(device, [40, 130], [7, 100], query_scales(2))
    assert case.run().dtype == BF16
    case.options["query_start_loc"] = ints([3, 10, 100], device)
    made = vllm_kernels.paged_attention(*case.tensors(), **case.options, max_query_len=100)
    assert made.dtype == BF16 and not made[:3].any() and not made[100:].any()
    half = made.half()
    vllm_kernels.paged_attention(*case.tensors(), **case.options, max_query_len=100, out=half)
    torch.testing.assert_close(half, made.half(), rtol=2e-2, atol=2e-2)


# --- bad input


def test_bad_input(device):
    case = e4m3_case(device, [40, 20], layout="NHD")
    key, value, one = case.key_cache, case.value_cache, torch.ones(1, device=device)
    query = case.query.to(BF16)
    e5m2 = torch.float8_e5m2
    for change, message in (
        ({"key_cache": key.to(BF16), "value_cache": value.to(BF16)},
         "key_cache: expected float8_e4m3fn (from query), got bfloat16"),
        ({"key_cache": key.to(e5m2), "value_cache": value.to(e5m2)},
         "key_cache: expected float8_e4m3fn (from query), got float8_e5m2"),
        ({"key_cache": key.view(torch.uint8)},
         "key_cache: expected float8_e4m3fn (from query), got uint8; say what its bytes are with "
         ".view(torch.float8_e4m3fn)"),
        ({"value_cache": value.to(e5m2)}, "value_cache: expected float8_e4m3fn (from key_cache)"),
        ({"query": query.to(e5m2)},
         "query: expected float32, float16, bfloat16 or float8_e4m3fn, got float8_e5m2"),
        ({"out": query.float()}, "out: expected float16 or bfloat16, got float32"),
        ({"out": torch.empty_like(case.query)}, "out: expected float16 or bfloat16, got float8_e4"),
        ({"query": query, "q_scale": one},
         "q_scale: expected None: only float8_e4m3fn queries have a scale, this one is bfloat16"),
        ({"q_scale": torch.ones(3, device=device)},
         "q_scale: expected one element, or num_kv_heads = 2, got shape [3]"),
        ({"q_scale": one.half()}, "q_scale: expected float32, got float16"),
        ({"q_scale": torch.ones(4, device=device)[::2]}, "q_scale: expected a contiguous tensor"),
        ({"q_scale": 0.5}, "q_scale: expected a float32 tensor of one element or [num_kv_heads]"),
    ):  # fmt: skip
        names = "query", "key_cache", "value_cache", "block_tables", "seq_lens"
        arguments = {**dict(zip(names, case.tensors())), "layout": "NHD", **change}
        with raises(rf"^paged_attention: {re.escape(message)}"):
            vllm_kernels.paged_attention(**arguments)
        words = {"key_cache": "key", "value_cache": "value"}
        arguments = {words.get(name, name): x for name, x in arguments.items()}
        arguments |= {name: arguments[name].flatten(0, 1) for name in ("key", "value")}
        for name in ("block_tables", "seq_lens", "layout"):
            del arguments[name]
        starts = ints([0, 1, 2], device)
        message = message.replace("_cache", "")
        with raises(rf"^varlen_attention: {re.escape(message)}"):
            vllm_kernels.varlen_attention(**arguments, query_start_loc=starts, key_start_loc=starts)


@pytest.mark.parametrize("bad", [NAN, float("inf"), 0.0, -1.0])
def test_bad_scales_on_the_cpu(bad):
    case = e4m3_case("cpu", [40, 20], None, torch.tensor([1.0, bad]).nan_to_num(1, 1).clamp_min(1))
    case = case.with_options(q_scale=torch.tensor([1.0, bad]))
    with raises(r"^paged_attention: q_scale\[1\] = \S+: expected a finite number > 0$"):
        case.run()


def test_an_int4_cache_is_refused(device):
    query, rows = torch.ones(1, 2, 64, device=device).to(E4M3), torch.ones(3, 16, 2, device=device)
    cache = torch.zeros(3, 16, 2, 32, device=device).to(torch.uint8)
    names = "k_token_scales", "v_token_scales", "k_token_zeros", "v_token_zeros"
    of_tokens = dict.fromkeys(names, rows.transpose(1, 2).contiguous())
    table = ints([1], device)
    with raises(r"^paged_attention: key_cache: expected float8_e4m3fn \(from query\), got uint8"):
        vllm_kernels.paged_attention(
            query, cache, cache, table[None], table, layout="NHD", **of_tokens
        )


def test_other_ops_refuse_it(device):
    case = e4m3_case(device, [40, 20], layout="NHD")
    starts = ints([0, 1, 2], device)
    ops, refused = torch.ops.vllm_kernels, r"query: expected float32, float16 or bfloat16, got flo"
    with raises(f"^paged_attention: {refused}"):
        ops.paged_attention.result(*case.tensors(), layout="NHD")
    with raises(f"^varlen_attention: {refused}"):
        rows = (x.flatten(0, 1) for x in (case.key_cache, case.value_cache))
        ops.varlen_attention.result(case.query, *rows, starts, starts, 1)
    with raises(f"^attention_with_kvcache: {refused}"):
        vllm_kernels.attention_with_kvcache(
            case.query[:, None], case.key_cache, case.value_cache, case.seq_lens,
            block_tables=case.block_tables,
        )  # fmt: skip
    with raises(f"^cascade_attention: {refused}"):
        vllm_kernels.cascade_attention(*case.tensors(), 1, layout="NHD")


def test_inference_only(device):
    case = e4m3_case(device, [40, 20], None, torch.ones(2))
    with raises(r"^paged_attention: q_scale: requires grad"):
        case.with_options(q_scale=case.options["q_scale"].requires_grad_()).run()


# --- torch


def test_opcheck_and_compile(device):
    case = e4m3_case(device, [40, 130], [4, 9], query_scales(2))
    starts, scales = case.options["query_start_loc"], query_scales(2).to(device)
    opcheck_float8(
        "paged_attention", torch.zeros_like(case.query, dtype=BF16), None, *case.tensors(), starts,
        0.1, None, 0, 0.0, None, None, None, "vllm", 9, None, 0, False, 0, None, -1, None, None,
        None, False, None, None, None, 1, 0, 1, scales,
    )  # fmt: skip
    assert_compiles(case.run_with_lse)
    rows = torch.randn(13, 2, 64, device=device).to(E4M3)
    opcheck_float8(
        "varlen_attention", torch.zeros_like(case.query, dtype=BF16), None, case.query, rows, rows,
        starts, starts, 0.1, None, -1, 0, 0.0, None, None, None, 9, None, False, scales,
    )  # fmt: skip

    def call(q_scale: Tensor) -> Tensor:
        return vllm_kernels.varlen_attention(
            case.query, rows, rows, starts, starts, q_scale=q_scale
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(scales), call(scales))


def test_meta_tensors():
    case = e4m3_case("cpu", [40, 20], layout="NHD")
    meta = [x.to("meta") for x in case.tensors()]
    for q_scale in (None, torch.ones(2, device="meta")):
        got = vllm_kernels.paged_attention(*meta, layout="NHD", q_scale=q_scale)
        assert got.is_meta and got.dtype == BF16 and got.shape == case.query.shape
    with raises(r"^paged_attention: q_scale: expected one element, or num_kv_heads = 2"):
        vllm_kernels.paged_attention(*meta, layout="NHD", q_scale=torch.ones(3, device="meta"))
