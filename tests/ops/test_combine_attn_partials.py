"""merge_attn_parts against its reference: any number of parts, empty ones, strides, bad input."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises
from test_merge_attn_states import FLOOR, ULPS
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference


def parts_of(
    count: int, tokens: int, heads: int, size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    parts = torch.randn(count, tokens, heads, size, device=device, dtype=dtype)
    return parts, torch.randn(count, tokens, heads, device=device) * 5


def run(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    output = torch.full(parts.shape[1:], torch.nan, dtype=parts.dtype, device=parts.device)
    lse = torch.full(lses.shape[1:], torch.nan, device=parts.device)
    vllm_kernels.merge_attn_parts(output, parts, lses, lse)
    return output, lse


def check(parts: Tensor, lses: Tensor) -> None:
    output, lse = run(parts, lses)
    want, want_lse = reference.merge_attn_parts(parts, lses)
    assert_close(output, want, ULPS[output.dtype], FLOOR[output.dtype])
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "tokens", "heads", "size"),
    [(1, 3, 2, 40), (2, 1, 1, 8), (3, 5, 3, 7), (9, 64, 32, 128), (33, 5, 5, 40), (4, 3, 2, 600)],
)
def test_matches_reference(device, dtype, count, tokens, heads, size):
    check(*parts_of(count, tokens, heads, size, dtype, device))


def test_of_two_as_merge_attn_states(device, dtype):
    parts, lses = parts_of(2, 9, 4, 64, dtype, device)
    states = torch.empty_like(parts[0])
    vllm_kernels.merge_attn_states(
        states, parts[0], lses[0].t().contiguous(), parts[1], lses[1].t().contiguous()
    )
    assert_close(run(parts, lses)[0], states.double(), 2 * ULPS[dtype], FLOOR[dtype])


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_empty_parts(device, dtype, empty):
    parts, lses = parts_of(3, 8, 3, 64, dtype, device)
    lses[0, 1] = lses[2, 2] = empty
    lses[:2, 4] = empty
    lses[:, 3] = empty
    parts[0, 1] = parts[2, 2] = parts[:2, 4] = parts[:, 3] = torch.nan  # never looked at
    output, lse = run(parts, lses)
    assert not output.isnan().any() and not lse.isnan().any()
    assert torch.equal(output[4], parts[2, 4])
    assert (output[3] == 0).all() and (lse[3] == -torch.inf).all()
    check(parts, lses)


def test_far_apart(device, dtype):
    parts, lses = parts_of(3, 6, 2, 64, dtype, device)
    lses[:, 0] = torch.tensor([1e4, -1e4, 0.0], device=device)[:, None]
    lses[:, 1] = torch.tensor([-3e38, 3e38, 3e38], device=device)[:, None]
    lses[:, 2] = -1e30
    check(parts, lses)


def test_nan_stays_in_its_row(device, dtype):
    parts, lses = parts_of(3, 4, 3, 64, dtype, device)
    want, want_lse = run(parts, lses)
    parts[1, 1, 2, 5] = torch.nan
    lses[2, 3, 0] = torch.nan
    output, lse = run(parts, lses)
    assert output[1, 2, 5].isnan() and output[3, 0].isnan().all() and lse[3, 0].isnan()
    output[1, 2, 5], output[3, 0], lse[3, 0] = want[1, 2, 5], want[3, 0], want_lse[3, 0]
    assert torch.equal(output, want) and torch.equal(lse, want_lse)


def test_without_lse_strided_and_many_rows(device, dtype):
    tokens = 30_000 if device == "cuda" else 900
    packed = torch.randn(6, tokens, 4, 65, device=device, dtype=dtype)
    _, lses = parts_of(3, tokens, 6, 64, dtype, device)
    for columns in (slice(0, 64), slice(1, 65)):  # rows of 16 bytes' multiples, and not
        parts = packed[:, :, :3, columns].permute(2, 1, 0, 3)
        output = packed[:, :, 3, columns].transpose(0, 1)
        want, _ = reference.merge_attn_parts(parts, lses)
        vllm_kernels.merge_attn_parts(output, parts, lses)
        assert_close(output, want, ULPS[dtype], FLOOR[dtype])


def test_nothing_to_merge(device, dtype):
    run(*parts_of(3, 0, 4, 64, dtype, device))
    output, lse = run(*parts_of(0, 3, 4, 64, dtype, device))
    assert (output == 0).all() and (lse == -torch.inf).all()
    check(*parts_of(3, 5, 4, 0, dtype, device))


def test_bad_input(device):
    parts, lses = parts_of(3, 5, 4, 64, torch.float32, device)
    good = {"output": torch.empty_like(parts[0]), "parts": parts, "part_lses": lses}
    cases = [
        ({"parts": parts.long()}, r"parts: expected float32, float16 or bfloat16"),
        ({"parts": parts[0]}, r"parts: expected shape \[num_parts, num_tokens, num_heads, head_s"),
        ({"part_lses": lses.half()}, r"part_lses: expected float32, got float16"),
        ({"part_lses": lses[:2]}, r"part_lses: expected num_parts = 3 \(from parts\) at dimension"),
        ({"part_lses": lses.mT.contiguous().mT}, r"part_lses: expected a contiguous"),
        ({"output": parts[0, :3].clone()}, r"output: expected num_tokens = 5 \(from parts\) at"),
        ({"output": parts[0].half()}, r"output: expected float32 \(from parts\), got float16$"),
        ({"output": torch.empty(1, 4, 64, device=device).expand(5, 4, 64)}, r"output: is written"),
        ({"output": parts[1]}, r"output and parts overlap in memory$"),
        ({"output_lse": lses[1]}, r"output_lse and part_lses overlap in memory$"),
        ({"output_lse": lses[0].t().clone()}, r"output_lse: expected num_tokens = 5"),
    ]  # fmt: skip
    for change, message in cases:
        with raises(rf"^merge_attn_parts: {message}"):
            vllm_kernels.merge_attn_parts(**{**good, **change})
    with raises(r"^merge_attn_parts: inference only: use torch.no_grad\(\)$"):
        vllm_kernels.merge_attn_parts(good["output"], parts.requires_grad_(), lses)


def test_opcheck_and_compile(device, dtype):
    parts, lses = parts_of(3, 5, 4, 64, dtype, device)
    output, lse = torch.empty_like(parts[0]), torch.empty_like(lses[0])
    opcheck("merge_attn_parts", output, lse, parts, lses)
    opcheck("merge_attn_parts", output, None, parts, lses)
    assert_compiles(vllm_kernels.merge_attn_parts, output, parts, lses, lse)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay(dtype):
    parts, lses = parts_of(9, 64, 32, 128, dtype, "cuda")
    output = torch.empty_like(parts[0])
    assert_graph_replays(
        lambda: vllm_kernels.merge_attn_parts(output, parts, lses),
        lambda: parts.normal_(), output, lambda: run(parts, lses)[0],
    )  # fmt: skip
