"""combine_attn_partials against its reference: any number, empty ones, strides, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises
from test_merge_attn_states import FLOOR, ULPS
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference


def partials_of(
    count: int, tokens: int, heads: int, size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    partials = torch.randn(count, tokens, heads, size, device=device, dtype=dtype)
    return partials, torch.randn(count, tokens, heads, device=device) * 5


def run(partials: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    output = torch.full(partials.shape[1:], torch.nan, dtype=partials.dtype, device=partials.device)
    lse = torch.full(lses.shape[1:], torch.nan, device=partials.device)
    vllm_kernels.combine_attn_partials(output, partials, lses, lse)
    return output, lse


def check(partials: Tensor, lses: Tensor) -> None:
    output, lse = run(partials, lses)
    want, want_lse = reference.combine_attn_partials(partials, lses)
    assert_close(output, want, ULPS[output.dtype], FLOOR[output.dtype])
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "tokens", "heads", "size"),
    [(1, 3, 2, 40), (2, 1, 1, 8), (3, 5, 3, 7), (9, 64, 32, 128), (33, 5, 5, 40), (4, 3, 2, 600)],
)
def test_matches_reference(device, dtype, count, tokens, heads, size):
    check(*partials_of(count, tokens, heads, size, dtype, device))


def test_of_two_as_merge_attn_states(device, dtype):
    partials, lses = partials_of(2, 9, 4, 64, dtype, device)
    states = torch.empty_like(partials[0])
    vllm_kernels.merge_attn_states(
        states, partials[0], lses[0].t().contiguous(), partials[1], lses[1].t().contiguous()
    )
    assert_close(run(partials, lses)[0], states.double(), 2 * ULPS[dtype], FLOOR[dtype])


def test_base_2(device, dtype):
    partials, lses = partials_of(3, 8, 3, 64, dtype, device)
    lses[0, 1] = -torch.inf
    expected, expected_lse = run(partials, lses)
    output, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    given = lses / math.log(2)
    before = given.clone()
    vllm_kernels.combine_attn_partials(output, partials, given, lse, base2=True)
    assert_close(output, expected.double(), 2 * ULPS[dtype], FLOOR[dtype])
    torch.testing.assert_close(lse * math.log(2), expected_lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(given, before)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_empty_partials(device, dtype, empty):
    partials, lses = partials_of(3, 8, 3, 64, dtype, device)
    lses[0, 1] = lses[2, 2] = empty
    lses[:2, 4] = empty
    lses[:, 3] = empty
    partials[0, 1] = partials[2, 2] = partials[:2, 4] = partials[:, 3] = torch.nan
    output, lse = run(partials, lses)
    assert not output.isnan().any() and not lse.isnan().any()
    assert torch.equal(output[4], partials[2, 4])
    assert (output[3] == 0).all() and (lse[3] == -torch.inf).all()
    check(partials, lses)


def test_far_apart(device, dtype):
    partials, lses = partials_of(3, 6, 2, 64, dtype, device)
    lses[:, 0] = torch.tensor([1e4, -1e4, 0.0], device=device)[:, None]
    lses[:, 1] = torch.tensor([-3e38, 3e38, 3e38], device=device)[:, None]
    lses[:, 2] = -1e30
    check(partials, lses)


def test_nan_stays_in_its_row(device, dtype):
    partials, lses = partials_of(3, 4, 3, 64, dtype, device)
    want, want_lse = run(partials, lses)
    partials[1, 1, 2, 5] = torch.nan
    lses[2, 3, 0] = torch.nan
    output, lse = run(partials, lses)
    assert output[1, 2, 5].isnan() and output[3, 0].isnan().all() and lse[3, 0].isnan()
    output[1, 2, 5], output[3, 0], lse[3, 0] = want[1, 2, 5], want[3, 0], want_lse[3, 0]
    assert torch.equal(output, want) and torch.equal(lse, want_lse)


def test_without_lse_strided_and_many_rows(device, dtype):
    tokens = 30_000 if device == "cuda" else 900
    packed = torch.randn(6, tokens, 4, 65, device=device, dtype=dtype)
    _, lses = partials_of(3, tokens, 6, 64, dtype, device)
    for columns in (slice(0, 64), slice(1, 65)):  # rows of 16 bytes' multiples, and not
        partials = packed[:, :, :3, columns].permute(2, 1, 0, 3)
        output = packed[:, :, 3, columns].transpose(0, 1)
        want, _ = reference.combine_attn_partials(partials, lses)
        vllm_kernels.combine_attn_partials(output, partials, lses)
        assert_close(output, want, ULPS[dtype], FLOOR[dtype])


def test_nothing_to_merge(device, dtype):
    run(*partials_of(3, 0, 4, 64, dtype, device))
    output, lse = run(*partials_of(0, 3, 4, 64, dtype, device))
    assert (output == 0).all() and (lse == -torch.inf).all()
    check(*partials_of(3, 5, 4, 0, dtype, device))


def test_bad_input(device):
    partials, lses = partials_of(3, 5, 4, 64, torch.float32, device)
    good = {
        "output": torch.empty_like(partials[0]),
        "out_partial": partials,
        "lse_partial": lses,
    }
    cases = [
        ({"out_partial": partials.long()}, r"out_partial: expected float32, float16 or bfloat16"),
        ({"out_partial": partials[0]}, r"out_partial: expected shape \[num_partials, num_tokens, "),
        ({"lse_partial": lses.half()}, r"lse_partial: expected float32, got float16"),
        ({"lse_partial": lses[:2]}, r"lse_partial: expected num_partials = 3 \(from out_partial\)"),
        ({"lse_partial": lses.mT.contiguous().mT}, r"lse_partial: expected a contiguous"),
        ({"output": partials[0, :3].clone()}, r"output: expected num_tokens = 5 \(from out_"),
        ({"output": partials[0].half()}, r"output: expected float32 \(from out_partial\), got "),
        ({"output": torch.empty(1, 4, 64, device=device).expand(5, 4, 64)}, r"output: is written"),
        ({"output": partials[1]}, r"output and out_partial overlap in memory$"),
        ({"output_lse": lses[1]}, r"output_lse and lse_partial overlap in memory$"),
        ({"output_lse": lses[0].t().clone()}, r"output_lse: expected num_tokens = 5"),
    ]  # fmt: skip
    for change, message in cases:
        with raises(rf"^combine_attn_partials: {message}"):
            vllm_kernels.combine_attn_partials(**{**good, **change})
    with raises(r"^combine_attn_partials: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.combine_attn_partials(good["output"], partials.requires_grad_(), lses)


def test_too_many_partials(device):
    with raises(
        r"^combine_attn_partials: out_partial: expected num_partials < 2\^31, "
        r"got shape \[2147483648, 0, 4, 64\]$"
    ):
        run(*partials_of(2**31, 0, 4, 64, torch.float32, device))


def test_opcheck_and_compile(device, dtype):
    partials, lses = partials_of(3, 5, 4, 64, dtype, device)
    output, lse = torch.empty_like(partials[0]), torch.empty_like(lses[0])
    opcheck("combine_attn_partials", output, lse, partials, lses)
    opcheck("combine_attn_partials", output, None, partials, lses)
    assert_compiles(vllm_kernels.combine_attn_partials, output, partials, lses, lse)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay(dtype):
    partials, lses = partials_of(9, 64, 32, 128, dtype, "cuda")
    output = torch.empty_like(partials[0])
    assert_graph_replays(
        lambda: vllm_kernels.combine_attn_partials(output, partials, lses),
        lambda: partials.normal_(), output, lambda: run(partials, lses)[0],
    )  # fmt: skip
