"""The activations against their references: dtypes, widths, strides, bad input, compile, graphs."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    EPSILON,
    assert_close,
    assert_compiles,
    assert_graph_replays,
    opcheck,
    raises,
)

import vllm_kernels
from vllm_kernels import reference

GATED = ["silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul"]
PLAIN = ["gelu_new", "gelu_fast", "gelu_quick"]
# float32: a few units. 16-bit: the activation's rounding and the product's can fall the other way.
ULPS = {torch.float32: 8, torch.float16: 2.01, torch.bfloat16: 2.01}
# 1 + erf and 1 + tanh cancel for x far below 0 (torch's formulas, the GPU's too): absolute error.
FLOOR = {torch.float32: 4e-6, torch.float16: 4e-6, torch.bfloat16: 4e-6}

gated = pytest.mark.parametrize("name", GATED)
every = pytest.mark.parametrize("name", GATED + PLAIN)


def make(name: str, *shape: int, **options: object) -> torch.Tensor:
    """Input for an output of `shape`."""
    return torch.randn(*shape[:-1], shape[-1] * (2 if name in GATED else 1), **options) * 2


def run(name: str, x: torch.Tensor) -> torch.Tensor:
    width = x.size(-1) // (2 if name in GATED else 1)
    out = torch.full((*x.shape[:-1], width), float("nan"), device=x.device, dtype=x.dtype)
    getattr(vllm_kernels, name)(out, x)
    return out


def check(name: str, x: torch.Tensor, out: torch.Tensor | None = None) -> None:
    got = run(name, x) if out is None else out
    assert_close(got, getattr(reference, name)(x), ULPS[x.dtype], FLOOR[x.dtype])


@every
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("width", [1, 7, 64, 769, 8191, 8192, 14336, 16384, 32768])
def test_matches_reference(device, dtype, name, tokens, width):
    check(name, make(name, tokens, width, device=device, dtype=dtype))


@every
def test_many_rows(device, name):
    check(name, make(name, 70_000, 8, device=device, dtype=torch.bfloat16))


@every
def test_every_16_bit_value(device, name):
    """All values of a 16-bit dtype as gate, up = 1: the activation itself."""
    for dtype in (torch.float16, torch.bfloat16):
        gate = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
        gate = gate[gate.isfinite()].to(device)
        x = gate
        if name in GATED:
            parts = [gate, torch.ones_like(gate)]
            x = torch.cat(parts[::-1] if name == "mul_and_silu" else parts)
        got, want = run(name, x), getattr(reference, name)(x)
        assert not got.isnan().any()
        finite = want.isfinite()
        assert_close(got[finite], want[finite], 1.01, FLOOR[dtype])
        assert torch.equal(got[~finite], want[~finite])


@gated
def test_torch_agrees(device, dtype, name):
    """On the GPU bit for bit, but for 16-bit silu, where a rounding may fall the other way; torch's
    CPU formulas lose digits for gates far below 0."""
    x = make(name, 33, 1000, device=device, dtype=dtype)
    a, b = x.chunk(2, dim=-1)
    want = {
        "silu_and_mul": lambda: F.silu(a) * b,
        "mul_and_silu": lambda: a * F.silu(b),
        "gelu_and_mul": lambda: F.gelu(a) * b,
        "gelu_tanh_and_mul": lambda: F.gelu(a, approximate="tanh") * b,
    }[name]()
    got = run(name, x)
    if device == "cuda" and dtype != torch.float32 and "silu" in name:
        assert_close(got, want, 2.01)
        assert (got != want).float().mean() < 5e-3
    elif device == "cuda":
        assert torch.equal(got, want)
    else:
        near_one = 4 * EPSILON[torch.float32] * x.abs().max().item() ** 2
        assert_close(got, want, 4 if dtype == torch.float32 else 2.01, near_one)
        if dtype != torch.float32:  # equal but for ties, where torch's 1 + erf has not cancelled
            gate = b if name == "mul_and_silu" else a
            assert (got != want)[gate > -2].float().mean() < 1e-3


@every
def test_strided_rows(device, dtype, name):
    width = 48
    factor = 2 if name in GATED else 1
    packed = torch.randn(5, 6, 3, 2 * width * factor + 1, device=device, dtype=dtype)
    for first in (0, 1, 8):
        x = packed[:, :, 1, first : first + width * factor]
        check(name, x)
        out = torch.zeros(5, 6, 2, 2 * width, device=device, dtype=dtype)
        getattr(vllm_kernels, name)(out[:, :, 1, first : first + width], x)
        check(name, x, out[:, :, 1, first : first + width])
        out[:, :, 1, first : first + width] = 0
        assert not out.any()


@pytest.mark.parametrize("name", PLAIN)
def test_in_place(device, dtype, name):
    x = make(name, 9, 100, device=device, dtype=dtype)
    want = run(name, x)
    getattr(vllm_kernels, name)(x, x)
    assert torch.equal(x, want)


@every
def test_empty(device, dtype, name):
    assert run(name, make(name, 0, 64, device=device, dtype=dtype)).shape == (0, 64)
    assert run(name, make(name, 3, 0, device=device, dtype=dtype)).shape == (3, 0)


@every
def test_nan_inf_and_far_values(device, dtype, name):
    gate = torch.tensor(
        [float("nan"), float("inf"), 3e4, -3e4, -88.0, 0.0, -0.0, 1.0], device=device, dtype=dtype
    )
    x = gate
    if name in GATED:
        parts = [gate, torch.ones_like(gate)]
        x = torch.cat(parts[::-1] if name == "mul_and_silu" else parts)
    got = run(name, x)
    assert got[0].isnan() and got[1] == float("inf") and got[2] == gate[2]
    assert (got[3:7].float().abs() < 1e-30).all()
    assert not got[1:].isnan().any()


@gated
def test_bad_input_gated(device, name):
    x = torch.randn(4, 64, device=device)
    out = torch.empty(4, 32, device=device)
    op = getattr(vllm_kernels, name)
    cases = [
        (
            (out, x[:, :63]),
            rf"^{name}: input: expected an even last dimension \(two halves\), "
            r"got shape \[4, 63\]$",
        ),
        (
            (out[:, :31], x),
            rf"^{name}: out: expected the shape of input, \[4, 64\], "
            r"with the last dimension halved, got shape \[4, 31\]$",
        ),
        ((out[:3], x), rf"^{name}: out: expected the shape of input, \[4, 64\], with .*\[3, 32\]$"),
        ((out[0], x), rf"^{name}: out: expected the shape of input, \[4, 64\], with .*\[32\]$"),
        ((out.half(), x), rf"^{name}: out: expected float32 \(from input\), got float16$"),
        (
            (out, x.double()),
            rf"^{name}: input: expected float32, float16 or bfloat16, got float64$",
        ),
        (
            (out, x.t().contiguous().t()),
            rf"^{name}: input: expected stride 1 in the last dimension, got strides \[1, 4\]",
        ),
        ((out[:1].expand(4, 32), x), rf"^{name}: out: is written, so"),
        ((x[:, :32], x), rf"^{name}: out and input overlap in memory$"),
        (
            (out, torch.tensor(1.0, device=device)),
            rf"^{name}: input: expected 1 to 8 dimensions, got shape \[\]$",
        ),
    ]
    for args, message in cases:
        before = x.clone()
        with raises(message):
            op(*args)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", PLAIN)
def test_bad_input_plain(device, name):
    x = torch.randn(4, 64, device=device)
    out = torch.empty_like(x)
    flat = torch.randn(300, device=device)
    op = getattr(vllm_kernels, name)
    cases = [
        (
            (out[:3], x),
            rf"^{name}: out: expected shape \[4, 64\] \(from input\), got .*\[3, 64\]$",
        ),
        ((out.half(), x), rf"^{name}: out: expected float32 \(from input\), got float16$"),
        ((out, x.long()), rf"^{name}: input: expected float32, float16 or bfloat16, got int64$"),
        ((out[:1].expand(4, 64), x), rf"^{name}: out: is written, so"),
        ((flat[:256], flat[1:257]), rf"^{name}: out and input overlap in memory$"),
    ]
    for args, message in cases:
        before = flat.clone()
        with raises(message):
            op(*args)
        assert torch.equal(flat, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_mixed_devices(name):
    x = make(name, 4, 64, device="cuda")
    with raises(rf"^{name}: out: expected a tensor on cuda:0 \(from input\), got cpu$"):
        getattr(vllm_kernels, name)(torch.empty(4, 64), x)


@every
def test_required_tensor_is_none(device, name):
    with pytest.raises((RuntimeError, TypeError)):
        getattr(torch.ops.vllm_kernels, name)(None, torch.randn(4, 64, device=device))


@every
def test_grad_mode(device, name):
    x = make(name, 4, 64, device=device).requires_grad_()
    out = torch.empty(4, 64, device=device)
    with raises(rf"^{name}: \w+: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, name)(out, x)
    with torch.inference_mode():
        getattr(vllm_kernels, name)(out, x)


@every
def test_the_op_itself_records_no_gradient(device, name):
    """torch.ops.vllm_kernels skips the check: it neither raises nor warns."""
    x = make(name, 4, 64, device=device).requires_grad_()
    out = torch.empty(4, 64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(torch.ops.vllm_kernels, name)(out, x)
    assert not out.requires_grad and out.grad_fn is None


@every
def test_opcheck_and_compile(device, name):
    x = make(name, 4, 64, device=device, dtype=torch.bfloat16)
    out = torch.empty(4, 64, device=device, dtype=torch.bfloat16)
    opcheck(name, out, x)
    assert_compiles(getattr(vllm_kernels, name), out, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_graph_replay(dtype, name):
    x = make(name, 16, 14336, device="cuda", dtype=dtype)
    out = torch.empty(16, 14336, device="cuda", dtype=dtype)
    assert_graph_replays(
        lambda: getattr(vllm_kernels, name)(out, x), lambda: x.normal_(), out, lambda: run(name, x)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_second_stream(name):
    with torch.cuda.stream(torch.cuda.Stream()):
        check(name, make(name, 256, 4096, device="cuda", dtype=torch.bfloat16))
