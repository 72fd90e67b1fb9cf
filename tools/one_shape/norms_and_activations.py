"""Norms, rotary embedding, activations and quantisation: one call per kernel."""

from __future__ import annotations

import torch

import vllm_kernels

from .common import CUDA, DTYPES, in_vllm_layout


def norms() -> None:
    for dtype in DTYPES:
        for rows, hidden in ((3, 7), (3, 64), (3, 4096), (133, 8192), (3, 16384), (3, 32768)):
            x = torch.randn(rows, hidden, device=CUDA, dtype=dtype)
            weight = torch.randn(hidden, device=CUDA, dtype=dtype)
            vllm_kernels.rms_norm(torch.empty_like(x), x, weight, 1e-6)
            vllm_kernels.fused_add_rms_norm(x, torch.randn_like(x), weight, 1e-6)
            other_norms(x, weight)


def other_norms(x: torch.Tensor, weight: torch.Tensor) -> None:
    residual, hidden = torch.randn_like(x), x.size(-1)
    vllm_kernels.rms_norm_weightless(torch.empty_like(x), x, 1e-6)
    vllm_kernels.gemma_rms_norm(torch.empty_like(x), x, weight, 1e-6)
    vllm_kernels.fused_add_rms_norm_weightless(x, residual, 1e-6)
    vllm_kernels.gemma_fused_add_rms_norm(x, residual, weight, 1e-6)
    one = torch.ones(1, device=CUDA)
    fp8 = torch.empty(x.shape, device=CUDA, dtype=torch.float8_e4m3fn)
    vllm_kernels.rms_norm_static_fp8_quant(fp8, x, weight, one, 1e-6)
    vllm_kernels.fused_add_rms_norm_static_fp8_quant(fp8, x, residual, weight, one, 1e-6)
    for out in (fp8, fp8.view(torch.int8)):
        bound = one if out is fp8 else None
        scales = torch.empty(len(x), 1, device=CUDA)
        vllm_kernels.rms_norm_dynamic_per_token_quant(out, x, weight, scales, 1e-6, bound, residual)
        for group in (64, 128):
            if hidden % group == 0:
                scales = torch.empty(hidden // group, len(x), device=CUDA).t()
                vllm_kernels.rms_norm_per_block_quant(
                    out, x, weight, scales, 1e-6, bound, residual, group, True
                )


def rotary_and_activations() -> None:
    positions = torch.randint(0, 32, (5,), device=CUDA)
    for dtype in DTYPES:
        for head_size, rot_dim in ((64, 64), (80, 32), (128, 128), (36, 18)):
            cache = torch.randn(32, rot_dim, device=CUDA, dtype=dtype)
            for is_neox in (True, False):
                query = torch.randn(5, 4, head_size, device=CUDA, dtype=dtype)
                key = torch.randn(5, 2, head_size, device=CUDA, dtype=dtype)
                vllm_kernels.rotary_embedding(positions, query, key, head_size, cache, is_neox)
                vllm_kernels.rotary_embedding(positions, query, None, head_size, cache, is_neox)
                vllm_kernels.batched_rotary_embedding(
                    positions // 2, query, key, head_size, cache, is_neox, rot_dim, positions // 2
                )
        for width in (7, 64, 1000):
            x = torch.randn(3, 2 * width, device=CUDA, dtype=dtype)
            out = torch.empty(3, width, device=CUDA, dtype=dtype)
            for name in ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul"):
                getattr(vllm_kernels, name)(out, x)
            for name in ("gelu_new", "gelu_fast", "gelu_quick"):
                getattr(vllm_kernels, name)(torch.empty_like(x), x)
            vllm_kernels.silu_and_mul_split(out, x[:, :width], x[:, width:])
            vllm_kernels.fatrelu_and_mul(out, x, 0.1)
            vllm_kernels.silu_and_mul_with_clamp(out, x, 1.0)
            vllm_kernels.swigluoai_and_mul(out, x)
        for width in (7, 256):
            x = torch.randn(3, 2 * width, device=CUDA, dtype=dtype)
            fp8 = torch.empty(3, width, device=CUDA, dtype=torch.float8_e4m3fn)
            vllm_kernels.silu_and_mul_quant(fp8, x, torch.ones(1, device=CUDA))
            for group in (64, 128) if width == 256 else ():
                scales = torch.empty(3, width // group, device=CUDA)
                vllm_kernels.silu_and_mul_per_block_quant(fp8, x, scales, group)
                vllm_kernels.silu_and_mul_per_block_quant(fp8.view(torch.int8), x, scales, group)


def scaled_quant() -> None:
    """Scales of the tensor and of rows: few and many, short and long, aligned and not."""
    one, azp = torch.ones(1, device=CUDA), torch.ones(1, device=CUDA, dtype=torch.int32)
    for dtype in DTYPES:
        for rows, width in ((3, 7), (3, 64), (3, 4096), (700, 8192), (3, 40_000), (3, 77)):
            x = torch.randn(rows, width, device=CUDA, dtype=dtype)
            for by_row in (False, True):
                vllm_kernels.scaled_fp8_quant(x, scale_ub=one, use_per_token_if_dynamic=by_row)
                vllm_kernels.scaled_int8_quant(x, symmetric=by_row)
            vllm_kernels.scaled_fp8_quant(x, one)
            vllm_kernels.scaled_int8_quant(x, one)
            vllm_kernels.scaled_int8_quant(x, one, azp, False)


def fused_rope() -> None:
    """rope_and_cache and fused_qk_norm_rope: few and many tokens, packs and single elements."""
    for dtype in DTYPES:
        for stored in (dtype, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            shapes = ((5, 128, 128), (100, 128, 128), (1100, 128, 64), (700, 128, 128), (7, 48, 18))
            for tokens, size, rotary in shapes:
                cos_sin = torch.randn(32, rotary, device=CUDA, dtype=dtype)
                positions = torch.randint(0, 32, (tokens,), device=CUDA)
                qkv = torch.randn(tokens, 12, size, device=CUDA, dtype=dtype)
                weight = torch.randn(size, device=CUDA, dtype=dtype)
                rows = torch.zeros(80, 16, 4, size, device=CUDA).to(stored)
                for layout, key, value in (
                    ("NHD", rows, rows.clone()),
                    ("vllm", *in_vllm_layout(rows)),
                ):
                    scattered = torch.randperm(1280, device=CUDA)[:tokens]
                    runs = torch.arange(tokens, device=CUDA)
                    heads = (qkv[:, :4], qkv[:, 4:8], qkv[:, 8:])
                    is_neox = (layout == "NHD") == (tokens < 700)
                    for norm, slots in ((weight, scattered), (None, scattered), (None, runs)):
                        vllm_kernels.rope_and_cache(
                            positions, *heads, cos_sin, is_neox, key, value, slots, layout,
                            q_weight=norm, k_weight=norm,
                        )  # fmt: skip
            vllm_kernels.fused_qk_norm_rope(
                qkv.flatten(1), 4, 4, 4, size, 1e-6, weight, weight, cos_sin, True, positions
            )
