"""fused_qk_norm_rope: as rms_norm and rotary_embedding one after the other."""

from __future__ import annotations

import pytest
import torch
from helpers import EPSILON, assert_close, assert_compiles, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

MAX_POSITION = 64


def arguments(
    device: str,
    dtype: torch.dtype,
    tokens: int = 5,
    heads: tuple[int, int, int] = (4, 2, 2),
    size: int = 128,
    rotary: int | None = None,
    is_neox: bool = True,
) -> list[object]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    rotary = size if rotary is None else rotary
    angle = torch.arange(MAX_POSITION)[:, None] * 100.0 ** -(torch.arange(0, rotary, 2) / rotary)
    cosines = torch.cat([angle.cos(), angle.sin()], -1).to(device, dtype)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device)
    return [randn(tokens, sum(heads) * size), *heads, size, 1e-6, randn(size), randn(size),
            cosines, is_neox, positions]  # fmt: skip


def check(args: list[object]) -> None:
    want = reference.fused_qk_norm_rope(*args)
    qkv, (q, k, _), size = args[0], args[1:4], args[4]
    values = qkv[:, (q + k) * size :].clone()
    vllm_kernels.fused_qk_norm_rope(*args)
    # The norm's sum has an order of its own, so that a normalized value may be the neighbour of the
    # reference's: an error of the pair's size, where the rotation leaves a small difference.
    largest = want.abs().max().item() if want.numel() else 0.0
    assert_close(qkv, want, 2, 2 * EPSILON[qkv.dtype] * largest)
    assert torch.equal(qkv[:, (q + k) * size :], values)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("size", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("part", [1, 2, 4])
def test_matches_reference(device, dtype, size, part, is_neox):
    for tokens in (1, 300):
        rotary = size // part // 2 * 2
        check(arguments(device, dtype, tokens, size=size, rotary=rotary, is_neox=is_neox))


@pytest.mark.parametrize("heads", [(1, 1, 0), (32, 8, 8), (128, 128, 128), (3, 0, 0)])
def test_heads(device, dtype, heads):
    check(arguments(device, dtype, 3, heads, 64))


def test_equal_to_the_ops_apart_on_a_cpu(dtype):
    args = arguments("cpu", dtype)
    apart = args[0].clone()
    heads = apart.unflatten(-1, (8, 128))
    for part, weight in ((heads[:, :4], args[6]), (heads[:, 4:6], args[7])):
        vllm_kernels.rms_norm(part, part, weight, 1e-6)
    vllm_kernels.rotary_embedding(args[10], heads[:, :4], heads[:, 4:6], 128, args[8], True)
    vllm_kernels.fused_qk_norm_rope(*args)
    assert torch.equal(args[0], apart)


def test_strided_tokens(device, dtype):
    args = arguments(device, dtype)
    for first in (0, 1):
        wide = torch.randn(5, 8 * 128 + 8, device=device, dtype=dtype)
        args[0] = wide[:, first : first + 8 * 128]
        check(args)


def test_empty(device, dtype):
    check(arguments(device, dtype, 0))


def test_bad_input(device):
    args = arguments(device, torch.float16)

    def bad(message: str, index: int, value: object) -> None:
        with raises("^fused_qk_norm_rope: " + message):
            vllm_kernels.fused_qk_norm_rope(*args[:index], value, *args[index + 1 :])

    bad(r"qkv: expected \(num_heads_q \+ num_heads_k \+ num_heads_v\) \* head_dim = 1152 at "
        r"dimension 1, got shape \[5, 1024\]", 1, 5)  # fmt: skip
    bad(r"num_heads_k: expected 0 to 65536 heads, got -1", 2, -1)
    bad(r"head_dim: expected 1 to 256, got 0", 4, 0)
    bad(r"eps: expected a number >= 0, got nan", 5, float("nan"))
    bad(r"q_weight: expected head_dim = 128", 6, args[6][:64])
    bad(r"k_weight: expected float16", 7, args[7].float())
    bad(r"position_ids: expected int64", 10, args[10].int())
    if device == "cpu":
        bad(r"position_ids\[0\] = -1: expected a position", 10, torch.full((5,), -1))


def test_opcheck(device, dtype):
    opcheck("fused_qk_norm_rope", *arguments(device, dtype))


def test_compiles(device):
    assert_compiles(vllm_kernels.fused_qk_norm_rope, *arguments(device, torch.float32))


def test_graph_replays(device, dtype):
    if device == "cpu":
        pytest.skip("needs a GPU")
    args, fresh = arguments(device, dtype), arguments(device, dtype)
    graph = torch.cuda.CUDAGraph()
    vllm_kernels.fused_qk_norm_rope(*args)
    with torch.cuda.graph(graph):
        vllm_kernels.fused_qk_norm_rope(*args)
    args[0].copy_(fresh[0])
    graph.replay()
    vllm_kernels.fused_qk_norm_rope(fresh[0], *args[1:])
    torch.cuda.synchronize()
    assert torch.equal(args[0], fresh[0])
