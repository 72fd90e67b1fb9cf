"""fused_decode_attention with each of its options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_decode_attention_cases import check, make_case
from helpers import bits, raises
from paged_attention_cases import EIGHT_BITS, per_head

import vllm_kernels


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary", [2, 16, 30, 48, 64])
def test_rotations(device, dtype, layout, is_neox, rotary):
    for cosines in (dtype, torch.float32):
        case = make_case(device, dtype, [37, 1], rotary=rotary, layout=layout, cosines=cosines)
        check(case.with_options(is_neox=is_neox))


@pytest.mark.parametrize("names", [["alibi_slopes"], ["sliding_window"], ["softcap"], ["sinks"],
                                   ["scale"], ["alibi_slopes", "sliding_window", "softcap",
                                               "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
def test_options(device, dtype, layout, names):
    options = {
        "alibi_slopes": per_head(8, 0.01, 0.4),
        "sliding_window": 21,
        "softcap": 2.0,
        "sinks": per_head(8, -3.0, 4.0),
        "scale": 0.3,
    }
    chosen = {name: options[name] for name in names}
    check(make_case(device, dtype, [5, 16, 0, 65, 200], layout=layout, bias=True, **chosen))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 2**40])
def test_windows(device, layout, window):
    """A window of 1 leaves the new token alone."""
    shapes = {"layout": layout, "sliding_window": window}
    case = make_case(device, torch.float32, [1, 16, 17, 300], **shapes)
    got = check(case)
    if window == 1:
        value = case.split(case.qkv)[2].repeat_interleave(4, dim=1)
        assert torch.equal(got, value)


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=lambda x: str(x).split(".")[-1])
def test_scales(device, dtype, layout, stored):
    shapes = {"stored": stored, "layout": layout, "kv_heads": 4}
    check(make_case(device, dtype, [7, 100], scales_per_head=True, **shapes))
    plain = make_case(device, dtype, [7, 100], **shapes)
    only_k = plain.with_options(v_scale=None)
    check(only_k)
    if stored != torch.int8:
        check(only_k.with_options(k_scale=None))


def test_new_out_and_default_scale(device, dtype, layout):
    case = make_case(device, dtype, [40, 17, 3], layout=layout)
    want = case.copy().run()
    ours = case.copy()
    got = vllm_kernels.fused_decode_attention(*ours.tensors(), layout=layout, scale=64**-0.5)
    assert got.shape == (3, 8, 64) and got.is_contiguous() and torch.equal(got, want)


def test_fixed_split_size_make_a_batch_invariant(device, dtype, layout):
    case = make_case(device, dtype, [3000, 45, 700, 1], layout=layout, fixed_split_size=256)
    got = check(case)
    for seq in range(4):
        rows = slice(seq, seq + 1)
        alone = replace(
            case.copy(),
            **{name: getattr(case, name)[rows].clone() for name in (
                "qkv", "positions", "slot_mapping", "block_tables", "seq_lens"
            )},
        )  # fmt: skip
        assert torch.equal(alone.run(), got[rows]), seq


def test_workspace(device):
    case = make_case(device, torch.bfloat16, [3000, 20])
    want = case.copy().run()
    workspace = vllm_kernels.paged_attention_workspace(device)
    for _ in range(2):
        assert torch.equal(case.with_options(workspace=workspace).copy().run(), want)
    if device == "cuda":
        for bad in (workspace[:4096], workspace[1:]):
            ours = case.with_options(workspace=bad).copy()
            with raises(r"^fused_decode_attention: workspace: expected at least 41943040 bytes, "):
                ours.run()
            assert torch.equal(ours.qkv, case.qkv), "written before it was refused"
            assert torch.equal(bits(ours.key_cache), bits(case.key_cache))
