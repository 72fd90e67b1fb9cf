"""The weightless norms and Gemma's against their references."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises

import vllm_kernels
from vllm_kernels import reference

EPS = 1e-6
# One rounding can fall the other way by one unit.
ULPS = {torch.float32: 8, torch.float16: 1.01, torch.bfloat16: 1.01}
NORMS = ["rms_norm_weightless", "gemma_rms_norm"]
FUSED = {
    "rms_norm_weightless": "fused_add_rms_norm_weightless",
    "gemma_rms_norm": "gemma_fused_add_rms_norm",
}

every = pytest.mark.parametrize("name", NORMS)


def weights(name: str, hidden: int, **options: object) -> tuple[torch.Tensor, ...]:
    return (torch.randn(hidden, **options),) if name.startswith("gemma") else ()


def run(name: str, x: torch.Tensor, *weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    getattr(vllm_kernels, name)(out, x, *weight, eps)
    return out


def check(name: str, x: torch.Tensor, *weight: torch.Tensor) -> None:
    assert_close(run(name, x, *weight), getattr(reference, name)(x, *weight, EPS), ULPS[x.dtype])


def check_fused(name: str, x: torch.Tensor, residual: torch.Tensor, *weight: torch.Tensor) -> None:
    want, want_residual = getattr(reference, FUSED[name])(x, residual, *weight, EPS)
    getattr(vllm_kernels, FUSED[name])(x, residual, *weight, EPS)
    assert torch.equal(residual, want_residual)
    assert_close(x, want, ULPS[x.dtype])


@every
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("hidden", [1, 7, 32, 257, 4096, 8191, 8192, 16384, 32768, 65536])
def test_matches_reference(device, dtype, name, tokens, hidden):
    x, residual = torch.randn(2, tokens, hidden, device=device, dtype=dtype)
    weight = weights(name, hidden, device=device, dtype=dtype)
    check(name, x, *weight)
    check_fused(name, x, residual, *weight)


@every
@pytest.mark.parametrize("hidden", [8, 128, 256, 1024])
def test_many_rows(device, dtype, name, hidden):
    """As many as heads make, several a block; the last block has rows to spare."""
    x, residual = torch.randn(2, 16_000_003 // hidden // 16, hidden, device=device, dtype=dtype)
    weight = weights(name, hidden, device=device, dtype=dtype)
    check(name, x, *weight)
    check_fused(name, x, residual, *weight)


def test_gemma_agrees_with_transformers(device, dtype):
    """GemmaRMSNorm.forward, written out: float32, then type_as."""
    x = torch.randn(9, 3072, device=device, dtype=dtype)
    weight = torch.randn(3072, device=device, dtype=dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    want = (normed * (1.0 + weight.float())).type_as(x)
    assert_close(run("gemma_rms_norm", x, weight), want, ULPS[dtype])


def test_gemma_rounds_once(device):
    """1 + 2^-9 is 1 in bfloat16: the sum must be float32's."""
    x = torch.full((2, 64), 1.0, device=device, dtype=torch.bfloat16)
    x[:, ::2] = 192.0
    weight = torch.full((64,), 2.0**-9, device=device, dtype=torch.bfloat16)
    check("gemma_rms_norm", x, weight)
    plain = run("gemma_rms_norm", x, torch.zeros_like(weight))
    wide = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    assert torch.equal(plain, wide.to(torch.bfloat16))


@every
def test_strided_rows(device, dtype, name):
    packed = torch.randn(5, 6, 4, 96, device=device, dtype=dtype)
    residual = torch.randn(5, 6, 2, 64, device=device, dtype=dtype)
    weight = weights(name, 32, device=device, dtype=dtype)
    for x in (packed[:, 0, 0, 32:64], packed[:, :, 1, :32], packed[0, :, :, 33:65]):
        check(name, x, *weight)
    check_fused(name, packed[:, :, 1, 32:64], residual[:, :, 0, :32], *weight)
    check_fused(name, packed[:, :, 2, 33:65], residual[:, :, 1, 31:63], *weight)
    out = torch.zeros_like(packed)
    getattr(vllm_kernels, name)(out[:, :, 1, 1:33], packed[:, :, 1, :32], *weight, EPS)
    want = torch.zeros_like(packed)
    want[:, :, 1, 1:33] = run(name, packed[:, :, 1, :32], *weight)
    # Alignment decides how rows are summed.
    assert_close(out, want, ULPS[dtype])


@every
def test_in_place_and_empty(device, dtype, name):
    for hidden in (64, 65, 16384):
        x = torch.randn(9, hidden, device=device, dtype=dtype)
        weight = weights(name, hidden, device=device, dtype=dtype)
        want = run(name, x, *weight)
        getattr(vllm_kernels, name)(x, x, *weight, EPS)
        assert torch.equal(x, want)
        assert run(name, x[:0], *weight).shape == (0, hidden)
        getattr(vllm_kernels, FUSED[name])(x[:0], x[:0].clone(), *weight, EPS)


@every
@pytest.mark.parametrize("epsilon", [0.0, EPS])
@pytest.mark.parametrize("hidden", [64, 769, 40_000])
def test_zero_rows(device, dtype, name, hidden, epsilon):
    x = torch.randn(5, hidden, device=device, dtype=dtype)
    x[[1, 4]] = 0
    got = run(name, x, *weights(name, hidden, device=device, dtype=dtype), eps=epsilon)
    assert not got[[1, 4]].any() and not got.isnan().any()


@every
@pytest.mark.parametrize("hidden", [64, 4096, 65536])
def test_nan_stays_in_its_row(device, dtype, name, hidden):
    x = torch.randn(40, hidden, device=device, dtype=dtype)
    weight = weights(name, hidden, device=device, dtype=dtype)
    want = run(name, x, *weight)
    x[2, 5] = float("nan")
    got = run(name, x, *weight)
    assert got[2].isnan().all()
    others = [i for i in range(40) if i != 2]
    assert torch.equal(got[others], want[others])


@every
def test_bad_input(device, name):
    x, residual = torch.randn(2, 4, 64, device=device)
    weight = weights(name, 64, device=device)
    out, flat = torch.empty_like(x), torch.randn(300, device=device)
    fused, gemma = FUSED[name], bool(weight)
    cases = [
        (
            (out, x.long(), *weight, EPS),
            rf"^{name}: input: expected float32, float16 or bfloat16, got int64$",
        ),
        (
            (out[:3], x, *weight, EPS),
            rf"^{name}: out: expected shape \[4, 64\] \(from input\), got shape \[3, 64\]$",
        ),
        ((out[:1].expand(4, 64), x, *weight, EPS), rf"^{name}: out: is written, so"),
        (
            (flat[32:288].view(4, 64), flat[:256].view(4, 64), *weight, EPS),
            rf"^{name}: out and input overlap in memory$",
        ),
        ((out, x, *weight, -1.0), rf"^{name}: epsilon: expected a number >= 0, got -1"),
    ]
    if gemma:
        cases += [
            (
                (out, x, weight[0].half(), EPS),
                rf"^{name}: weight: expected float32 \(from input\), got float16$",
            ),
            ((out, x, out[0], EPS), rf"^{name}: out and weight overlap in memory$"),
        ]
    for args, message in cases:
        with raises(message):
            getattr(vllm_kernels, name)(*args)
    cases = [
        (
            (x, residual[:3], *weight, EPS),
            rf"^{fused}: residual: expected shape \[4, 64\] \(from input\), got shape \[3, 64\]$",
        ),
        ((x, x, *weight, EPS), rf"^{fused}: input and residual overlap in memory$"),
        ((x, residual, *weight, float("nan")), rf"^{fused}: epsilon: expected a number >= 0"),
    ]
    if gemma:
        cases += [
            (
                (x, residual, weight[0][:32], EPS),
                rf"^{fused}: weight: expected hidden_size = 64 \(from input\) at dimension 0, "
                r"got shape \[32\]$",
            ),
            ((x, residual, x[0], EPS), rf"^{fused}: input and weight overlap in memory$"),
        ]
    for args, message in cases:
        before = x.clone(), residual.clone()
        with raises(message):
            getattr(vllm_kernels, fused)(*args)
        assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@every
def test_inference_only(device, name):
    x = torch.randn(4, 64, device=device, requires_grad=True)
    weight = weights(name, 64, device=device)
    with raises(rf"^{name}: \w+: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, name)(torch.empty_like(x), x, *weight, EPS)
    with raises(rf"^{FUSED[name]}: \w+: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, FUSED[name])(x, torch.ones_like(x), *weight, EPS)
    with torch.inference_mode():
        getattr(vllm_kernels, name)(torch.empty_like(x), x, *weight, EPS)


@every
def test_opcheck_and_compile(device, dtype, name):
    x, residual = torch.randn(2, 4, 64, device=device, dtype=dtype)
    weight = weights(name, 64, device=device, dtype=dtype)
    for op, args in ((name, (residual, x)), (FUSED[name], (x, residual))):
        opcheck(op, *args, *weight, EPS)
        assert_compiles(getattr(vllm_kernels, op), *args, *weight, EPS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every
def test_graph_replay(dtype, name):
    x = torch.randn(16, 4096, device="cuda", dtype=dtype)
    weight = weights(name, 4096, device="cuda", dtype=dtype)
    out = torch.empty_like(x)
    assert_graph_replays(
        lambda: getattr(vllm_kernels, name)(out, x, *weight, EPS),
        lambda: x.normal_(),
        out,
        lambda: run(name, x, *weight),
    )
