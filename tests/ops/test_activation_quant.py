"""silu_and_mul with 8-bit results, against silu_and_mul and the reference's quantization."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, opcheck, opcheck_float8, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

FP8, INT8 = torch.float8_e4m3fn, torch.int8
STATIC = "silu_and_mul_quant"
BLOCK = "silu_and_mul_per_block_quant"
groups = pytest.mark.parametrize("group", [64, 128])
eights = pytest.mark.parametrize("eight", [FP8, INT8], ids=["e4m3", "int8"])


def plain(x: Tensor) -> Tensor:
    out = torch.empty_like(x[..., : x.size(-1) // 2])
    vllm_kernels.silu_and_mul(out, x)
    return out


def fresh(x: Tensor, eight: torch.dtype) -> Tensor:
    shape = (*x.shape[:-1], x.size(-1) // 2)
    return torch.full(shape, 77, device=x.device, dtype=torch.uint8).view(eight)


def per_tensor(x: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    out = fresh(x, FP8) if out is None else out
    vllm_kernels.silu_and_mul_quant(out, x, torch.tensor([scale], device=x.device))
    return out


def per_block(
    x: Tensor,
    eight: torch.dtype,
    group: int,
    scale_ub: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = fresh(x, eight) if out is None else out
    if scales is None:
        shape = (x[..., :1].numel(), x.size(-1) // 2 // group)
        scales = torch.full(shape, -1.0, device=x.device)
    transposed = scales.stride(-1) != 1
    vllm_kernels.silu_and_mul_per_block_quant(out, x, scales, group, scale_ub, transposed)
    return out, scales.reshape(*x.shape[:-1], scales.size(-1))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_block(x: Tensor, eight: torch.dtype, group: int, scale_ub: Tensor | None = None) -> None:
    """Bit for bit where the product in float32 is the same: in float32, and on the CPU."""
    got, scales = per_block(x, eight, group, scale_ub)
    product = plain(x.float())
    want, want_scales = reference.quantize_product_groups(product, eight, group, scale_ub)
    if x.dtype == torch.float32 or x.device.type == "cpu":
        assert torch.equal(scales, want_scales)
        assert same_bytes(got, want)
        return
    torch.testing.assert_close(scales, want_scales, rtol=1e-5, atol=0)
    step = scales.repeat_interleave(group, -1) * (1 if eight == INT8 else 32)
    error = (got.float() - want.float()).abs() * scales.repeat_interleave(group, -1)
    assert (error <= step).all()
    assert (error > 0).float().mean() < 2e-3


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("width", [1, 7, 64, 769, 8191, 8192, 16384, 32768])
def test_static_equals_silu_and_mul_then_quantized(device, dtype, tokens, width):
    x = torch.randn(tokens, 2 * width, device=device, dtype=dtype) * 3
    for scale in (0.01, 0.5):
        given = torch.tensor(scale, device=device)
        assert same_bytes(
            per_tensor(x, scale), reference.quantize(plain(x), given, FP8, divide=False)
        )


@eights
@groups
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("width", [128, 640, 14336, 32768])
def test_groups_match_the_reference(device, dtype, eight, group, tokens, width):
    check_block(torch.randn(tokens, 2 * width, device=device, dtype=dtype) * 3, eight, group)


@eights
@groups
def test_many_rows(device, eight, group):
    check_block(torch.randn(9_001, 256, device=device, dtype=torch.bfloat16), eight, group)


@groups
@pytest.mark.parametrize("bound", [1e-30, 2e-3, 1e30])
def test_scale_ub_bounds_the_scale(device, dtype, group, bound):
    x = torch.randn(9, 1280, device=device, dtype=dtype) * 3
    if dtype != torch.float16:
        x[0, :4] = 1e15  # a product of 1e30
        x[0, 640:644] = 1e15
    check_block(x, FP8, group, torch.tensor([bound], device=device))
    got, scales = per_block(x, FP8, group, torch.tensor([bound], device=device))
    assert scales.max() <= max(bound * (1 + 1e-6), 1 / (448 * 512) * (1 + 1e-6))
    assert not got.float().isnan().any()


@eights
@groups
def test_strided_rows(device, dtype, eight, group):
    packed = torch.randn(5, 6, 3, 600, device=device, dtype=dtype)
    for first in (0, 1, 8):
        x = packed[:, :, 1, first : first + 512]
        dense = x.contiguous()
        assert same_bytes(per_tensor(x, 0.02), per_tensor(dense, 0.02))
        want, want_scales = per_block(dense, eight, group)
        got, scales = per_block(x, eight, group)
        assert same_bytes(got, want) and torch.equal(scales, want_scales)
        wide = torch.zeros(5, 6, 2, 300, device=device, dtype=torch.uint8)
        out = wide.view(eight)[:, :, 1, first : first + 256]
        assert same_bytes(per_block(x, eight, group, out=out)[0], want)
        wide[:, :, 1, first : first + 256] = 0
        assert not wide.any()
    x = packed[:, 0, 0, :512]
    want, want_scales = per_block(x.contiguous(), eight, group)
    padded = torch.full((256 // group, 8), -1.0, device=device).t()
    got, scales = per_block(x, eight, group, scales=padded[:5])
    assert same_bytes(got, want) and torch.equal(scales, want_scales)
    assert (padded[5:] == -1).all()


@eights
def test_zeros_nan_infinity_and_empty(device, dtype, eight):
    x = torch.randn(6, 512, device=device, dtype=dtype)
    clean, clean_scales = per_block(x, eight, 64)
    x[1] = 0
    x[2, 70] = float("nan")
    x[3, 70], x[3, 326] = float("inf"), 1.0
    got, scales = per_block(x, eight, 64)
    min_scale = scales.new_tensor(reference.MIN_SCALE[eight])
    assert not got[1].float().any() and (scales[1] == min_scale).all()
    assert scales[2, 1].isnan() and scales[3, 1].isinf()
    if eight == FP8:
        assert got[2:4, 64:128].float().isnan().all()
    rest = torch.ones_like(scales, dtype=torch.bool)
    rest[1], rest[2:4, 1] = False, False
    assert torch.equal(scales[rest], clean_scales[rest])
    elements = rest.repeat_interleave(64, -1)
    assert torch.equal(got.view(torch.uint8)[elements], clean.view(torch.uint8)[elements])
    assert per_tensor(x, 1.0)[2, 70].float().isnan()
    assert per_block(x[:0], eight, 64)[0].shape == (0, 256)
    assert per_tensor(x[:0], 1.0).shape == (0, 256)


def test_bad_input(device):
    x = torch.randn(4, 256, device=device)
    out = torch.zeros(4, 128, device=device, dtype=FP8)
    one, scales = torch.ones(1, device=device), torch.zeros(4, 2, device=device)
    cases = [
        (STATIC, (out.view(INT8), x, one), r"out: expected float8_e4m3fn, got int8$"),
        (STATIC, (out, x, torch.ones(2, device=device)), r"scale: expected one element, got .*"),
        (STATIC, (out, x, 0.5), r"scale: expected a float32 tensor of one element, got 0\.5$"),
        (STATIC, (out, x, one.half()), r"scale: expected float32, got float16"),
        (
            STATIC,
            (out[:, :64], x, one),
            r"out: expected the shape of input, \[4, 256\], with the last dimension halved, "
            r"got shape \[4, 64\]$",
        ),
        (STATIC, (x.view(torch.uint8).view(FP8)[:, :128], x, one), r"out and input overlap in"),
        (BLOCK, (out, x, scales, 32), r"group_size: expected 64 or 128, got 32$"),
        (
            BLOCK,
            (out, x, scales, 128),
            r"scales: expected shape \[4, 1\] \(rows, groups\), got shape \[4, 2\]$",
        ),
        (
            BLOCK,
            (out[:, :96], x[:, :192], scales, 64),
            r"out: expected a last dimension that group_size = 64 divides, got .*\[4, 96\]$",
        ),
        (BLOCK, (out, x, scales, 64, None, True), r"scales: expected stride 1 in dimension 0, for"),
        (BLOCK, (out, x, x[:, :2], 64), r"scales and input overlap in memory$"),
        *[
            (
                STATIC,
                (out, x, torch.tensor(bad)),
                rf"scale\[0\] = {bad:g}: expected a finite number > 0$",
            )
            for bad in (float("nan"), float("inf"), 0.0, -1.0)
            if device == "cpu"
        ],
        (BLOCK, (out, x, scales, 64, 2.0), r"scale_ub: expected a float32 tensor of one element,"),
        (BLOCK, (out.view(INT8), x, scales, 64, one), r"scale_ub: expected None for int8$"),
        (BLOCK, (out, x.long(), scales, 64), r"input: expected float32, float16 or bfloat16"),
        (BLOCK, (out.float(), x, scales, 64), r"out: expected float8_e4m3fn or int8, got float32$"),
    ]
    for name, args, message in cases:
        with raises(rf"^{name}: {message}"):
            getattr(vllm_kernels, name)(*args)
    assert not out.float().any() and not scales.any()


def test_grad_mode_opcheck_and_compile(device, dtype):
    x = torch.randn(4, 256, device=device, dtype=dtype)
    out = torch.zeros(4, 128, device=device, dtype=FP8)
    one, scales = torch.ones(1, device=device), torch.zeros(4, 2, device=device)
    cases = {STATIC: (out, x, one), BLOCK: (out, x, scales, 64, one, False)}
    for name, args in cases.items():
        with raises(rf"^{name}: \w+: requires grad, .*no_grad\(\)$"):
            getattr(vllm_kernels, name)(args[0], torch.nn.Parameter(x), *args[2:])
        opcheck_float8(name, *args)
        assert_compiles(getattr(vllm_kernels, name), *args)
    opcheck(BLOCK, out.view(INT8), x, scales, 64, None, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [STATIC, BLOCK])
def test_graph_replay(dtype, name):
    x = torch.randn(16, 28672, device="cuda", dtype=dtype)
    one, scales = torch.ones(1, device="cuda"), torch.zeros(16, 112, device="cuda")
    bits = torch.empty(16, 14336, device="cuda", dtype=torch.uint8)

    def call(out: Tensor) -> Tensor:
        last = (one,) if name == STATIC else (scales, 128)
        getattr(vllm_kernels, name)(out.view(FP8), x, *last)
        return out

    assert_graph_replays(
        lambda: call(bits), lambda: x.normal_(), bits, lambda: call(torch.empty_like(bits))
    )
