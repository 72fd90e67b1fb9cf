"""convert_fp8 against its reference, bit for bit: all bytes, rounding, saturation, bad input."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

KINDS = ["fp8", "fp8_e4m3", "fp8_e5m2"]


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(got, 12345.0), torch.nan_to_num(want, 12345.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.5e-3, 1000.0])
def test_every_byte_to_float(device, dtype, kind, scale):
    eight = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.empty(256, dtype=dtype, device=device)
    vllm_kernels.convert_fp8(out, eight, scale, kind)
    want = reference.from_fp8(eight, scale, kind, dtype)
    assert same_bits(out, want) and torch.equal(out.isnan(), want.isnan())


@pytest.mark.parametrize("kind", KINDS)
def test_every_16_bit_float(device, kind):
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
        for scale in (1.0, 0.37, 4.0):
            out = torch.empty(x.shape, dtype=torch.uint8, device=device)
            vllm_kernels.convert_fp8(out, x, scale, kind)
            assert torch.equal(out, reference.to_fp8(x, scale, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_floats_around_every_rounding_border(device, kind):
    values = torch.arange(127, dtype=torch.uint8).view(reference.FP8[kind]).float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2  # ties: to even
    x = torch.cat([values, middle, torch.nextafter(middle, torch.tensor(torch.inf)),
                   torch.nextafter(middle, torch.tensor(-torch.inf)), values[-1:] * 2,
                   torch.tensor([torch.inf, torch.nan, 1e-30, 1e38, 2.0**-149])])  # fmt: skip
    x = torch.cat([x, -x]).to(device)
    out = torch.empty(x.shape, dtype=torch.uint8, device=device)
    vllm_kernels.convert_fp8(out, x, 1.0, kind)
    assert torch.equal(out, reference.to_fp8(x, 1.0, kind))


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 100, 8191, 70_001])
def test_lengths(device, dtype, n):
    x = torch.randn(n, device=device, dtype=dtype) * 100
    eight = torch.empty(n, dtype=torch.uint8, device=device)
    vllm_kernels.convert_fp8(eight, x, 0.7, "fp8")
    assert torch.equal(eight, reference.to_fp8(x, 0.7, "fp8"))
    back = torch.empty_like(x)
    vllm_kernels.convert_fp8(back, eight, 0.7, "fp8")
    assert torch.equal(back, reference.from_fp8(eight, 0.7, "fp8", dtype))


def test_unaligned(device, dtype):
    x = torch.randn(1000, device=device, dtype=dtype)[3:]
    eight = torch.zeros(1001, dtype=torch.uint8, device=device)
    vllm_kernels.convert_fp8(eight[1:998], x)
    assert torch.equal(eight[1:998], reference.to_fp8(x, 1.0, "fp8"))
    assert eight[0] == 0 and (eight[998:] == 0).all()


def test_shapes_may_differ_and_float8_tensors(device, dtype):
    x = torch.randn(4, 2, 8, 16, 8, device=device, dtype=dtype)
    for kind, eight_type in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        eight = torch.zeros(4, 2, 4, 16, 16, dtype=torch.uint8, device=device).view(eight_type)
        vllm_kernels.convert_fp8(eight, x, 1.0, kind)
        want = reference.to_fp8(x, 1.0, kind)
        assert torch.equal(eight.view(torch.uint8).flatten(), want.flatten())
        back = torch.empty(x.numel(), device=device, dtype=dtype)
        vllm_kernels.convert_fp8(back, eight, 1.0, kind)
        assert torch.equal(back, reference.from_fp8(want, 1.0, kind, dtype).flatten())


def test_memory_order_of_permuted_tensors(device, dtype):
    """Both sides in one permutation, and a permuted side beside another shape."""
    memory = torch.randn(3, 5, 2, 7, device=device, dtype=dtype)
    want = reference.to_fp8(memory, 0.5, "fp8").flatten()
    for order in ((0, 2, 1, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        x = memory.permute(order)
        eight = torch.zeros(3, 5, 2, 7, dtype=torch.uint8, device=device).permute(order)
        vllm_kernels.convert_fp8(eight, x, 0.5)
        assert torch.equal(eight, reference.to_fp8(x, 0.5, "fp8"))
        flat = torch.zeros(210, dtype=torch.uint8, device=device)
        vllm_kernels.convert_fp8(flat, x, 0.5)
        assert torch.equal(flat, want)
        back = torch.zeros_like(memory).permute(order)
        vllm_kernels.convert_fp8(back, flat, 0.5)
        flat_back = reference.from_fp8(want, 0.5, "fp8", dtype)
        assert torch.equal(back, flat_back.view(memory.shape).permute(order))
    narrow = torch.zeros(1, 4, dtype=torch.uint8, device=device)  # strides of size 1 are free
    vllm_kernels.convert_fp8(narrow.as_strided((1, 4), (9, 1)), memory.flatten()[:4].view(1, 4))
    assert torch.equal(narrow, reference.to_fp8(memory.flatten()[:4], 1.0, "fp8")[None])


def test_empty(device):
    vllm_kernels.convert_fp8(
        torch.empty(0, dtype=torch.uint8, device=device), torch.empty(0, device=device)
    )


def test_bad_input(device):
    x = torch.randn(4, 8, device=device)
    eight = torch.zeros(4, 8, dtype=torch.uint8, device=device)
    cases = [
        ((eight, x, 1.0, "auto"),
         r'kv_dtype: expected "fp8", "fp8_e4m3" or "fp8_e5m2", got "auto"$'),
        ((eight, x, 1.0, "e4m3"), r"kv_dtype: expected .*, got \"e4m3\"$"),
        ((eight, eight.clone(), 1.0), r"input: expected float32, float16 or bfloat16, got uint8$"),
        ((torch.empty_like(x), x),
         r"input: expected uint8 or float8_e4m3fn .from kv_dtype = \"fp8\".*, got float32$"),
        ((eight.view(torch.float8_e5m2), x, 1.0, "fp8"),
         r"output: expected uint8 or float8_e4m3fn .*, got float8_e5m2$"),
        ((eight, x, float("nan")), r"scale: expected a number that is finite in float32, got nan$"),
        ((eight, x, 1e39), r"scale: expected a number that is finite in float32, got 1e\+39$"),
        ((eight, x, 0.0), r"scale: expected a number > 0, got 0$"),
        ((x, eight, -1.0), r"scale: expected a number > 0, got -1$"),
        ((x, eight, 1e-60), r"scale: expected a number > 0, got 1e-60$"),  # 0 in float32
        ((eight[:3], x), r"output: expected as many elements as input = 32, got shape \[3, 8\]$"),
        ((eight, x[:, ::2]),
         r"input: expected elements without gaps in memory, got shape \[4, 4\] with gaps; call "
         r".contiguous\(\)$"),
        ((eight[:1].expand(4, 8), x), r"output: expected elements without gaps in memory, got sh"),
        ((eight.flatten().as_strided((2, 2), (0, 3)), x[:2, :2]), r"output: expected elements wi"),
        ((eight, x.t().contiguous().t()),
         r"output: expected the strides of input, which has the same shape, got stride 8 in place "
         r"of 1 at dimension 0$"),
        ((x.view(torch.uint8).flatten()[:32], x), r"output and input overlap in memory$"),
    ]  # fmt: skip
    for args, message in cases:
        with raises(rf"^convert_fp8: {message}"):
            vllm_kernels.convert_fp8(*args)


def test_inference_only(device):
    x = torch.randn(4, device=device, requires_grad=True)
    with raises(r"^convert_fp8: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.convert_fp8(torch.empty(4, dtype=torch.uint8, device=device), x)


def test_opcheck_and_compile(device, dtype):
    x = torch.randn(4, 8, device=device, dtype=dtype)
    eight = torch.zeros(4, 8, dtype=torch.uint8, device=device)
    opcheck("convert_fp8", eight, x, 1.0, "fp8")
    opcheck("convert_fp8", x, eight)
    assert_compiles(vllm_kernels.convert_fp8, eight, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay(dtype):
    x = torch.randn(4096, device="cuda", dtype=dtype)
    eight = torch.empty(4096, dtype=torch.uint8, device="cuda")
    vllm_kernels.convert_fp8(eight, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vllm_kernels.convert_fp8(eight, x)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(eight, reference.to_fp8(x, 1.0, "fp8"))
