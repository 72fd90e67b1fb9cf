"""The gated activations with parameters, two inputs or interleaved ones, and their references."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

# name -> the arguments after (out, input)
CASES = {
    "fatrelu_and_mul": (0.25,),
    "silu_and_mul_with_clamp": (1.5,),
    "swigluoai_and_mul": (1.702, 1.25),
}
# float32: a few units. 16-bit: two roundings, or one, can fall the other way.
ULPS = {torch.float32: 8, torch.float16: 2.01, torch.bfloat16: 2.01}
every = pytest.mark.parametrize("name", CASES)


def run(name: str, x: Tensor, *parameters: float) -> Tensor:
    out = torch.full((*x.shape[:-1], x.size(-1) // 2), -77.0, device=x.device, dtype=x.dtype)
    getattr(vllm_kernels, name)(out, x, *parameters)
    return out


def check(name: str, x: Tensor, out: Tensor | None = None) -> None:
    got = run(name, x, *CASES[name]) if out is None else out
    # 1 + up cancels for up near -1.
    floor = 1e-6 if name == "swigluoai_and_mul" else 0.0
    assert_close(got, getattr(reference, name)(x, *CASES[name]), ULPS[x.dtype], floor)


def joined(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """The op's input."""
    if name == "swigluoai_and_mul":
        return torch.stack([gate, up], dim=-1).flatten(-2)
    return torch.cat([gate, up], dim=-1)


@every
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("width", [1, 7, 64, 769, 2880, 8191, 8192, 16384, 32768])
def test_matches_reference(device, dtype, name, tokens, width):
    check(name, torch.randn(tokens, 2 * width, device=device, dtype=dtype) * 2)


@every
def test_many_rows(device, name):
    check(name, torch.randn(70_000, 16, device=device, dtype=torch.bfloat16) * 2)


@every
def test_every_16_bit_value(device, name):
    """All finite values of a 16-bit dtype as gate, and as up."""
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values[values.isfinite()].to(device)
        ones = torch.ones_like(values)
        for gate, up in ((values, ones), (ones, values)):
            x = joined(name, gate, up)
            got, want = (
                run(name, x, *CASES[name]),
                getattr(reference, name)(x, *CASES[name]),
            )
            assert torch.equal(got.isfinite(), want.isfinite())
            assert_close(got[want.isfinite()], want[want.isfinite()], 2.01, 1e-6)


def test_fatrelu_is_exact(device, dtype):
    x = torch.randn(33, 2000, device=device, dtype=dtype)
    x[0, :3] = torch.tensor([0.25, 0.250001, -0.25], device=device, dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    for threshold in (0.25, -0.5, 0.0):
        want = torch.nn.functional.threshold(gate, threshold, 0) * up
        assert torch.equal(run("fatrelu_and_mul", x, threshold), want)


def test_defaults_of_swigluoai(device):
    x = torch.randn(3, 64, device=device) * 8
    out = torch.empty(3, 32, device=device)
    vllm_kernels.swigluoai_and_mul(out, x)
    assert torch.equal(out, run("swigluoai_and_mul", x, 1.702, 7.0))
    assert_close(out, reference.swigluoai_and_mul(x), 8, 1e-5)


def test_clamp_without_effect_is_silu_and_mul(device, dtype):
    x = torch.randn(5, 512, device=device, dtype=dtype)
    plain = run("silu_and_mul", x)
    assert torch.equal(run("silu_and_mul_with_clamp", x, float("inf")), plain)
    assert torch.equal(run("silu_and_mul_with_clamp", x, 100.0), plain)


@every
def test_strided_rows(device, dtype, name):
    width = 48
    packed = torch.randn(5, 6, 3, 4 * width + 1, device=device, dtype=dtype)
    for first in (0, 1, 8):
        x = packed[:, :, 1, first : first + 2 * width]
        check(name, x)
        out = torch.zeros(5, 6, 2, 2 * width, device=device, dtype=dtype)
        getattr(vllm_kernels, name)(out[:, :, 1, first : first + width], x, *CASES[name])
        check(name, x, out[:, :, 1, first : first + width])
        out[:, :, 1, first : first + width] = 0
        assert not out.any()


@every
def test_empty(device, dtype, name):
    parameters = CASES[name]
    assert run(name, torch.empty(0, 64, device=device, dtype=dtype), *parameters).shape == (0, 32)
    assert run(name, torch.empty(3, 0, device=device, dtype=dtype), *parameters).shape == (3, 0)


@every
def test_nan_and_infinity(device, dtype, name):
    nan, inf = float("nan"), float("inf")
    gate = torch.tensor([nan, 1.0, inf, -inf, 1.0, 1.0, 3e4, -3e4], device=device, dtype=dtype)
    up = torch.tensor([1.0, nan, 1.0, 0.5, inf, -inf, 1.0, 1.0], device=device, dtype=dtype)
    got = run(name, joined(name, gate, up), *CASES[name])
    want = getattr(reference, name)(joined(name, gate, up), *CASES[name])
    assert got[:2].isnan().all()
    if name == "fatrelu_and_mul":
        assert torch.equal(got[2:], want[2:])
    else:  # bounded; the reference's -inf * 0 is a NaN, as is the kernels'
        assert got[[2, 4, 5, 6, 7]].isfinite().all()
        assert_close(got[[2, 4, 5, 6, 7]], want[[2, 4, 5, 6, 7]], ULPS[dtype], 1e-6)


@every
def test_bad_input(device, name):
    x = torch.randn(4, 64, device=device)
    out = torch.empty(4, 32, device=device)
    last = CASES[name]
    cases = [
        (
            (out, x[:, :63], *last),
            r"input: expected an even last dimension \(gate and up\), got shape \[4, 63\]$",
        ),
        (
            (out[:, :31], x, *last),
            r"out: expected the shape of input, \[4, 64\], with the last dimension halved, "
            r"got shape \[4, 31\]$",
        ),
        ((out[0], x, *last), r"out: expected the shape of input, \[4, 64\], with .*\[32\]$"),
        ((out.half(), x, *last), r"out: expected float32 \(from input\), got float16$"),
        ((out, x.long(), *last), r"input: expected float32, float16 or bfloat16, got int64$"),
        ((out[:1].expand(4, 32), x, *last), r"out: is written, so"),
        ((x[:, :32], x, *last), r"out and input overlap in memory$"),
        ((out, x.t().contiguous().t(), *last), r"input: expected stride 1 in the last dimension"),
    ]
    if name == "fatrelu_and_mul":
        cases += [((out, x, float("nan")), r"threshold: expected a number, got nan$")]
    else:
        for bad in (-1.0, float("nan")):
            cases += [((out, x, *last[:-1], bad), r"limit: expected a number >= 0, got (-1|nan)")]
    if name == "swigluoai_and_mul":
        cases += [((out, x, float("nan"), 1.0), r"alpha: expected a number, got nan$")]
    for args, message in cases:
        with raises(rf"^{name}: {message}"):
            getattr(vllm_kernels, name)(*args)


@every
def test_grad_mode_opcheck_and_compile(device, dtype, name):
    x = torch.randn(4, 64, device=device, dtype=dtype)
    out = torch.empty(4, 32, device=device, dtype=dtype)
    with raises(rf"^{name}: \w+: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, name)(out, x.clone().requires_grad_(), *CASES[name])
    opcheck(name, out, x, *CASES[name])
    assert_compiles(getattr(vllm_kernels, name), out, x, *CASES[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_graph_replay(dtype, name):
    x = torch.randn(16, 5760, device="cuda", dtype=dtype)
    out = torch.empty(16, 2880, device="cuda", dtype=dtype)
    assert_graph_replays(
        lambda: getattr(vllm_kernels, name)(out, x, *CASES[name]),
        lambda: x.normal_(),
        out,
        lambda: run(name, x, *CASES[name]),
    )


# --- silu_and_mul_split


def split(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.full_like(gate, -77.0)
    vllm_kernels.silu_and_mul_split(out, gate, up)
    return out


@pytest.mark.parametrize("width", [1, 7, 64, 769, 8191, 16384, 32768])
def test_split_equals_silu_and_mul(device, dtype, width):
    gate, up = torch.randn(2, 7, width, device=device, dtype=dtype)
    got = split(gate, up)
    assert torch.equal(got, run("silu_and_mul", torch.cat([gate, up], dim=-1)))
    assert_close(got, reference.silu_and_mul_split(gate, up), ULPS[dtype])


def test_split_of_other_strides_and_in_place(device, dtype):
    packed = torch.randn(5, 6, 3, 100, device=device, dtype=dtype)
    other = torch.randn(6, 5, 48, device=device, dtype=dtype).transpose(0, 1)
    for first in (0, 1, 8):
        gate, up = packed[:, :, 1, first : first + 48], other
        want = split(gate.contiguous(), up.contiguous())
        assert torch.equal(split(gate, up), want)
        assert torch.equal(split(up, gate), split(up.contiguous(), gate.contiguous()))
        for target in (gate.clone(), up.clone()):
            vllm_kernels.silu_and_mul_split(target, gate, up)
            assert torch.equal(target, want)
        for inplace in (0, 1):
            pair = [gate.clone(), up.clone()]
            vllm_kernels.silu_and_mul_split(pair[inplace], *pair)
            assert torch.equal(pair[inplace], want)
    assert split(packed[:0, ..., :4], packed[:0, ..., 4:8]).shape == (0, 6, 3, 4)


def test_split_bad_input(device):
    gate, up = torch.randn(2, 4, 32, device=device)
    out, flat = torch.empty_like(gate), torch.randn(300, device=device)
    cases = [
        ((out, gate, up[:3]), r"up: expected shape \[4, 32\] \(from gate\), got shape \[3, 32\]$"),
        ((out, gate, up.half()), r"up: expected float32 \(from gate\), got float16$"),
        ((out[:3], gate, up), r"out: expected shape \[4, 32\] \(from gate\), got .*\[3, 32\]$"),
        (
            (flat[8:136].view(4, 32), flat[:128].view(4, 32), up),
            r"out and gate overlap in memory$",
        ),
        ((flat[8:136].view(4, 32), gate, flat[:128].view(4, 32)), r"out and up overlap in memory$"),
        ((out, gate.int(), up), r"gate: expected float32, float16 or bfloat16, got int32$"),
    ]
    for args, message in cases:
        with raises(rf"^silu_and_mul_split: {message}"):
            vllm_kernels.silu_and_mul_split(*args)


def test_split_opcheck_and_compile(device, dtype):
    args = tuple(torch.randn(3, 4, 64, device=device, dtype=dtype))
    opcheck("silu_and_mul_split", *args)
    assert_compiles(vllm_kernels.silu_and_mul_split, *args)
    with raises(r"^silu_and_mul_split: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.silu_and_mul_split(args[0], args[1], torch.nn.Parameter(args[2]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_split_graph_replay(dtype):
    gate, up = torch.randn(2, 16, 14336, device="cuda", dtype=dtype)
    out = torch.empty_like(gate)
    assert_graph_replays(
        lambda: vllm_kernels.silu_and_mul_split(out, gate, up),
        lambda: gate.normal_(),
        out,
        lambda: split(gate, up),
    )
