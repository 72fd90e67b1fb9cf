"""Fake and meta tensors: a call is checked as with real ones, and nothing is computed."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from helpers import raises
from torch import Tensor

import vllm_kernels

EPS = 1e-6
META = {"device": "meta"}


def bad_calls(**options: object) -> list[tuple[str, tuple, str]]:
    """(op, arguments, the message after "op: "); options: of every tensor, such as its device."""
    i32 = {"dtype": torch.int32, **options}
    x, weight = torch.zeros(4, 64, **options), torch.zeros(64, **options)
    cache, one = torch.zeros(4, 16, 2, 32, **options), torch.ones(1, **options)
    rows, slots = torch.zeros(3, 2, 32, **options), torch.zeros(3, dtype=torch.int64, **options)
    tables, lens = torch.zeros(3, 2, **i32), torch.zeros(3, **i32)
    pairs = torch.zeros(1, 2, dtype=torch.int64, **options)
    mla = torch.zeros(4, 16, 656, dtype=torch.uint8, **options)
    scalars = (0.1, None, 0, 0.0, None, None, None, "NHD", 1, None)
    return [
        ("rms_norm", (torch.zeros(9, 9, dtype=torch.int64, **options), x, weight, EPS),
         r"out: expected float32 \(from input\), got int64$"),
        ("rms_norm", (torch.zeros(9, 9, **options), x, weight, EPS),
         r"out: expected shape \[4, 64\] \(from input\), got shape \[9, 9\]$"),
        ("rms_norm", (x, x, weight[:32], EPS), r"weight: expected hidden_size = 64 \(from input\)"),
        ("rms_norm", (x, x, weight, -1.0), r"epsilon: expected a number >= 0, got -1"),
        ("silu_and_mul", (x, x), r"out: expected the shape of input, \[4, 64\], with the last dim"),
        ("rotary_embedding", (slots, x, None, 64, x, True), r"query: expected tokens = 3 \(from p"),
        ("reshape_and_cache_flash", (rows, rows, cache, cache.half(), slots, "auto", one, one),
         r"value_cache: expected float32 \(from kv_cache_dtype = \"auto\"\), got float16$"),
        ("copy_blocks", ([cache], [cache[:2]], pairs), r"value_caches: expected num_blocks = 4"),
        ("copy_blocks_mla", ([cache], pairs.int()), r"block_mapping: expected int64, got int32"),
        ("swap_blocks", (cache, cache[:, :8], pairs), r"dst: expected blocks of the shape and"),
        ("paged_attention", (rows, None, rows, cache, cache, tables.long(), lens, None, *scalars),
         r"block_tables: expected int32, got int64; cast it with .int\(\)$"),
        ("paged_attention", (rows, None, rows, cache, cache[:2], tables, lens, None, *scalars),
         r"key_cache: expected .*|value_cache: expected num_blocks = 4 \(from key_cache\)"),
        ("gather_paged_kv", (rows, rows[:2], cache, cache, tables, lens, None, None, None, "NHD"),
         r"value: expected num_rows = 3 \(from key\) at dimension 0"),
        ("cp_gather_and_upconvert_fp8_kv_cache", (mla, x, tables, lens, lens, 3),
         r"dst: expected kv_lora_rank \+ pe_dim = 576 \(from fp8_ds_mla\) at dimension 1"),
        ("merge_attn_states", (rows, None, rows, lens.float(), rows, lens.float()),
         r"prefix_lse: expected shape \[num_heads, num_tokens\], got shape \[3\]$"),
        ("convert_fp8", (x, x, 1.0, "fp8"), r"input: expected uint8 or float8_e4m3fn"),
    ]  # fmt: skip


@pytest.mark.parametrize("index", range(len(bad_calls(device="meta"))))
def test_meta_tensors_are_checked_as_real_ones(index):
    for options in ({}, META):
        op, arguments, message = bad_calls(**options)[index]
        with raises(rf"^{op}: {message}"):
            getattr(torch.ops.vllm_kernels, op)(*arguments)


def test_good_calls_of_meta_tensors():
    x, weight = torch.zeros(4, 64, **META), torch.zeros(64, **META)
    vllm_kernels.rms_norm(torch.empty_like(x), x, weight, EPS)
    cache, ints = torch.zeros(4, 16, 2, 32, **META), torch.zeros(3, dtype=torch.int32, **META)
    rows, starts = torch.zeros(3, 2, 32, **META), torch.zeros(4, dtype=torch.int32, **META)
    out = vllm_kernels.paged_attention(
        rows, cache, cache, ints[:, None], ints, query_start_loc=starts, layout="NHD"
    )
    assert out.is_meta and out.shape == rows.shape
    vllm_kernels.gather_paged_kv(
        rows, rows.clone(), cache, cache, ints[:, None], starts, seq_starts=ints, layout="NHD"
    )
    vllm_kernels.varlen_attention(rows, rows, rows, starts, starts)
    mla = torch.zeros(4, 16, 656, dtype=torch.uint8, **META)
    vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(
        mla, torch.zeros(9, 576, **META), ints[:, None], ints, ints, 3
    )


def test_one_meta_tensor_of_a_copy_is_named():
    """A mapping may be on the CPU wherever the caches are, but not without memory beside them."""
    cache, pairs = torch.ones(4, 8), torch.tensor([[0, 1]])
    meta = cache.to("meta")
    mapping = r"block_mapping: expected a tensor on cpu, got meta$"
    for op, arguments, message in (
        (vllm_kernels.swap_blocks, (cache, cache.clone(), pairs.to("meta")), mapping),
        (vllm_kernels.swap_blocks, (meta, cache, pairs),
         r"src: expected a tensor on cpu \(from dst\), got meta$"),
        (vllm_kernels.swap_blocks, (cache, meta, pairs),
         r"dst: expected a tensor on cpu \(from src\), got meta$"),
        (vllm_kernels.copy_blocks, ([cache], [cache.clone()], pairs.to("meta")), mapping),
        (vllm_kernels.copy_blocks, ([cache], [meta], pairs),
         r"value_caches: expected a tensor on cpu \(from key_caches\), got meta$"),
        (vllm_kernels.copy_blocks_mla, ([cache], pairs.to("meta")), mapping),
        (vllm_kernels.copy_blocks_mla, ([cache, meta], pairs),
         r"kv_caches: expected a tensor on cpu \(from kv_caches\), got meta$"),
    ):  # fmt: skip
        with raises(rf"^{op.__name__}: {message}"):
            op(*arguments)
    for given in (pairs, pairs.to("meta")):
        vllm_kernels.swap_blocks(meta, meta.clone(), given)
        vllm_kernels.copy_blocks([meta], [meta.clone()], given)
        vllm_kernels.copy_blocks_mla([meta], given)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    vllm_kernels.rms_norm(out, x, weight, EPS)
    return out


def test_compile_refuses_what_the_op_refuses():
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"rms_norm: weight: expected hidden_size = 64 \(from in"):
        torch.compile(norm, fullgraph=True, backend="eager")(torch.randn(4, 64), torch.ones(32))


@pytest.mark.parametrize(("backend", "graphs"), [("eager", 1), ("aot_eager", 2)])
def test_dynamic_shapes_stay_dynamic(backend, graphs):
    """The checks ask for examples of symbolic sizes and add no guard: one graph serves all. (AOT
    autograd makes a second one by itself, with a fake kernel that checks nothing, too.)"""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(norm, fullgraph=True, backend=counter, dynamic=True)
    for rows, width in ((4, 64), (7, 64), (5, 96), (300, 128)):
        x, weight = torch.randn(rows, width), torch.randn(width)
        assert torch.equal(compiled(x, weight), norm(x, weight))
    assert counter.frame_count == graphs


def test_sizes_that_depend_on_data_are_left_to_the_call():
    torch._dynamo.reset()

    def call(x: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
        return norm(x[keep], weight)

    x, weight, keep = torch.randn(6, 64), torch.randn(64), torch.arange(6) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, weight, keep), norm(x[keep], weight))
