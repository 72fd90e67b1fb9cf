"""fused_decode_attention: bit for bit rope_and_cache and paged_attention, near its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_decode_attention_cases import Case, check, make_case
from helpers import assert_compiles, assert_graph_replays, bits, opcheck, opcheck_float8, to_layout
from paged_attention_cases import EIGHT_BITS, NAN, per_head
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

LENS = [1, 15, 16, 17, 0, 53, 300]


# --- right results


@pytest.mark.parametrize("eight", [None, *EIGHT_BITS], ids=lambda x: str(x).split(".")[-1])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_dtypes(device, dtype, layout, eight, bias, norm):
    check(make_case(device, dtype, LENS, stored=eight, layout=layout, bias=bias, norm=norm))


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_block_sizes(device, layout, block_size):
    b = block_size
    lens = [1, max(b - 1, 1), b, b + 1, 2 * b + 5, 300]
    for dtype, stored in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.int8),
    ):
        check(make_case(device, dtype, lens, block_size=b, stored=stored, layout=layout))


@pytest.mark.parametrize("head_size", [32, 40, 64, 72, 80, 96, 128, 192, 256])
def test_head_sizes(device, layout, head_size):
    """The other axes are drawn along."""
    for index, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        shapes = {"head_size": head_size, "block_size": [8, 16, 32][index], "layout": layout}
        check(make_case(device, dtype, [37, 1, 64], bias=True, **shapes))
        if head_size % 16 == 0:
            check(make_case(device, dtype, [37, 1, 64], stored=EIGHT_BITS[index], **shapes))


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (8, 2), (5, 1), (14, 2), (16, 1), (64, 1),
                                             (71, 1), (32, 8)])  # fmt: skip
def test_groups(device, layout, heads, kv_heads):
    shapes = {"heads": heads, "kv_heads": kv_heads, "layout": layout, "bias": True}
    check(make_case(device, torch.float32, [140, 23], **shapes))
    check(make_case(device, torch.bfloat16, [140, 23], head_size=128, **shapes))
    check(make_case(device, torch.float16, [40, 23], stored=torch.int8, norm=True, **shapes))


@pytest.mark.parametrize("batch", [1, 2, 33, 130])
def test_batches(device, layout, batch):
    """Long sequences too, which are cut in pieces."""
    lens = [(17 * seq) % 90 for seq in range(batch - 1)] + [3000]
    check(make_case(device, torch.bfloat16, lens, 32, 8, 128, layout=layout))


def test_empty_batch(device, dtype, layout):
    case = make_case(device, dtype, [], layout=layout)
    got = vllm_kernels.fused_decode_attention(*case.tensors(), layout=layout)
    assert got.shape == (0, 8, 64)
    assert case.key_cache.isnan().all()


def test_decoding_step_by_step(device, layout):
    """From empty caches on: what every step stores, the next ones read."""
    steps, num_seqs, block_size = 40, 3, 8
    pages = steps // block_size
    tables = torch.randperm(num_seqs * pages).view(num_seqs, pages).int().to(device)
    rows = torch.full((num_seqs * pages, block_size, 2, 32), NAN, device=device)
    keys, values = (to_layout(rows.clone(), layout, is_key) for is_key in (True, False))
    angle = torch.arange(steps)[:, None] * 100.0 ** -(torch.arange(16) / 16)
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(device)
    qkv = torch.randn(steps, num_seqs, 8 * 32, device=device)
    positions = torch.arange(steps, device=device)[:, None].expand(steps, num_seqs)

    turned = [  # [steps, num_seqs, heads, 32], all tokens at once
        reference.rotary_embedding(positions, part.contiguous(), 32, cos_sin, True).double()
        for part in qkv[..., : 6 * 32].unflatten(-1, (6, 32)).split([4, 2], dim=2)
    ]
    key = turned[1].repeat_interleave(2, dim=2)
    value = qkv[..., 6 * 32 :].unflatten(-1, (2, 32)).double().repeat_interleave(2, dim=2)
    logits = torch.einsum("tshd,ushd->shtu", turned[0], key) * 32**-0.5
    causal = torch.ones(steps, steps, dtype=torch.bool, device=device).tril()
    weights = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    want = torch.einsum("shtu,ushd->tshd", weights, value)

    for step in range(steps):
        slots = tables[:, step // block_size].long() * block_size + step % block_size
        lens = torch.full((num_seqs,), step + 1, dtype=torch.int32, device=device)
        got = vllm_kernels.fused_decode_attention(
            qkv[step].clone(), positions[step].contiguous(), cos_sin, keys, values, slots, tables,
            lens, layout=layout,
        )  # fmt: skip
        torch.testing.assert_close(got.double(), want[step], rtol=1e-5, atol=1e-5)


def test_threads_give_right_results(layout):
    """Work is cut by the number of threads; every cut must be right."""
    before = torch.get_num_threads()
    case = make_case("cpu", torch.float32, [2000, 0, 129, 1, 400], heads=4, layout=layout)
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            check(case)
    finally:
        torch.set_num_threads(before)


# --- torch


def schema_arguments(case: Case, **given: object) -> list[object]:
    """As torch.ops.vllm_kernels.fused_decode_attention takes them."""
    out = torch.zeros_like(case.split(case.qkv)[0], memory_format=torch.contiguous_format)
    values = {
        **dict(zip(list(case.__dict__)[:8], case.tensors())),
        **{"out": out, "bias": None, "is_neox": True, "scale": 0.125},
        **case.options, **given,
    }  # fmt: skip
    schema = torch.ops.vllm_kernels.fused_decode_attention.default._schema
    return [values.get(argument.name, argument.default_value) for argument in schema.arguments]


# Schema and fake kernels do not depend on the dtype.
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_opcheck(device, dtype, layout):
    case = make_case(
        device, dtype, [5, 0, 40], layout=layout, bias=True, norm=True, sinks=per_head(8, -1, 1)
    )
    workspace = vllm_kernels.paged_attention_workspace(device)
    opcheck("fused_decode_attention", *schema_arguments(case, workspace=workspace))
    case = make_case(device, dtype, [5, 0, 40], layout=layout, stored=torch.float8_e4m3fn)
    opcheck_float8("fused_decode_attention", *schema_arguments(case))


def test_compiles(device, dtype, layout):
    case = make_case(device, dtype, [5, 0, 40], layout=layout, bias=True, norm=True)

    def call(*tensors: Tensor) -> Tensor:
        return vllm_kernels.fused_decode_attention(*tensors, **case.options)

    ours, compiled = case.copy(), case.copy()
    want = call(*ours.tensors())
    assert_compiles(call, *case.copy().tensors())
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*compiled.tensors())
    assert torch.equal(got, want)
    assert torch.equal(bits(compiled.key_cache), bits(ours.key_cache))
    assert torch.equal(bits(compiled.value_cache), bits(ours.value_cache))


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=["", "fp8"])
def test_graph_replays(device, dtype, layout, stored):
    """Captured at one set of rows, replayed at others: the next step, with rows padded."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    case = make_case(device, dtype, [700, 40, 1200, 8], layout=layout, stored=stored, bias=True)
    fresh = case.copy()
    out = torch.empty(4, 8, 64, device=device, dtype=dtype)

    def call() -> None:
        vllm_kernels.fused_decode_attention(*case.tensors(), **case.options, out=out)

    def refill() -> None:
        fresh.qkv.normal_()
        case.qkv.copy_(fresh.qkv)
        case.seq_lens.copy_(torch.tensor([699, 0, 1199, 0], device=device))
        last = (case.seq_lens - 1).clamp_min(0).long()
        blocks = case.block_tables.gather(1, last[:, None] // 16).squeeze(1)
        slots = torch.where(case.seq_lens > 0, blocks * 16 + last % 16, -1)
        case.slot_mapping.copy_(slots)
        case.positions.copy_(last)

    def want() -> Tensor:
        return replace(case.copy(), qkv=fresh.qkv.clone()).run()

    assert_graph_replays(call, refill, out, want)
    check(replace(case.copy(), qkv=fresh.qkv.clone()))
