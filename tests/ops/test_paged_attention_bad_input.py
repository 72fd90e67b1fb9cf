"""What paged_attention refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import raises
from paged_attention_cases import NAN, Case, make_case

import vllm_kernels


def bad_arguments(case: Case) -> list[tuple[str, dict[str, object], str]]:
    """(layout, changed arguments, the message after "paged_attention: ")."""
    q, key, value, device = case.query, case.key_cache, case.value_cache, case.query.device
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    rows = torch.zeros(9, 16, 2, 64, device=device)
    large = torch.zeros(1, 2, 512, 64, device=device)
    one, two = torch.ones(1, device=device), torch.ones(2, device=device)
    int8 = {"key_cache": rows.to(torch.int8), "value_cache": rows.to(torch.int8)}
    return [
        ("vllm", {"query": q.double()},
         r"query: expected float32, float16, bfloat16 or float8_e4m3fn, got float64"),
        ("vllm", {"query": q[0]}, r"query: expected shape \[num_tokens, num_heads, head_size\], "),
        ("vllm", {"query": q.transpose(1, 2).contiguous().transpose(1, 2)},
         r"query: expected contiguous heads \(only the stride of num_tokens is free\), got shape"),
        ("vllm", {"query": q[:, :7]}, r"query: expected num_heads to be a multiple of num_kv_heads "
                                      r"= 2 \(from key_cache\), got shape \[3, 7, 64\]$"),
        ("NHD", {"query": q[:, :7], "key_cache": rows, "value_cache": rows},
         r'.* = 2 \(from dimension 2 of key_cache in layout "NHD"\), got shape \[3, 7, 64\]$'),
        ("HND", {"key_cache": rows, "value_cache": rows},
         r'.* = 16 \(from dimension 1 of key_cache in layout "HND"\), got shape \[3, 8, 64\]$'),
        ("vllm", {"fixed_split_size": -1},
         r"fixed_split_size: expected a number of tokens >= 0 \(0: "
         r"as suits the batch\), got -1$"),
        ("flat", {}, r'layout: expected "vllm", "NHD" or "HND", got "flat"$'),
        ("NHD", {}, r"key_cache: expected shape \[num_blocks, block_size, num_kv_heads, head_size\]"
                    r' \(from layout = "NHD"\), got shape \[.*; give layout="vllm", "NHD" or '),
        ("vllm", {"key_cache": rows, "value_cache": rows},
         r"key_cache: expected shape \[num_blocks, num_kv_heads, head_size / x, block_size, x\] "
         r'\(from layout = "vllm"\), got shape \[\d+, 16, 2, 64\]; give layout='),
        ("vllm", {"key_cache": key.half()}, r"key_cache: expected float32 \(from query\), "
                                            r"float8_e4m3fn, float8_e5m2 or int8, got float16$"),
        ("vllm", {"key_cache": key.to(torch.uint8)},
         r"key_cache: expected .* got uint8; say what its bytes are with "
         r"\.view\(torch\.float8_e4m3fn\)$"),
        ("vllm", {"value_cache": value.half()}, r"value_cache: expected float32 \(from key_cache\)"
                                                r", got float16$"),
        ("vllm", {"key_cache": key[:-1]}, r"key_cache: expected num_blocks = \d+ \(from value_cac"),
        ("vllm", {"value_cache": value.transpose(2, 3).contiguous().transpose(2, 3)},
         r"value_cache: expected the page of a head to be contiguous"),
        ("NHD", {"key_cache": rows[:, :12], "value_cache": rows[:, :12]},
         r"key_cache: expected a block_size of 1, 2, 4, 8, 16, 32, 64, 128 or 256, got 12 in sha"),
        ("HND", {"key_cache": large, "value_cache": large},
         r"key_cache: expected a block_size of .* got 512 in shape"),
        ("NHD", {"key_cache": rows[..., ::2], "value_cache": rows[..., ::2], "query": q[..., :32]},
         r"query: expected contiguous heads"),
        ("NHD", {"key_cache": rows.transpose(2, 3), "value_cache": rows.transpose(2, 3)},
         r"key_cache: expected head_size = 64 \(from query\) at dimension 3"),
        ("NHD", {"key_cache": rows.repeat(1, 1, 1, 2)[..., ::2], "value_cache": rows},
         r"key_cache: expected stride 1 in the last dimension"),
        ("vllm", {"k_scale": 0.5},
         r"k_scale: expected a float32 tensor of one element or \[num_kv_heads\], got 0\.5$"),
        ("NHD", {**int8, "v_scale": 1}, r"v_scale: expected a float32 tensor of one .*, got 1$"),
        ("vllm", {"k_scale": one}, r"k_scale: expected None: only 8-bit caches have scales, this "
                                   r"one is float32$"),
        ("NHD", {**int8, "k_scale": torch.ones(3, device=device)},
         r"k_scale: expected one element, or num_kv_heads = 2, got shape \[3\]$"),
        ("NHD", {**int8, "k_scale": two, "v_scale": one},
         r"v_scale: expected 2 elements \(from k_scale\), got shape \[1\]$"),
        ("NHD", {**int8, "v_scale": one.half()}, r"v_scale: expected float32, got float16"),
        ("vllm", {"block_tables": case.block_tables.long()},
         r"block_tables: expected int32, got int64; cast it with .int\(\)"),
        ("vllm", {"block_tables": case.block_tables[:2]},
         r"block_tables: expected num_seqs = num_tokens = 3 \(from query, without query_start"),
        ("vllm", {"seq_lens": case.seq_lens.long()}, r"seq_lens: expected int32, got int64; cast"),
        ("vllm", {"seq_lens": case.seq_lens[:1], "query_start_loc": starts},
         r"seq_lens: expected num_seqs = 3 \(from query_start_loc\) at dimension 0"),
        ("vllm", {"query_start_loc": starts.long()}, r"query_start_loc: expected int32, got int64"),
        ("vllm", {"query_start_loc": starts[:0]}, r"query_start_loc: expected num_seqs \+ 1 ele"),
        ("vllm", {"query_start_loc": starts[:, None]}, r"query_start_loc: expected 1 dimensions"),
        ("vllm", {"alibi_slopes": two}, r"alibi_slopes: expected num_heads = 8 \(from query\) at "),
        ("vllm", {"sinks": q[0, :, 0].half()}, r"sinks: expected float32, got float16"),
        ("vllm", {"sinks": one}, r"sinks: expected num_heads = 8 \(from query\) at dimension 0"),
        ("vllm", {"sliding_window": -1}, r"sliding_window: expected a number of tokens >= 0"),
        ("vllm", {"window_right": -2, "causal": False},
         r"window_right: expected a number of tokens >= 0 \(-1: all\), got -2$"),
        ("vllm", {"softcap": -1.0}, r"softcap: expected a finite number >= 0 \(0: none\), got -1"),
        ("vllm", {"softcap": NAN}, r"softcap: expected a finite number >= 0"),
        ("vllm", {"softcap": 1e300}, r"softcap: expected a number that is finite in float32, got "),
        ("vllm", {"scale": NAN}, r"scale: expected a number that is finite in float32, got nan$"),
        ("vllm", {"scale": -math.inf}, r"scale: expected .* finite in float32, got -inf$"),
        ("vllm", {"scale": 1e308}, r"scale: expected .* finite in float32, got 1e\+308$"),
        ("NHD", {"key_cache": rows.expand(9, 16, 2, 64)[:, :, :1].expand(9, 16, 2**32 + 1, 64),
                 "value_cache": rows[:, :, :1].expand(9, 16, 2**32 + 1, 64)},
         r"key_cache: expected num_kv_heads < 2\^31, got shape \[9, 16, 4294967297, 64\]$"),
        ("vllm", {"max_query_len": -1}, r"max_query_len: expected a length >= 0, got -1$"),
        ("vllm", {"workspace": one}, r"workspace: expected uint8, got float32"),
        ("vllm", {"out": q[:2].clone()}, r"out: expected shape \[3, 8, 64\] \(from query\), got "),
        ("vllm", {"out": q.half()}, r"out: expected float32 \(from query\), got float16$"),
        ("vllm", {"out": q}, r"out and query overlap in memory$"),
        ("vllm", {"out": q[:1].clone().expand(3, 8, 64)}, r"out: is written, so its elements must"),
        ("vllm", {"out": q.new_zeros(3, 64, 8).transpose(1, 2)}, r"out: expected contiguous heads"),
    ]  # fmt: skip


def test_bad_input(device):
    case = make_case(device, torch.float32, [5, 40, 60])
    names = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
    for layout, change, message in bad_arguments(case):
        arguments = {**dict(zip(names, case.tensors())), "layout": layout, **change}
        with raises(rf"^paged_attention: {message}"):
            vllm_kernels.paged_attention(**arguments)


def test_bad_scales_on_the_cpu():
    rows = torch.zeros(9, 16, 2, 64, dtype=torch.int8)
    query, ints = torch.randn(1, 8, 64), torch.ones(1, 1, dtype=torch.int32)
    call = (query, rows, rows, ints, ints[0])
    good = torch.ones(2)
    for value, text in ((NAN, "nan"), (math.inf, "inf"), (0.0, "0"), (-0.5, "-0.5"), (-0.0, "-0")):
        for name, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
            bad = torch.tensor([1.0, value])
            with raises(rf"^paged_attention: {name}\[1\] = {text}: expected a finite number > 0$"):
                vllm_kernels.paged_attention(*call, layout="NHD", **{name: bad, other: good})
    tiny = torch.tensor(1e-45)  # denormal, but a number
    vllm_kernels.paged_attention(*call, layout="NHD", k_scale=tiny, v_scale=tiny)


def test_table_of_too_many_columns():
    tables = torch.empty(1, 2**31, dtype=torch.int32)  # reserved and not touched
    cache = torch.ones(4, 16, 1, 32)
    with raises(
        r"^paged_attention: block_tables: expected max_blocks_per_seq < 2\^31, got shape "
        r"\[1, 2147483648\]$"
    ):
        vllm_kernels.paged_attention(
            torch.randn(1, 1, 32), cache, cache, tables, torch.ones(1, dtype=torch.int32),
            layout="NHD",
        )  # fmt: skip


def test_bad_head_size(device):
    for head_size, stored in ((24, None), (264, None), (60, None), (72, torch.int8)):
        rows = torch.zeros(4, 16, 2, head_size, device=device, dtype=stored or torch.float32)
        query = torch.zeros(1, 8, head_size, device=device)
        ints = torch.ones(1, 1, device=device, dtype=torch.int32)
        step = 8 if stored is None else 16
        with raises(
            rf"^paged_attention: query: expected a head_size of 32 to 256 in steps of {step} for a "
            rf".* cache, got {head_size}$"
        ):
            vllm_kernels.paged_attention(query, rows, rows, ints, ints[0], layout="NHD")


def test_bad_rows_on_the_cpu(layout):
    """Lengths, ids and starts are looked at before anything is computed; out stays as it was."""

    def broken(name: str, at: tuple[int, ...], value: int, **options: object) -> Case:
        case = make_case("cpu", torch.float32, [5, 40, 600], [2, 3, 1], layout=layout, **options)
        tensors = {
            "seq_lens": case.seq_lens,
            "block_tables": case.block_tables,
            "query_start_loc": case.options["query_start_loc"],
        }
        tensors[name][at] = value
        return case

    fits = r"expected a length that fits block_tables in \[0, 641\)$"
    block = r"expected a block in \[0, 45\)$"
    start = "expected a token of query, at most max_query_len past the one before, in"
    cases = [
        (broken("seq_lens", (1,), 2), r"seq_lens\[1\] = 2: expected at least its 3 query tokens$"),
        (broken("seq_lens", (1,), -3), rf"seq_lens\[1\] = -3: {fits}"),
        (broken("seq_lens", (2,), 641), rf"seq_lens\[2\] = 641: {fits}"),
        (broken("block_tables", (2, 37), -1), rf"block_tables\[2, 37\] = -1: {block}"),
        (broken("block_tables", (1, 2), 45), rf"block_tables\[1, 2\] = 45: {block}"),
        (broken("block_tables", (1, 1), 45, sliding_window=7),
         rf"block_tables\[1, 1\] = 45: {block}"),
        (broken("query_start_loc", (0,), -1), rf"query_start_loc\[0\] = -1: {start} \[0, 7\)$"),
        (broken("query_start_loc", (1,), 3), rf"query_start_loc\[2\] = 5: {start} \[3, 5\)$"),
        (broken("query_start_loc", (2,), 1), rf"query_start_loc\[2\] = 1: {start} \[2, 6\)$"),
        (broken("query_start_loc", (3,), 7), rf"query_start_loc\[3\] = 7: {start} \[5, 7\)$"),
    ]  # fmt: skip
    cases[7][0].max_query_len = 1
    cases[7] = (cases[7][0], r"max_query_len = 1: sequence 0 has 3 query tokens$")
    for case, message in cases:
        out = torch.zeros_like(case.query)
        with raises(rf"^paged_attention: {message}"):
            vllm_kernels.paged_attention(
                *case.tensors(), **case.options, max_query_len=case.max_query_len, out=out
            )
        assert not out.any()


def test_required_tensor_is_none(device):
    case = make_case(device, torch.float32, [5])
    with pytest.raises((RuntimeError, TypeError), match="key_cache"):
        vllm_kernels.paged_attention(*replace(case, key_cache=None).tensors())


def test_inference_only(device):
    case = make_case(device, torch.float32, [5])
    case.query.requires_grad_()
    with raises(r"^paged_attention: \w+: requires grad, .*no_grad\(\)$"):
        case.run()
    with torch.no_grad():
        case.run()
