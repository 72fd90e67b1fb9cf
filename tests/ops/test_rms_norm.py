"""rms_norm against its reference: dtypes, widths, strides, aliases, bad input, compile, graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises

import vllm_kernels
from vllm_kernels import reference

EPS = 1e-6
# Two roundings (normalized value, product) can each fall the other way by one unit.
ULPS = {torch.float32: 8, torch.float16: 1.01, torch.bfloat16: 1.01}


def run(x: torch.Tensor, weight: torch.Tensor, epsilon: float = EPS) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    vllm_kernels.rms_norm(out, x, weight, epsilon)
    return out


@pytest.mark.parametrize("tokens", [1, 7, 83])
@pytest.mark.parametrize("hidden", [1, 7, 64, 768, 769, 4096, 5120, 8191, 8192, 16384, 32768])
def test_matches_reference(device, dtype, tokens, hidden):
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    weight = torch.randn(hidden, device=device, dtype=dtype)
    assert_close(run(x, weight), reference.rms_norm(x, weight, EPS), 2 * ULPS[dtype])


# On CUDA one vector of a row a thread, two or four; more rows than 16 bits number.
@pytest.mark.parametrize(
    "tokens, hidden", [(133, 8192), (520, 4096), (1024, 264), (1024, 8200), (70_000, 64)]
)
def test_many_rows(device, dtype, tokens, hidden):
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    weight = torch.randn(hidden, device=device, dtype=dtype)
    assert_close(run(x, weight), reference.rms_norm(x, weight, EPS), 2 * ULPS[dtype])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_more_rows_than_a_grid_has():
    x = torch.empty(2**31, 1, device="cuda", dtype=torch.float16)
    with raises(r"^rms_norm: expected work for fewer than 2\^31 blocks, got 2147483648: split"):
        vllm_kernels.rms_norm(x, x, torch.ones(1, device="cuda", dtype=torch.float16), EPS)


def test_strided_rows(device, dtype):
    packed = torch.randn(5, 6, 4, 3 * 32, device=device, dtype=dtype)
    weight = torch.randn(32, device=device, dtype=dtype)
    for x in (packed[:, 0, 0, 32:64], packed[:, :, 1, :32], packed[0, :, :, 33:65]):
        assert_close(run(x, weight), reference.rms_norm(x, weight, EPS), 2 * ULPS[dtype])
    out = torch.zeros_like(packed)
    vllm_kernels.rms_norm(out[:, :, 1, :32], packed[:, :, 1, :32], weight, EPS)
    want = torch.zeros_like(packed)
    want[:, :, 1, :32] = reference.rms_norm(packed[:, :, 1, :32], weight, EPS)
    assert_close(out, want, 2 * ULPS[dtype])


def test_in_place_and_packed_neighbours(device, dtype):
    x = torch.randn(9, 128, device=device, dtype=dtype)
    weight = torch.randn(64, device=device, dtype=dtype)
    want = reference.rms_norm(x[:, :64], weight, EPS)
    vllm_kernels.rms_norm(x[:, 64:], x[:, :64], weight, EPS)  # slices of one tensor, apart
    assert_close(x[:, 64:], want, 2 * ULPS[dtype])
    vllm_kernels.rms_norm(x[:, :64], x[:, :64], weight, EPS)  # out is input
    assert_close(x[:, :64], want, 2 * ULPS[dtype])


def test_zero_row_and_empty(device, dtype):
    weight = torch.randn(64, device=device, dtype=dtype)
    assert torch.equal(
        run(torch.zeros(3, 64, device=device, dtype=dtype), weight),
        torch.zeros(3, 64, device=device, dtype=dtype),
    )
    assert run(torch.empty(0, 64, device=device, dtype=dtype), weight).shape == (0, 64)


@pytest.mark.parametrize("epsilon", [0.0, 1e-60])  # the latter is 0 in float32
@pytest.mark.parametrize("hidden", [64, 769, 8192, 40_000])
def test_zero_row_without_epsilon(device, dtype, hidden, epsilon):
    x = torch.randn(5, hidden, device=device, dtype=dtype)
    x[[1, 4]] = 0
    weight = torch.randn(hidden, device=device, dtype=dtype)
    got = run(x, weight, epsilon)
    assert not got[[1, 4]].any()
    assert_close(got, reference.rms_norm(x, weight, epsilon), 2 * ULPS[dtype])
    vllm_kernels.fused_add_rms_norm(x, torch.zeros_like(x), weight, epsilon)
    assert torch.equal(x, got)


def test_nan_stays_in_its_row(device, dtype):
    x = torch.randn(4, 64, device=device, dtype=dtype)
    weight = torch.randn(64, device=device, dtype=dtype)
    want = run(x, weight)
    x[2, 5] = float("nan")
    got = run(x, weight)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


def test_two_runs_agree_bit_for_bit(device, dtype):
    x = torch.randn(33, 4096, device=device, dtype=dtype)
    weight = torch.randn(4096, device=device, dtype=dtype)
    assert torch.equal(run(x, weight), run(x, weight))


def test_bad_input(device):
    x = torch.randn(4, 64, device=device)
    weight = torch.randn(64, device=device)
    out = torch.empty_like(x)
    cases = [
        (
            (out, x, weight[:32], EPS),
            r"^rms_norm: weight: expected hidden_size = 64 \(from input\) at dimension 0, "
            r"got shape \[32\]$",
        ),
        (
            (out, x, weight.half(), EPS),
            r"^rms_norm: weight: expected float32 \(from input\), got float16$",
        ),
        (
            (out, x.long(), weight, EPS),
            r"^rms_norm: input: expected float32, float16 or bfloat16, got int64$",
        ),
        (
            (out[:3], x, weight, EPS),
            r"^rms_norm: out: expected shape \[4, 64\] \(from input\), got shape \[3, 64\]$",
        ),
        (
            (out, x.t().contiguous().t(), weight, EPS),
            r"^rms_norm: input: expected stride 1 in the last dimension, got strides \[1, 4\]",
        ),
        ((out[:1].expand(4, 64), x, weight, EPS), r"^rms_norm: out: is written, so"),
        (
            (x.flatten()[32:160].view(2, 64), x.flatten()[:128].view(2, 64), weight, EPS),
            r"^rms_norm: out and input overlap in memory$",
        ),
        ((out, x, weight, -1.0), r"^rms_norm: epsilon: expected a number >= 0, got -1"),
        ((out, x, weight, float("nan")), r"^rms_norm: epsilon: expected a number >= 0, got nan"),
        (
            (out, x, weight, float("inf")),
            r"^rms_norm: epsilon: expected a number that is finite in float32, got inf$",
        ),
        ((out, x, weight, 1e39), r"^rms_norm: epsilon: expected .* in float32, got 1e\+39$"),
        (
            (out, torch.tensor(1.0, device=device), weight, EPS),
            r"^rms_norm: input: expected 1 to 8 dimensions, got shape \[\]$",
        ),
        (
            (out, torch.empty(0, 2**31, device=device), weight, EPS),
            r"^rms_norm: input: expected hidden_size < 2\^31, got shape \[0, 2147483648\]$",
        ),
    ]
    for args, message in cases:
        before = out.clone()
        with raises(message):
            vllm_kernels.rms_norm(*args)
        assert torch.equal(out.nan_to_num(), before.nan_to_num())


def test_required_tensor_is_none(device):
    x = torch.randn(4, 64, device=device)
    with pytest.raises((RuntimeError, TypeError)):
        torch.ops.vllm_kernels.rms_norm(x, x, None, EPS)


def test_inference_only(device):
    x = torch.randn(4, 64, device=device)
    weight = torch.nn.Parameter(torch.randn(64, device=device))
    with raises(r"^rms_norm: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.rms_norm(torch.empty_like(x), x, weight, EPS)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            vllm_kernels.rms_norm(torch.empty_like(x), x, weight, EPS)


def test_opcheck_and_compile(device, dtype):
    x = torch.randn(4, 64, device=device, dtype=dtype)
    weight = torch.randn(64, device=device, dtype=dtype)
    opcheck("rms_norm", torch.empty_like(x), x, weight, EPS)
    assert_compiles(vllm_kernels.rms_norm, torch.empty_like(x), x, weight, EPS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay(dtype):
    x = torch.randn(16, 4096, device="cuda", dtype=dtype)
    weight = torch.randn(4096, device="cuda", dtype=dtype)
    out = torch.empty_like(x)
    assert_graph_replays(
        lambda: vllm_kernels.rms_norm(out, x, weight, EPS),
        lambda: x.normal_(),
        out,
        lambda: run(x, weight),
    )
