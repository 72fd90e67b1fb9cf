"""The norms with 8-bit results: equal to the norm, then quantized, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, opcheck, opcheck_float8, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

EPS = 1e-6
FP8, INT8 = torch.float8_e4m3fn, torch.int8
# name of the op, dtype of the result, group size
STATIC = ("static", FP8, 0)
KINDS = [
    STATIC,
    ("row", FP8, 0),
    ("row", INT8, 0),
    ("group", FP8, 64),
    ("group", FP8, 128),
    ("group", INT8, 64),
    ("group", INT8, 128),
]
kinds = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: "-".join(str(part).removeprefix("torch.") for part in kind)
)
HIDDEN = [1, 7, 32, 64, 128, 640, 4096, 8191, 8192, 16384, 32768, 65536]


def fits(kind: tuple, hidden: int) -> bool:
    return kind[2] == 0 or hidden % kind[2] == 0


def integers(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    """Whose sums of squares are exact in float32, in whatever order: the norms of any kernel agree
    bit for bit."""
    return torch.randint(-8, 9, shape, device=device).to(dtype)


def run(
    kind: tuple,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    scale: float = 0.02,
    scale_ub: Tensor | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """(elements, scales [..., 1 or groups])."""
    form, dtype, group = kind
    if out is None:
        out = torch.full(x.shape, 77, device=x.device, dtype=torch.uint8).view(dtype)
    if form == "static":
        given = torch.tensor(scale, device=x.device)
        if residual is None:
            vllm_kernels.rms_norm_static_fp8_quant(out, x, weight, given, eps)
        else:
            vllm_kernels.fused_add_rms_norm_static_fp8_quant(out, x, residual, weight, given, eps)
        return out, given
    rows = x[..., :1].numel()
    if form == "row":
        scales = torch.full((rows, 1), -1.0, device=x.device) if scales is None else scales
        vllm_kernels.rms_norm_dynamic_per_token_quant(
            out, x, weight, scales, eps, scale_ub, residual
        )
    else:
        groups = x.size(-1) // group
        scales = torch.full((rows, groups), -1.0, device=x.device) if scales is None else scales
        vllm_kernels.rms_norm_per_block_quant(
            out, x, weight, scales, eps, scale_ub, residual, group, scales.stride(-1) != 1
        )
    return out, scales.reshape(*x.shape[:-1], scales.size(-1))


def quantized(
    kind: tuple, normed: Tensor, scale: float = 0.02, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    form, dtype, group = kind
    if form == "static":
        given = torch.tensor(scale, device=normed.device)
        return reference.quantize(normed, given, dtype, divide=False), given
    if form == "row":
        return reference.quantize_rows(normed, dtype, scale_ub)
    return reference.quantize_groups(normed, dtype, group, scale_ub)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1].nan_to_num(nan=-3.0), want[1].nan_to_num(nan=-3.0)), "scales differ"
    different = got[0].view(torch.uint8) != want[0].view(torch.uint8)
    assert not different.any(), (
        f"{different.sum().item()} of {different.numel()} elements differ, first "
        f"{got[0][different][0].item()}, expected {want[0][different][0].item()}"
    )


def check(kind: tuple, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Against this library's norm and the reference's quantization, for integers."""
    if residual is None:
        normed = torch.empty_like(x)
        vllm_kernels.rms_norm(normed, x, weight, EPS)
        assert_same(run(kind, x, weight), quantized(kind, normed))
        return
    normed, total, before = x.clone(), residual.clone(), x.clone()
    vllm_kernels.fused_add_rms_norm(normed, total, weight, EPS)
    assert_same(run(kind, x, weight, residual), quantized(kind, normed))
    assert torch.equal(residual, total), "residual differs"
    assert torch.equal(x, before), "input was written"


@kinds
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_equals_the_norm_then_quantized(device, dtype, kind, tokens, hidden):
    if not fits(kind, hidden):
        pytest.skip("group size does not divide hidden size")
    x, residual = integers(2, tokens, hidden, device=device, dtype=dtype)
    weight = torch.randn(hidden, device=device, dtype=dtype)
    check(kind, x, weight)
    check(kind, x, weight, residual)


@kinds
@pytest.mark.parametrize("hidden", [128, 1024])
def test_many_rows(device, dtype, kind, hidden):
    x, residual = integers(2, 1_500_003 // hidden, hidden, device=device, dtype=dtype)
    weight = torch.randn(hidden, device=device, dtype=dtype)
    check(kind, x, weight)
    check(kind, x, weight, residual)


@kinds
@pytest.mark.parametrize("hidden", [128, 4096])
def test_random_rows_against_the_reference(device, dtype, kind, hidden):
    """Any real numbers: the norms may differ by a unit, and an element then by one step."""
    x = torch.randn(19, hidden, device=device, dtype=dtype)
    weight = torch.randn(hidden, device=device, dtype=dtype)
    got, scales = run(kind, x, weight)
    want, want_scales = quantized(kind, reference.rms_norm(x, weight, EPS))
    torch.testing.assert_close(scales, want_scales, rtol=2.0**-7, atol=0)
    codes = [q.view(torch.uint8).int() for q in (got, want)]
    if kind[1] == INT8:
        codes = [q.int() for q in (got, want)]
    else:  # sign and magnitude: in the order of the values
        codes = [torch.where(c < 128, c, 128 - c) for c in codes]
    steps = (codes[0] - codes[1]).abs()
    assert steps.max() <= 1
    assert (steps > 0).float().mean() < (1e-3 if dtype == torch.float32 else 3e-2)
    if kind != STATIC:  # a large element uses all of the range
        largest = got.float().abs().unflatten(-1, (scales.size(-1), -1)).amax(-1)
        assert (largest == reference.LARGEST[kind[1]]).all()


@kinds
@pytest.mark.parametrize("power", [-30, -8, 8, 30])
def test_magnitudes(device, kind, power):
    """Weights of very different size: scales at their least, static elements that saturate."""
    for dtype in (torch.float32, torch.bfloat16):
        x = integers(6, 256, device=device, dtype=dtype)
        weight = torch.randn(256, device=device, dtype=dtype) * 2.0**power
        check(kind, x, weight)
    if power == -30 and kind != STATIC:
        scales = run(kind, x, weight)[1]
        assert (scales == scales.new_tensor(reference.MIN_SCALE[kind[1]])).all()


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0] != "static" and k[1] == FP8])
@pytest.mark.parametrize("bound", [1e-30, 0.5, 1.7, 1e30])
def test_scale_ub(device, dtype, kind, bound):
    x = integers(9, 640, device=device, dtype=dtype)
    weight = torch.randn(640, device=device, dtype=dtype)
    normed = torch.empty_like(x)
    vllm_kernels.rms_norm(normed, x, weight, EPS)
    scale_ub = torch.tensor([bound], device=device)
    got = run(kind, x, weight, scale_ub=scale_ub)
    assert_same(got, quantized(kind, normed, scale_ub=scale_ub))
    huge = weight.float().mul(3e37 if dtype != torch.float16 else 5e3).to(dtype)
    vllm_kernels.rms_norm(normed, x, huge, EPS)
    normed = normed.clamp(-1e38, 1e38) if dtype != torch.float16 else normed
    got = run(kind, x, huge, scale_ub=scale_ub)
    assert got[0].float().abs().max() <= 448 and not got[0].float().isnan().any()
    assert_same(got, quantized(kind, normed, scale_ub=scale_ub))


@kinds
def test_strided_rows(device, dtype, kind):
    packed = integers(5, 6, 3, 512, device=device, dtype=dtype)
    other = integers(5, 6, 2, 300, device=device, dtype=dtype)
    weight = torch.randn(256, device=device, dtype=dtype)
    for first in (0, 1, 8, 256):
        x = packed[:, :, 1, first : first + 256]
        check(kind, x, weight)
        check(kind, x, weight, other[:, :, 1, :256])
        check(kind, x, weight, other[:, :, 0, 5:261])
    wide = torch.zeros(5, 6, 2, 300, device=device, dtype=torch.uint8)
    for first in (0, 3, 8):
        out = wide.view(kind[1])[:, :, 1, first : first + 256]
        x = packed[:, :, 2, :256]
        got = run(kind, x, weight, out=out)
        assert_same(got, run(kind, x, weight))
        wide[:, :, 1, first : first + 256] = 0
        assert not wide.any()


@pytest.mark.parametrize("kind", [k for k in KINDS if k[0] == "group"])
def test_strides_of_group_scales(device, dtype, kind):
    x = integers(9, 512, device=device, dtype=dtype)
    weight = torch.randn(512, device=device, dtype=dtype)
    groups = 512 // kind[2]
    want = run(kind, x, weight)
    transposed = torch.full((groups, 9), -1.0, device=device).t()
    padded = torch.full((groups, 12), -1.0, device=device).t()
    wide = torch.full((9, groups + 3), -1.0, device=device)
    for scales in (transposed, padded[:9], wide[:, :groups]):
        assert_same(run(kind, x, weight, scales=scales), want)
    assert (padded[9:] == -1).all() and (wide[:, groups:] == -1).all()


@kinds
@pytest.mark.parametrize("hidden", [128, 4096, 32768])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(device, dtype, kind, hidden, bad):
    x = integers(20, hidden, device=device, dtype=dtype)
    weight = torch.randn(hidden, device=device, dtype=dtype)
    want = run(kind, x, weight)
    x[2, 5] = bad
    got, scales = run(kind, x, weight)
    real = got.float() * (scales if kind[0] != "group" else scales.repeat_interleave(kind[2], -1))
    if kind[1] == FP8 or bad != bad:
        assert real[2].isnan().any()
    others = [i for i in range(20) if i != 2]
    if kind != STATIC:
        assert torch.equal(scales[others], want[1][others])
    assert torch.equal(got.view(torch.uint8)[others], want[0].view(torch.uint8)[others])


@kinds
def test_weights_that_are_not_finite(device, dtype, kind):
    """An infinite element: its scale is infinite, and what has that scale becomes NaN."""
    x = integers(4, 256, device=device, dtype=dtype) + 16
    for bad in (float("inf"), float("nan")):
        weight = torch.ones(256, device=device, dtype=dtype)
        weight[3] = bad
        normed = torch.empty_like(x)
        vllm_kernels.rms_norm(normed, x, weight, EPS)
        assert_same(run(kind, x, weight), quantized(kind, normed))


@kinds
def test_zero_rows_and_empty(device, dtype, kind):
    x = torch.zeros(3, 128, device=device, dtype=dtype)
    weight = torch.randn(128, device=device, dtype=dtype)
    for eps in (EPS, 0.0):
        got, scales = run(kind, x, weight, eps=eps)
        assert not got.float().any()
        min_scale = scales.new_tensor(reference.MIN_SCALE[kind[1]])
        assert kind == STATIC or (scales == min_scale).all()
    assert run(kind, x[:0], weight)[0].shape == (0, 128)


def test_every_tie_of_int8_and_e4m3(device):
    """Quotients halfway between two elements go to the even one, on any scale that is exact."""
    weight = torch.arange(-127, 127.5, 0.5, device=device)
    weight = torch.cat([weight, weight.new_tensor([127.0])])  # 510 values, the largest 127
    x = torch.ones(2, weight.numel(), device=device)
    got, scales = run(("row", INT8, 0), x, weight, eps=0.0)
    assert (scales == 1).all()
    assert torch.equal(got[0].float(), weight.round())
    codes = torch.arange(0, 127, device=device, dtype=torch.uint8).view(FP8).float()
    middles = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    middles = torch.cat([middles, -middles])
    x = torch.ones(2, middles.numel(), device=device)
    got, scales = run(("row", FP8, 0), x, middles, eps=0.0)
    assert (scales == 1).all()
    assert torch.equal(got[0].float(), middles.to(FP8).float())


CALLS: dict[str, Callable[..., None]] = {
    "rms_norm_static_fp8_quant": lambda a: (a["out"], a["x"], a["weight"], a["scale"], a["eps"]),
    "fused_add_rms_norm_static_fp8_quant": lambda a: (
        a["out"], a["x"], a["residual"], a["weight"], a["scale"], a["eps"],
    ),
    "rms_norm_dynamic_per_token_quant": lambda a: (
        a["out"], a["x"], a["weight"], a["rows"], a["eps"], a["bound"], a["residual"],
    ),
    "rms_norm_per_block_quant": lambda a: (
        a["out"], a["x"], a["weight"], a["groups"], a["eps"], a["bound"], a["residual"],
        a["group_size"], a["transposed"],
    ),
}  # fmt: skip
ops = pytest.mark.parametrize("name", CALLS)


def arguments(device: str, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    x, residual = torch.randn(2, 4, 128, device=device, dtype=dtype)
    return {
        "x": x,
        "residual": residual,
        "weight": torch.randn(128, device=device, dtype=dtype),
        "out": torch.zeros(4, 128, device=device, dtype=FP8),
        "scale": torch.ones(1, device=device),
        "rows": torch.zeros(4, 1, device=device),
        "groups": torch.zeros(4, 2, device=device),
        "bound": torch.ones(1, device=device),
        "eps": EPS,
        "group_size": 64,
        "transposed": False,
    }


@ops
def test_bad_input(device, name):
    a = arguments(device)
    eight = "float8_e4m3fn" + ("" if "static" in name else " or int8")
    flat = torch.zeros(2048, device=device, dtype=torch.uint8)
    flat[8:12].view(torch.float32).fill_(1)
    cases = [
        ({"x": a["x"].int()}, r"input: expected float32, float16 or bfloat16, got int32$"),
        ({"weight": a["weight"].half()}, r"weight: expected float32 \(from input\), got float16$"),
        (
            {"weight": a["weight"][:32]},
            r"weight: expected hidden_size = 128 \(from input\) at dimension 0, got shape \[32\]$",
        ),
        (
            {"out": a["out"].view(torch.uint8)},
            rf"out: expected {eight}, got uint8; say what its bytes are with "
            r"\.view\(torch\.float8_e4m3fn\)$",
        ),
        ({"out": a["x"].clone()}, rf"out: expected {eight}, got float32$"),
        (
            {"out": a["out"][:3]},
            r"out: expected shape \[4, 128\] \(from input\), got shape \[3, 128\]$",
        ),
        ({"out": a["out"][:1].expand(4, 128)}, r"out: is written, so"),
        (
            {"out": flat[:512].view(FP8).view(4, 128), "weight": flat[:512].view(torch.float32)},
            r"out and weight overlap in memory$",
        ),
        ({"eps": -1.0}, r"epsilon: expected a number >= 0, got -1"),
        ({"x": a["x"].t().contiguous().t()}, r"input: expected stride 1 in the last dimension"),
    ]
    if "static" in name:
        cases += [
            ({"scale": a["scale"].half()}, r"scale: expected float32, got float16"),
            ({"scale": 0.5}, r"scale: expected a float32 tensor of one element, got 0\.5$"),
            *[
                (
                    {"scale": torch.tensor(bad)},
                    rf"scale\[0\] = {bad:g}: expected a finite number > 0",
                )
                for bad in (float("nan"), float("inf"), -1.0)
                if device == "cpu"
            ],
            ({"scale": torch.ones(2, device=device)}, r"scale: expected one element, got .*\[2\]$"),
            (
                {"out": flat[:512].view(FP8).view(4, 128), "scale": flat[8:12].view(torch.float32)},
                r"out and scale overlap in memory$",
            ),
        ]
    if "residual" in CALLS[name].__code__.co_consts:
        cases += [
            (
                {"residual": a["residual"][:3]},
                r"residual: expected shape \[4, 128\] \(from input\), got shape \[3, 128\]$",
            ),
            ({"residual": a["x"]}, r"residual and input overlap in memory$"),
            ({"residual": a["residual"].half()}, r"residual: expected float32 \(from input\)"),
        ]
    if "per_token" in name:
        cases += [
            (
                {"rows": torch.zeros(5, device=device)},
                r"scales: expected one element a row of input, 4, got shape \[5\]$",
            ),
            ({"rows": torch.zeros(4, 2, device=device)[:, :1]}, r"scales: expected a contiguous"),
            ({"rows": a["weight"][:4]}, r"scales and weight overlap in memory$"),
        ]
    if "per_block" in name:
        cases += [
            ({"group_size": 32}, r"group_size: expected 64 or 128, got 32$"),
            (
                {"groups": torch.zeros(2, 4, device=device)},
                r"scales: expected shape \[4, 2\] \(rows, groups\), got shape \[2, 4\]$",
            ),
            ({"transposed": True}, r"scales: expected stride 1 in dimension 0, for is_scale_tran"),
            (
                {"groups": torch.zeros(2, 4, device=device).t()},
                r"scales: expected stride 1 in dimension 1, got stride 4$",
            ),
            (
                {"x": a["x"][:, :96], "out": a["out"][:, :96], "weight": a["weight"][:96],
                 "residual": a["residual"][:, :96]},
                r"out: expected a last dimension that group_size = 64 divides, got .*\[4, 96\]$",
            ),
            ({"groups": a["groups"].half()}, r"scales: expected float32, got float16"),
        ]  # fmt: skip
    if "static" not in name:
        cases += [
            ({"bound": 2.0}, r"scale_ub: expected a float32 tensor of one element, got 2\.0$"),
            ({"bound": torch.ones(2, device=device)}, r"scale_ub: expected one element, got .*"),
            ({"out": a["out"].view(INT8)}, r"scale_ub: expected None for int8$"),
        ]
    for change, message in cases:
        with raises(rf"^{name}: {message}"):
            getattr(vllm_kernels, name)(*CALLS[name]({**a, **change}))
    assert not a["out"].float().any() and not a["rows"].any() and not a["groups"].any()


@ops
def test_inference_only(device, name):
    a = arguments(device)
    call = getattr(vllm_kernels, name)
    with raises(rf"^{name}: \w+: requires grad, .*no_grad\(\)$"):
        call(*CALLS[name]({**a, "weight": torch.nn.Parameter(a["weight"])}))
    with torch.inference_mode():
        call(*CALLS[name](a))


@ops
def test_opcheck_and_compile(device, dtype, name):
    a = arguments(device, dtype)
    if "static" in name:
        opcheck_float8(name, *CALLS[name](a))
        assert_compiles(getattr(vllm_kernels, name), *CALLS[name](a))
        return
    opcheck_float8(name, *CALLS[name](a))
    a |= {"bound": None, "out": a["out"].view(INT8)}
    for residual in (None, a["residual"]):
        opcheck(name, *CALLS[name]({**a, "residual": residual}))
        assert_compiles(getattr(vllm_kernels, name), *CALLS[name]({**a, "residual": residual}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@kinds
def test_graph_replay(dtype, kind):
    x = torch.randn(16, 4096, device="cuda", dtype=dtype)
    weight = torch.randn(4096, device="cuda", dtype=dtype)
    scales = {"static": None, "row": torch.empty(16, 1, device="cuda")}.get(
        kind[0], torch.empty(16, 4096 // (kind[2] or 1), device="cuda")
    )
    bits = torch.empty(16, 4096, device="cuda", dtype=torch.uint8)
    if kind == STATIC:  # its scale would be made inside of the graph
        scale = torch.tensor(0.02, device="cuda")
        call = lambda out: vllm_kernels.rms_norm_static_fp8_quant(  # noqa: E731
            out.view(FP8), x, weight, scale, EPS
        )
    else:
        call = lambda out: run(kind, x, weight, out=out.view(kind[1]), scales=scales)  # noqa: E731

    want_scales: list[Tensor] = []

    def want() -> Tensor:
        out = torch.empty_like(bits)
        call(out)
        if scales is not None:
            want_scales.append(scales.clone())
            scales.fill_(float("nan"))
        return out

    assert_graph_replays(lambda: call(bits), lambda: x.normal_(), bits, want)
    assert scales is None or torch.equal(scales, want_scales[-1])
