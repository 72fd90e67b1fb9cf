"""Providers of vLLM's small ops: the values of vLLM's native code, and what they take."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from fake_vllm import OUT_OF_TREE, RotaryEmbedding, SiluAndMul

from vllm_kernels import reference


@pytest.fixture
def ops(vllm):
    """vLLM's IR ops, with our providers."""
    vllm.install()
    small_ops = importlib.import_module("vllm_kernels.integrations.vllm.small_ops")
    for _ in range(2):
        small_ops.register_small_ops()
    return sys.modules["vllm.ir"].ops


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(ops, dtype, weighted):
    x = torch.randn(5, 3, 64, dtype=dtype)[:, 1:]  # heads of a packed tensor
    weight = torch.randn(64, dtype=dtype) if weighted else None
    impl = ops.rms_norm.impls["vllm_kernels"]
    assert impl.supports_args(x, weight, 1e-6) and not impl.inplace
    want = reference.rms_norm(x, torch.ones(64, dtype=dtype) if weight is None else weight, 1e-6)
    torch.testing.assert_close(impl.call(x, weight, 1e-6), want)


@pytest.mark.parametrize("weighted", [True, False])
def test_fused_add_rms_norm_works_in_place(ops, dtype, weighted):
    x, residual = torch.randn(2, 5, 64, dtype=dtype)
    weight = torch.randn(64, dtype=dtype) if weighted else None
    total = x + residual
    impl = ops.fused_add_rms_norm.impls["vllm_kernels"]
    assert impl.supports_args(x, residual, weight, 1e-6) and impl.inplace
    out, kept = impl.call(x, residual, weight, 1e-6)
    assert out is x and kept is residual
    torch.testing.assert_close(residual, total)
    want = reference.rms_norm(
        total, torch.ones(64, dtype=dtype) if weight is None else weight, 1e-6
    )
    torch.testing.assert_close(x, want)


@pytest.mark.parametrize(
    "x, weight, variance_size",
    [
        (torch.zeros(1, 64), torch.zeros(64), 32),
        (torch.zeros(1, 64), torch.zeros(64, dtype=torch.bfloat16), None),
        (torch.zeros(1, 64, dtype=torch.float64), None, None),
    ],
)
def test_what_vllm_keeps(ops, x, weight, variance_size):
    assert not ops.rms_norm.impls["vllm_kernels"].supports_args(x, weight, 1e-6, variance_size)
    impl = ops.fused_add_rms_norm.impls["vllm_kernels"]
    assert not impl.supports_args(x, x.clone(), weight, 1e-6, variance_size)


def test_silu_and_mul(ops, dtype):
    x = torch.randn(3, 2, 128, dtype=dtype)
    ours = OUT_OF_TREE["SiluAndMul"]
    for forward in (ours().forward_cpu, ours().forward_cuda):
        torch.testing.assert_close(forward(x), reference.silu_and_mul(x))
    assert ours.name == SiluAndMul.name  # so that "+silu_and_mul" means ours


@pytest.mark.parametrize("with_key", [True, False])
def test_rotary_embedding(ops, dtype, with_key):
    angles = torch.randn(20, 16)
    layer = OUT_OF_TREE["RotaryEmbedding"]()
    layer.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    query, key = torch.randn(2, 4, 64, dtype=dtype)  # two heads of 32
    positions = torch.tensor([3, 0, 19, 7])
    table = layer.cos_sin_cache.to(dtype)
    want = [reference.rotary_embedding(positions, x, 32, table, True) for x in (query, key)]
    got = layer.forward_cpu(positions, query, key if with_key else None)
    torch.testing.assert_close(got[0], want[0])
    if with_key:
        torch.testing.assert_close(got[1], want[1])
    assert got[0] is query and (with_key or got[1] is None)
    assert type(layer).name == RotaryEmbedding.name


def test_the_class_of_another_plugin_stays(vllm):
    vllm.install()
    OUT_OF_TREE["SiluAndMul"] = theirs = type("Theirs", (SiluAndMul,), {})
    importlib.import_module("vllm_kernels.integrations.vllm.small_ops").register_small_ops()
    assert OUT_OF_TREE["SiluAndMul"] is theirs and "RotaryEmbedding" in OUT_OF_TREE
