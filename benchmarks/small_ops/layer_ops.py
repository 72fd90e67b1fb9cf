"""Norms, rotary embedding, activations and quantisation, ours beside others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for
from benchmarks.small_ops.common import (
    EPS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Call,
    Row,
    flashinfer,
    vllm_library,
    with_compiled,
)


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox style as transformers writes it."""
    half = x.size(-1) // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + rotated * sin


def norms(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * HIDDEN * dtype.itemsize
    copies = copies_for(device, 2 * size)
    x, other = torch.randn(2, copies, tokens, HIDDEN, device=device, dtype=dtype)
    weight = torch.randn(HIDDEN, device=device, dtype=dtype)

    norm: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.rms_norm(other[i], x[i], weight, EPS),
        "eager": lambda i: F.rms_norm(x[i], (HIDDEN,), weight, EPS),
    }
    add: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.fused_add_rms_norm(x[i], other[i], weight, EPS),
        "eager": lambda i: F.rms_norm(other[i].add_(x[i]), (HIDDEN,), weight, EPS),
    }
    vllm = vllm_library(device)
    with_compiled(norm, lambda x: F.rms_norm(x, (HIDDEN,), weight, EPS), x)

    def add_norm(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        total = other + x
        return F.rms_norm(total, (HIDDEN,), weight, EPS), total

    with_compiled(add, add_norm, x, other)
    if vllm:
        norm["vllm"] = lambda i: vllm.rms_norm(other[i], x[i], weight, EPS)
        add["vllm"] = lambda i: vllm.fused_add_rms_norm(x[i], other[i], weight, EPS)
    if flashinfer and device == "cuda":
        norm["flashinfer"] = lambda i: flashinfer.rmsnorm(x[i], weight, EPS, out=other[i])
        add["flashinfer"] = lambda i: flashinfer.fused_add_rmsnorm(x[i], other[i], weight, EPS)
    return [
        ("rms_norm", 2 * size, copies, norm),
        ("fused_add_rms_norm", 4 * size, copies, add),
    ]


def rotary(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * (HEADS + KV_HEADS) * HEAD_SIZE * dtype.itemsize
    copies = copies_for(device, 2 * size)
    query = torch.randn(copies, tokens, HEADS * HEAD_SIZE, device=device, dtype=dtype)
    key = torch.randn(copies, tokens, KV_HEADS * HEAD_SIZE, device=device, dtype=dtype)
    positions = torch.arange(tokens, device=device)
    angle = positions[:, None] * 10000.0 ** -(torch.arange(0, HEAD_SIZE, 2, device=device) / 128)
    cache = torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)
    cos, sin = (part.repeat(1, 2).unsqueeze(1) for part in cache.chunk(2, dim=-1))

    def rope_both(query: Tensor, key: Tensor) -> list[Tensor]:
        return [rope_eager(x.view(tokens, -1, HEAD_SIZE), cos, sin) for x in (query, key)]

    def eager(i: int) -> list[Tensor]:
        return rope_both(query[i], key[i])

    def candidates(is_neox: bool) -> dict[str, Call]:
        calls: dict[str, Call] = {
            "ours": lambda i: vllm_kernels.rotary_embedding(
                positions, query[i], key[i], HEAD_SIZE, cache, is_neox
            ),
            "eager": eager,
        }
        if is_neox:
            with_compiled(calls, rope_both, query, key)
        vllm = vllm_library(device)
        if vllm:
            calls["vllm"] = lambda i: vllm.rotary_embedding(
                positions, query[i], key[i], HEAD_SIZE, cache, is_neox
            )
        if flashinfer and device == "cuda":
            wide = cache.float()
            calls["flashinfer"] = lambda i: flashinfer.apply_rope_with_cos_sin_cache_inplace(
                positions, query[i], key[i], HEAD_SIZE, wide, is_neox
            )
        return calls

    offsets = torch.zeros(tokens, device=device, dtype=torch.int64)
    batched: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.batched_rotary_embedding(
            positions, query[i], key[i], HEAD_SIZE, cache, True, HEAD_SIZE, offsets
        )
    }
    return [
        ("rotary_embedding neox", 2 * size, copies, candidates(True)),
        ("rotary_embedding gptj", 2 * size, copies, candidates(False)),
        ("batched_rotary neox", 2 * size, copies, batched),
    ]


def activations(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * width * dtype.itemsize
    copies = copies_for(device, 3 * size)
    x = torch.randn(copies, tokens, 2 * width, device=device, dtype=dtype)
    out = torch.empty(copies, tokens, width, device=device, dtype=dtype)

    def gated(name: str, function: Callable[[Tensor], Tensor]) -> Row:
        op = getattr(vllm_kernels, name)
        calls: dict[str, Call] = {
            "ours": lambda i: op(out[i], x[i]),
            "eager": lambda i: function(x[i, :, :width]) * x[i, :, width:],
        }
        with_compiled(calls, lambda x: function(x[:, :width]) * x[:, width:], x)
        if vllm_library(device):
            theirs = getattr(torch.ops._C, name)
            calls["vllm"] = lambda i: theirs(out[i], x[i])
        if flashinfer and device == "cuda":
            fused = getattr(flashinfer, name)
            calls["flashinfer"] = lambda i: fused(x[i], out[i])
        return f"{name} {width}", 3 * size, copies, calls

    plain: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.gelu_new(out[i], x[i, :, :width]),
        "eager": lambda i: F.gelu(x[i, :, :width], approximate="tanh"),
    }
    with_compiled(plain, lambda x: F.gelu(x[:, :width], approximate="tanh"), x)
    return [
        gated("silu_and_mul", F.silu),
        gated("gelu_and_mul", F.gelu),
        gated("gelu_tanh_and_mul", lambda t: F.gelu(t, approximate="tanh")),
        (f"gelu_new {width}", 2 * size, copies, plain),
    ]


def quantised(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Norms and gated activations with 8-bit results; eager: norm and conversion, no scale."""
    elements = tokens * HIDDEN
    copies = copies_for(device, elements * 3 * dtype.itemsize)
    x, residual = torch.randn(2, copies, tokens, HIDDEN, device=device, dtype=dtype)
    weight, one = torch.randn(HIDDEN, device=device, dtype=dtype), torch.ones(1, device=device)
    gate_up = torch.randn(copies, tokens, 2 * width, device=device, dtype=dtype)
    e4m3 = torch.empty(copies, tokens, HIDDEN, device=device, dtype=torch.float8_e4m3fn)
    wide = torch.empty(copies, tokens, width, device=device, dtype=torch.float8_e4m3fn)
    int8 = e4m3.view(torch.int8)
    rows = torch.empty(tokens, 1, device=device)
    groups = torch.empty(tokens, HIDDEN // 128, device=device)
    wide_groups = torch.empty(tokens, width // 128, device=device)
    op = vllm_kernels

    def eager(i: int) -> Tensor:
        return F.rms_norm(x[i], (HIDDEN,), weight, EPS).to(torch.float8_e4m3fn)

    norm_bytes, add_bytes = elements * (dtype.itemsize + 1), elements * (3 * dtype.itemsize + 1)
    calls: dict[str, tuple[int, Call]] = {
        "rms_norm fp8": (
            norm_bytes, lambda i: op.rms_norm_static_fp8_quant(e4m3[i], x[i], weight, one, EPS)),
        "add_rms_norm fp8": (
            add_bytes, lambda i: op.fused_add_rms_norm_static_fp8_quant(
                e4m3[i], x[i], residual[i], weight, one, EPS)),
        "rms_norm fp8 a token": (
            norm_bytes, lambda i: op.rms_norm_dynamic_per_token_quant(
                e4m3[i], x[i], weight, rows, EPS)),
        "rms_norm int8 a token": (
            norm_bytes, lambda i: op.rms_norm_dynamic_per_token_quant(
                int8[i], x[i], weight, rows, EPS)),
        "add_rms_norm fp8 a token": (
            add_bytes, lambda i: op.rms_norm_dynamic_per_token_quant(
                e4m3[i], x[i], weight, rows, EPS, residual=residual[i])),
        "rms_norm fp8 a block": (
            norm_bytes, lambda i: op.rms_norm_per_block_quant(
                e4m3[i], x[i], weight, groups, EPS, None, None, 128)),
        "silu_and_mul fp8": (
            tokens * width * (2 * dtype.itemsize + 1),
            lambda i: op.silu_and_mul_quant(wide[i], gate_up[i], one)),
        "silu_and_mul fp8 a block": (
            tokens * width * (2 * dtype.itemsize + 1),
            lambda i: op.silu_and_mul_per_block_quant(wide[i], gate_up[i], wide_groups, 128)),
    }  # fmt: skip
    table: list[Row] = [(name, size, copies, {"ours": c}) for name, (size, c) in calls.items()]
    table[0][3]["eager"] = eager
    return table


def scaled_quant(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    """Activations to 8 bits. A scale of the tensor that is computed reads the input twice, which
    counts. eager: with the given scale."""
    elements = tokens * width
    size = elements * (dtype.itemsize + 1)
    copies = copies_for(device, size)
    x = torch.randn(copies, tokens, width, device=device, dtype=dtype)
    fp8 = torch.empty(copies, tokens, width, device=device, dtype=torch.float8_e4m3fn)
    int8 = fp8.view(torch.int8)
    scale, rows = torch.ones(1, device=device), torch.empty(tokens, 1, device=device)
    points = torch.zeros(tokens, 1, device=device, dtype=torch.int32)
    one_point = points[0]
    twice = size + elements * dtype.itemsize
    theirs = vllm_library(device)
    theirs = torch.ops._C if theirs and hasattr(torch.ops._C, "static_scaled_fp8_quant") else None

    def row(name: str, op: str, moved: int, out: Tensor, *scales: Tensor | None) -> Row:
        ours = getattr(vllm_kernels, op)
        calls: dict[str, Call] = {"ours": lambda i: ours(out[i], x[i], *scales)}
        if theirs:
            other = getattr(theirs, op)
            calls["vllm"] = lambda i: other(out[i], x[i], *scales)
        return f"{name} {width}", moved, copies, calls

    table = [
        row("quant fp8 given", "static_scaled_fp8_quant", size, fp8, scale),
        row("quant fp8 tensor", "dynamic_scaled_fp8_quant", twice, fp8, scale.clone()),
        row("quant fp8 token", "dynamic_per_token_scaled_fp8_quant", size, fp8, rows, None),
        row("quant int8 given", "static_scaled_int8_quant", size, int8, scale, None),
        row("quant int8 given azp", "static_scaled_int8_quant", size, int8, scale, one_point),
        row("quant int8 token", "dynamic_scaled_int8_quant", size, int8, rows, None),
        row("quant int8 token azp", "dynamic_scaled_int8_quant", size, int8, rows, points),
    ]
    table[0][3]["eager"] = lambda i: (x[i] * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return table
