"""What fused_decode_attention refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_decode_attention_cases import Case, make_case
from helpers import bits, raises

import vllm_kernels


def bad_arguments(case: Case) -> list[tuple[dict[str, object], str]]:
    """(changed arguments, the message after "fused_decode_attention: ")."""
    qkv, key, value, device = case.qkv, case.key_cache, case.value_cache, case.qkv.device
    one, two = torch.ones(1, device=device), torch.ones(2, device=device)
    out = torch.zeros(3, 8, 64, device=device)
    rows = torch.zeros(len(key), 16, 2, 64, device=device)
    int8 = {"key_cache": rows.to(torch.int8), "value_cache": rows.to(torch.int8), "layout": "NHD"}
    wide = torch.zeros(3, 2 * 12 * 64, device=device)
    packed = torch.zeros(3, 13 * 64, device=device)
    return [
        ({"qkv": qkv.double()}, r"qkv: expected float32, float16 or bfloat16, got float64$"),
        ({"qkv": qkv[0]}, r"qkv: expected shape \[num_seqs, \(num_heads \+ 2 \* num_kv_heads\) \* "
                          r"head_size\], got shape \[768\]$"),
        ({"qkv": wide[:, ::2]}, r"qkv: expected stride 1 in the last dimension, got strides "),
        ({"qkv": qkv[:1].expand(3, 768)}, r"qkv: is written, so its elements must not share "),
        *(({"qkv": wide[:, :width]},
           r"qkv: expected \(num_heads \+ 2 \* num_kv_heads\) \* head_size elements a token, "
           r"num_heads a multiple of num_kv_heads = 2 and head_size = 64 \(from key_cache\), got "
           rf"shape \[3, {width}\]$") for width in (0, 100, 4 * 64, 5 * 64, 767)),
        ({"layout": "flat"}, r'layout: expected "vllm", "NHD" or "HND", got "flat"$'),
        ({"layout": "NHD"}, r"key_cache: expected shape \[num_blocks, block_size, num_kv_heads, "
                            r"head_size\] \(from layout = \"NHD\"\), got shape"),
        ({"key_cache": key.half()}, r"key_cache: expected float32 \(from qkv\), float8_e4m3fn, "
                                    r"float8_e5m2 or int8, got float16$"),
        ({"value_cache": value.half()}, r"value_cache: expected float32 \(from key_cache\), got "),
        ({"key_cache": key[:-1]}, r"key_cache: expected num_blocks = \d+ \(from value_cache\) at "),
        ({"key_cache": key[:1].expand_as(key)}, r"key_cache: is written, so its elements must not"),
        ({"value_cache": value[:1].expand_as(value)}, r"value_cache: is written, so its elements"),
        ({"value_cache": value[0]}, r"value_cache: expected shape \[num_blocks, num_kv_heads, "),
        ({"bias": qkv[0, :64]}, r"bias: expected \(num_heads \+ 2 \* num_kv_heads\) \* head_size = "
                                r"768 \(from qkv\) at dimension 0, got shape \[64\]$"),
        ({"bias": qkv[0].half()}, r"bias: expected float32 \(from qkv\), got float16$"),
        ({"bias": qkv[0]}, r"qkv and bias overlap in memory$"),
        ({"q_weight": two}, r"q_weight: expected head_size = 64 \(from value_cache\) at dimension"),
        ({"k_weight": two.half()}, r"k_weight: expected float32 \(from qkv\), got float16$"),
        ({"epsilon": -1.0}, r"epsilon: expected a number >= 0, got -1"),
        ({"positions": case.positions.int()}, r"positions: expected int64, got int32; cast it "),
        ({"positions": case.positions[:2]}, r"positions: expected num_seqs = 3 \(from qkv\) at "
                                            r"dimension 0, got shape \[2\]$"),
        ({"cos_sin_cache": case.cos_sin_cache[:, :63]},
         r"cos_sin_cache: expected an even rotary_size from 2 to head_size = 64 at dimension 1, "),
        ({"slot_mapping": case.slot_mapping.int()}, r"slot_mapping: expected int64, got int32; "),
        ({"slot_mapping": case.slot_mapping[:2]}, r"slot_mapping: expected num_seqs = 3 \(from "
                                                  r"qkv\) at dimension 0, got shape \[2\]$"),
        ({"block_tables": case.block_tables.long()}, r"block_tables: expected int32, got int64; "),
        ({"block_tables": case.block_tables[:2]}, r"block_tables: expected num_seqs = 3 \(from "),
        ({"seq_lens": case.seq_lens.long()}, r"seq_lens: expected int32, got int64; cast it with"),
        ({"seq_lens": case.seq_lens[:1]}, r"seq_lens: expected num_seqs = 3 \(from qkv\) at dimen"),
        ({"k_scale": 0.5},
         r"k_scale: expected a float32 tensor of one element or \[num_kv_heads\], got 0\.5$"),
        ({"k_scale": one}, r"k_scale: expected None: only 8-bit caches have scales, this one is "),
        ({**int8, "k_scale": torch.ones(3, device=device)},
         r"k_scale: expected one element, or num_kv_heads = 2, got shape \[3\]$"),
        ({**int8, "k_scale": two, "v_scale": one}, r"v_scale: expected 2 elements \(from k_scale"),
        ({"alibi_slopes": two}, r"alibi_slopes: expected num_heads = 8 \(from qkv\) at dimension "),
        ({"sinks": one}, r"sinks: expected num_heads = 8 \(from qkv\) at dimension 0, got shape"),
        ({"sinks": out[0, :, 0].half()}, r"sinks: expected float32, got float16"),
        ({"sliding_window": -1}, r"sliding_window: expected a number of tokens >= 0 \(0: none\), "),
        ({"softcap": -1.0}, r"softcap: expected a finite number >= 0 \(0: none\), got -1"),
        ({"fixed_split_size": -1}, r"fixed_split_size: expected a number of tokens >= 0 \(0: "),
        ({"workspace": one}, r"workspace: expected uint8, got float32$"),
        ({"out": out[:2]}, r"out: expected num_seqs = 3 \(from qkv\) at dimension 0, got shape "),
        ({"out": out[:, :4]}, r"out: expected num_heads = 8 \(from qkv\) at dimension 1, got "),
        ({"out": out.half()}, r"out: expected float32 \(from qkv\), got float16$"),
        ({"out": out[:1].expand(3, 8, 64)}, r"out: is written, so its elements must not share"),
        ({"out": out.new_zeros(3, 64, 8).transpose(1, 2)},
         r"out: expected contiguous heads \(only the stride of num_seqs is free\), got shape "),
        ({"qkv": packed[:, :768], "out": packed[:, 64 : 9 * 64].unflatten(1, (8, 64))},
         r"out and qkv overlap in memory$"),
        ({"key_cache": rows, "value_cache": rows, "layout": "NHD"},
         r"key_cache and value_cache overlap in memory$"),
    ]  # fmt: skip


def test_bad_input(device):
    case = make_case(device, torch.float32, [5, 40, 60])
    names = list(case.__dict__)[:8]
    for change, message in bad_arguments(case):
        arguments = {**dict(zip(names, case.tensors())), **change}
        with raises(rf"^fused_decode_attention: {message}"):
            vllm_kernels.fused_decode_attention(**arguments)


def test_no_tensor(device):
    case = make_case(device, torch.float32, [5])
    for name in ("qkv", "value_cache"):
        with raises(rf"^fused_decode_attention: {name}: expected a tensor, got None$"):
            vllm_kernels.fused_decode_attention(*replace(case, **{name: None}).tensors())
    with pytest.raises((RuntimeError, TypeError), match="key_cache"):
        vllm_kernels.fused_decode_attention(*replace(case, key_cache=None).tensors())


def test_bad_head_size(device):
    for head_size, stored in ((24, None), (264, None), (60, None), (72, torch.int8)):
        rows = torch.zeros(4, 16, 2, head_size, device=device, dtype=stored or torch.float32)
        qkv = torch.zeros(1, 12 * head_size, device=device)
        ints = torch.ones(1, 1, device=device, dtype=torch.int32)
        step = 8 if stored is None else 16
        with raises(
            rf"^fused_decode_attention: key_cache: expected a head_size of 32 to 256 in steps of "
            rf"{step} for a .* cache, got {head_size}$"
        ):
            vllm_kernels.fused_decode_attention(
                qkv, ints[0].long(), torch.ones(9, 16, device=device), rows, rows.clone(),
                ints[0].long(), ints, ints[0], layout="NHD",
            )  # fmt: skip


def test_bad_rows_on_the_cpu(layout):
    """Indices are looked at before anything is computed; what is written stays as it was."""
    fits = r"expected a length that fits block_tables in \[0, 641\)$"
    cases = [
        ("positions", (1,), -1, r"positions\[1\] = -1: expected a position in \[0, 603\)$"),
        ("positions", (2,), 603, r"positions\[2\] = 603: expected a position in \[0, 603\)$"),
        ("slot_mapping", (0,), 720, r"slot_mapping\[0\] = 720: expected -1 \(skipped\) or a slot "
                                    r"in \[0, 720\)$"),
        ("slot_mapping", (2,), -2, r"slot_mapping\[2\] = -2: expected -1 \(skipped\) or a slot "),
        ("seq_lens", (1,), -3, rf"seq_lens\[1\] = -3: {fits}"),
        ("seq_lens", (2,), 641, rf"seq_lens\[2\] = 641: {fits}"),
        ("block_tables", (2, 37), -1, r"block_tables\[2, 37\] = -1: expected a block in \[0, 45\)"),
    ]  # fmt: skip
    for name, at, value, message in cases:
        case = make_case("cpu", torch.float32, [5, 40, 600], layout=layout)
        getattr(case, name)[at] = value
        before = case.copy()
        out = torch.zeros(3, 8, 64)
        with raises(rf"^fused_decode_attention: {message}"):
            vllm_kernels.fused_decode_attention(*case.tensors(), **case.options, out=out)
        assert not out.any() and torch.equal(case.qkv, before.qkv)
        assert torch.equal(bits(case.key_cache), bits(before.key_cache))
        assert torch.equal(bits(case.value_cache), bits(before.value_cache))


def test_inference_only(device):
    case = make_case(device, torch.float32, [5])
    bias = torch.zeros(768, device=device, requires_grad=True)
    with raises(r"^fused_decode_attention: \w+: requires grad, .*no_grad\(\)$"):
        case.with_options(bias=bias).run()
    with torch.no_grad():
        case.with_options(bias=bias).run()
