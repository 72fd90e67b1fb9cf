"""fused_add_rms_norm against its reference: dtypes, widths, strides, bad input, compile, graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises

import vllm_kernels
from vllm_kernels import reference

EPS = 1e-6
# Two roundings (normalized value, product) can each fall the other way by one unit; the sum is
# exact before its one rounding.
ULPS = {torch.float32: 16, torch.float16: 2.02, torch.bfloat16: 2.02}


def make(*shape: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, residual = torch.randn(2, *shape, device=device, dtype=dtype)
    return x, residual, torch.randn(shape[-1], device=device, dtype=dtype)


def check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Runs in place and compares; `x` and `residual` are what the op left there afterwards."""
    want, want_residual = reference.fused_add_rms_norm(x, residual, weight, EPS)
    vllm_kernels.fused_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, want_residual)
    assert_close(x, want, ULPS[x.dtype])


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("hidden", [1, 7, 64, 768, 769, 4096, 8191, 8192, 16384, 32768, 65536])
def test_matches_reference(device, dtype, tokens, hidden):
    check(*make(tokens, hidden, device=device, dtype=dtype))


# On CUDA one vector of a row a thread, two or four; more rows than 16 bits number.
@pytest.mark.parametrize(
    "tokens, hidden", [(133, 8192), (520, 4096), (1025, 1024), (1024, 8200), (70_000, 16)]
)
def test_many_rows(device, dtype, tokens, hidden):
    check(*make(tokens, hidden, device=device, dtype=dtype))


def test_strided_rows(device, dtype):
    x = torch.randn(5, 6, 4, 96, device=device, dtype=dtype)
    residual = torch.randn(5, 6, 2, 64, device=device, dtype=dtype)
    weight = torch.randn(32, device=device, dtype=dtype)
    before, residual_before = x.clone(), residual.clone()
    check(x[:, :, 1, 32:64], residual[:, :, 0, :32], weight)
    check(x[:, :, 2, 33:65], residual[:, :, 1, 31:63], weight)
    before[:, :, 1, 32:64], before[:, :, 2, 33:65] = x[:, :, 1, 32:64], x[:, :, 2, 33:65]
    residual_before[:, :, 0, :32] = residual[:, :, 0, :32]
    residual_before[:, :, 1, 31:63] = residual[:, :, 1, 31:63]
    assert torch.equal(x, before) and torch.equal(residual, residual_before)


def test_packed_neighbours(device, dtype):
    packed = torch.randn(3, 5, 128, device=device, dtype=dtype)
    check(packed[..., :64], packed[..., 64:], torch.randn(64, device=device, dtype=dtype))


def test_sum_is_rounded_before_the_norm(device):
    x = torch.full((1, 64), 2.0**-9, device=device, dtype=torch.bfloat16)
    residual = torch.ones(1, 64, device=device, dtype=torch.bfloat16)
    vllm_kernels.fused_add_rms_norm(x, residual, torch.ones_like(x[0]), 0.0)
    assert torch.equal(residual, torch.ones_like(residual))
    assert torch.equal(x, torch.ones_like(x))


def test_zero_rows_and_empty(device, dtype):
    x, residual = torch.zeros(2, 3, 64, device=device, dtype=dtype)
    weight = torch.randn(64, device=device, dtype=dtype)
    vllm_kernels.fused_add_rms_norm(x, residual, weight, EPS)
    assert not x.any() and not residual.any()
    vllm_kernels.fused_add_rms_norm(x[:0], residual[:0], weight, EPS)


@pytest.mark.parametrize("hidden", [64, 4096, 65536])
def test_nan_stays_in_its_row(device, dtype, hidden):
    x, residual, weight = make(4, hidden, device=device, dtype=dtype)
    clean, clean_residual = x.clone(), residual.clone()
    x[2, 5] = float("nan")
    vllm_kernels.fused_add_rms_norm(x, residual, weight, EPS)
    vllm_kernels.fused_add_rms_norm(clean, clean_residual, weight, EPS)
    assert x[2].isnan().all()
    assert torch.equal(x[[0, 1, 3]], clean[[0, 1, 3]])
    assert torch.equal(residual[[0, 1, 3]], clean_residual[[0, 1, 3]])


def test_bad_input(device):
    x, residual, weight = make(4, 64, device=device, dtype=torch.float32)
    flat = torch.randn(300, device=device)
    cases = [
        (
            (x, residual[:3], weight, EPS),
            r"^fused_add_rms_norm: residual: expected shape \[4, 64\] \(from input\), "
            r"got shape \[3, 64\]$",
        ),
        (
            (x, residual.half(), weight, EPS),
            r"^fused_add_rms_norm: residual: expected float32 \(from input\), got float16$",
        ),
        (
            (x, residual, weight[:32], EPS),
            r"^fused_add_rms_norm: weight: expected hidden_size = 64 \(from input\) "
            r"at dimension 0, got shape \[32\]$",
        ),
        (
            (x.int(), residual, weight, EPS),
            r"^fused_add_rms_norm: input: expected float32, float16 or bfloat16, got int32$",
        ),
        ((x, x, weight, EPS), r"^fused_add_rms_norm: input and residual overlap in memory$"),
        (
            (flat[:256].view(4, 64), flat[32:288].view(4, 64), weight, EPS),
            r"^fused_add_rms_norm: input and residual overlap in memory$",
        ),
        (
            (x, residual, residual[1], EPS),
            r"^fused_add_rms_norm: residual and weight overlap in memory$",
        ),
        ((x[:1].expand(4, 64), residual, weight, EPS), r"^fused_add_rms_norm: input: is written"),
        (
            (x, residual[:1].expand(4, 64), weight, EPS),
            r"^fused_add_rms_norm: residual: is written",
        ),
        (
            (x, residual.t().contiguous().t(), weight, EPS),
            r"^fused_add_rms_norm: residual: expected stride 1 in the last dimension, got strides ",
        ),
        (
            (x, residual, weight, -1.0),
            r"^fused_add_rms_norm: epsilon: expected a number >= 0, got -1",
        ),
        (
            (x, residual, weight, float("nan")),
            r"^fused_add_rms_norm: epsilon: expected a number >= 0, got nan",
        ),
    ]
    for args, message in cases:
        before, residual_before = x.clone(), residual.clone()
        with raises(message):
            vllm_kernels.fused_add_rms_norm(*args)
        assert torch.equal(x, before) and torch.equal(residual, residual_before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mixed_devices():
    x, residual, weight = make(4, 64, device="cuda", dtype=torch.float32)
    with raises(
        r"^fused_add_rms_norm: residual: expected a tensor on cuda:0 \(from input\), got cpu$"
    ):
        vllm_kernels.fused_add_rms_norm(x, residual.cpu(), weight, EPS)


def test_required_tensor_is_none(device):
    x, _, weight = make(4, 64, device=device, dtype=torch.float32)
    with pytest.raises((RuntimeError, TypeError)):
        torch.ops.vllm_kernels.fused_add_rms_norm(x, None, weight, EPS)


def test_grad_mode(device):
    x, residual, weight = make(4, 64, device=device, dtype=torch.float32)
    with raises(r"^fused_add_rms_norm: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.fused_add_rms_norm(x, residual, torch.nn.Parameter(weight), EPS)
    with torch.no_grad():
        check(x, residual, torch.nn.Parameter(weight))


def test_opcheck_and_compile(device, dtype):
    args = (*make(4, 64, device=device, dtype=dtype), EPS)
    opcheck("fused_add_rms_norm", *args)
    assert_compiles(vllm_kernels.fused_add_rms_norm, *args)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay(dtype):
    source, residual_source, weight = make(16, 4096, device="cuda", dtype=dtype)
    x, residual = torch.empty_like(source), torch.empty_like(source)

    def call() -> None:
        x.copy_(source)
        residual.copy_(residual_source)
        vllm_kernels.fused_add_rms_norm(x, residual, weight, EPS)

    def want() -> torch.Tensor:
        call()
        return x.clone()

    assert_graph_replays(call, lambda: source.normal_(), x, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_second_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        check(*make(256, 4096, device="cuda", dtype=torch.bfloat16))
