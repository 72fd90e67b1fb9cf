"""Valid calls of norms, activations and quantization."""

from __future__ import annotations

from random import choice

import torch
from valid_calls_base import Call, calls, ints, maybe, rows, scale, unset, unset_like


@calls(
    "rms_norm", "rms_norm_weightless", "gemma_rms_norm", "fused_add_rms_norm",
    "fused_add_rms_norm_weightless", "gemma_fused_add_rms_norm",
)  # fmt: skip
def norm(op: str) -> Call:
    x = rows(choice([1, 7, 64, 100]))
    call: Call = {"input": x, "epsilon": 1e-6}
    if "fused_add" in op:
        call["residual"] = torch.randn_like(x)
    else:
        call["out"] = unset_like(x)
    if "weightless" not in op:
        call["weight"] = torch.randn(x.shape[-1]).to(x.dtype)
    return call


@calls("rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant")
def norm_static_quant(op: str) -> Call:
    call = norm("fused_add" if "fused_add" in op else "rms_norm")
    out = unset(*call["input"].shape, dtype=torch.float8_e4m3fn)
    return {**call, "out": out, "scale": scale()}


@calls("rms_norm_dynamic_per_token_quant")
def norm_token_quant(op: str) -> Call:
    call = norm_static_quant("fused_add")
    del call["scale"]
    scales = unset(*call["input"].shape[:-1], 1)
    return {**call, "scales": scales, **quantized(call), "residual": maybe(call["residual"])}


@calls("rms_norm_per_block_quant")
def norm_group_quant(op: str) -> Call:
    group = choice([64, 128])
    x = rows(group * choice([1, 2]))
    call: Call = {"input": x, "weight": torch.randn(x.shape[-1]).to(x.dtype), "epsilon": 1e-6}
    call |= quantized(call) | group_scales(x.shape, group)
    return call | {"residual": maybe(torch.randn_like(x))}


def quantized(call: Call) -> Call:
    """out of either dtype, and its bound."""
    out = unset(*call["input"].shape, dtype=choice([torch.float8_e4m3fn, torch.int8]))
    return {"out": out, "scale_ub": None if out.dtype == torch.int8 else maybe(scale())}


def group_scales(shape: torch.Size, group: int) -> Call:
    number = shape[:-1].numel()
    transposed = choice([True, False])
    sizes = (number, shape[-1] // group)
    scales = unset(*sizes[::-1]).t() if transposed else unset(*sizes)
    return {"scales": scales, "group_size": group, "is_scale_transposed": transposed}


GATED = {
    "silu_and_mul": {}, "mul_and_silu": {}, "gelu_and_mul": {}, "gelu_tanh_and_mul": {},
    "fatrelu_and_mul": {"threshold": 0.1}, "silu_and_mul_with_clamp": {"limit": 1.0},
    "swigluoai_and_mul": {"alpha": 1.7, "limit": 7.0},
}  # fmt: skip


@calls(*GATED, "silu_and_mul_quant", "silu_and_mul_per_block_quant")
def gated(op: str) -> Call:
    group = choice([64, 128])
    x = rows(2 * group if "per_block" in op else 2 * choice([1, 7, 64]))
    out = x[..., : x.shape[-1] // 2].clone()
    call: Call = {"out": out, "input": x, **GATED.get(op, {})}
    if op == "silu_and_mul_quant":
        return call | {"out": out.to(torch.float8_e4m3fn), "scale": scale()}
    if op == "silu_and_mul_per_block_quant":
        return {**call, **quantized({"input": out}), **group_scales(out.shape, group)}
    return call


@calls(
    "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant",
    "static_scaled_int8_quant", "dynamic_scaled_int8_quant",
)  # fmt: skip
def scaled_quant(op: str) -> Call:
    x = rows(choice([1, 7, 64, 100]))
    dtype = torch.float8_e4m3fn if "fp8" in op else torch.int8
    call: Call = {"out": unset(*x.shape, dtype=dtype), "input": x}
    token_scales = unset(x.shape[:-1].numel(), 1)
    if op == "dynamic_per_token_scaled_fp8_quant":
        return call | {"scales": token_scales, "scale_ub": maybe(scale())}
    if op == "dynamic_scaled_int8_quant":
        return call | {"scales": token_scales, "azp": maybe(token_scales.int())}
    call["scale"] = scale()
    return call | {"azp": maybe(ints(5))} if op == "static_scaled_int8_quant" else call


@calls("gelu_new", "gelu_fast", "gelu_quick", "silu_and_mul_split")
def plain(op: str) -> Call:
    x = rows(choice([1, 7, 64]))
    inputs = {"gate": x, "up": torch.randn_like(x)} if "split" in op else {"input": x}
    return {"out": unset_like(x), **inputs}
