"""scaled_fp8_quant, scaled_int8_quant and their ops: equal to the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, bits, opcheck, opcheck_float8, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference
from vllm_kernels.errors import InvalidArgument

FP8, INT8 = torch.float8_e4m3fn, torch.int8
INFINITY = float("inf")
# Keywords of scaled_fp8_quant or scaled_int8_quant; a number stands for a tensor on the device.
FORMS: dict[str, dict[str, object]] = {
    "fp8 given": {"scale": 0.02},
    "fp8 tensor": {},
    "fp8 row": {"use_per_token_if_dynamic": True},
    "fp8 row bounded": {"use_per_token_if_dynamic": True, "scale_ub": 1.5},
    "int8 given": {"scale": 0.02},
    "int8 given azp": {"scale": 0.02, "azp": -7, "symmetric": False},
    "int8 row": {},
    "int8 row azp": {"symmetric": False},
}
forms = pytest.mark.parametrize("form", FORMS)
row_forms = pytest.mark.parametrize("form", [form for form in FORMS if "row" in form])
WIDTHS = [1, 3, 7, 8, 64, 100, 256, 1000, 4096, 8191, 8192, 40_000]


def keywords(form: str, device: str) -> dict[str, object]:
    dtypes = {"scale": torch.float32, "scale_ub": torch.float32, "azp": torch.int32}
    return {
        name: torch.tensor([value], device=device, dtype=dtypes[name]) if name in dtypes else value
        for name, value in FORMS[form].items()
    }


def run(form: str, x: Tensor, module=vllm_kernels) -> tuple[Tensor, ...]:
    """(elements, scales, and for int8 the zero points or None)."""
    name = "scaled_fp8_quant" if "fp8" in form else "scaled_int8_quant"
    return getattr(module, name)(x, **keywords(form, x.device.type))


def assert_same(got: tuple, want: tuple) -> None:
    assert len(got) == len(want)
    for one, other, name in zip(got, want, ("elements", "scales", "zero points")):
        if other is None:
            assert one is None, name
            continue
        one, other = (t.float().nan_to_num(nan=-3e38) for t in (one, other.view_as(one)))
        different = one != other
        assert not different.any(), (
            f"{name}: {different.sum().item()} of {different.numel()} differ, first "
            f"{one[different][0].item()}, expected {other[different][0].item()}"
        )


def check(form: str, x: Tensor) -> None:
    before = x.clone()
    assert_same(run(form, x), run(form, x, reference))
    assert torch.equal(bits(x), bits(before)), "input was written"


@forms
@pytest.mark.parametrize("width", WIDTHS)
def test_matches_reference(device, dtype, form, width):
    for rows in (1, 5):
        check(form, torch.randn(rows, width, device=device, dtype=dtype))


@forms
def test_many_rows(device, dtype, form):
    for rows, width in ((3000, 64), (700, 1024), (600, 8192), (2000, 77)):
        check(form, torch.randn(rows, width, device=device, dtype=dtype))


@forms
def test_dimensions_and_strides(device, dtype, form):
    """Rows of a packed tensor, aligned to 16 bytes or not, and dimensions that do not fold."""
    packed = torch.randn(4, 6, 300, device=device, dtype=dtype)
    for x in (packed[..., :128], packed[..., 1:129], packed[:, ::2, 8:264], packed[0, 0, :100]):
        check(form, x)
    wide = torch.zeros(4, 6, 300, device=device, dtype=torch.uint8)
    want, scale = run("fp8 given", packed[..., :128], reference)
    for first in (0, 16, 3):
        out = wide.view(FP8)[..., first : first + 128]
        vllm_kernels.static_scaled_fp8_quant(out, packed[..., :128], scale)
        assert torch.equal(bits(out), bits(want))
        wide[..., first : first + 128] = 0
        assert not wide.any(), "wrote outside of out"


@forms
def test_extreme_magnitudes(device, dtype, form):
    largest = torch.finfo(dtype).max
    for magnitude in (0.0, 1e-30, 1e-6, 1e4, largest):
        x = torch.randn(4, 100, device=device).mul(magnitude / 4).to(dtype)
        x[1] = 0
        x[2] = x[2, 0].item()  # equal elements
        x[3, 1] = magnitude
        check(form, x)


@row_forms
@pytest.mark.parametrize("bad", [float("nan"), INFINITY, -INFINITY])
def test_a_bad_value_stays_in_its_row(device, dtype, form, bad):
    x = torch.randn(5, 300, device=device, dtype=dtype)
    clean = run(form, x)
    x[2, 133] = bad
    got = run(form, x)
    check(form, x)
    others = [0, 1, 3, 4]
    assert_same(
        tuple(None if t is None else t[others] for t in got),
        tuple(None if t is None else t[others] for t in clean),
    )
    if "bounded" not in form or bad != bad:
        assert not got[1][2].isfinite().any()
    if "int8" in form:
        assert not got[0][2].any()


@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
def test_bad_values_with_a_scale_of_the_tensor(device, dtype, bad):
    for form in ("fp8 given", "fp8 tensor", "int8 given", "int8 given azp"):
        x = torch.randn(5, 300, device=device, dtype=dtype)
        x[2, 133] = bad
        check(form, x)


def test_int8_is_exact_where_values_are_multiples_of_the_scale(device):
    x = torch.arange(-128, 128, device=device).float()[None]
    for azp in (0, 5, -200, 2**21):
        shifted = torch.tensor(azp, device=device, dtype=torch.int32)
        out = torch.empty(1, 256, device=device, dtype=INT8)
        vllm_kernels.static_scaled_int8_quant(out, x / 4, torch.tensor(0.25).to(device), shifted)
        assert torch.equal(out, (x + azp).clamp(-128, 127).to(INT8))
    elements, scales, azp = vllm_kernels.scaled_int8_quant(x + 1000, symmetric=False)
    assert scales.item() == 1 and torch.equal((elements - azp).float(), x + 1000)


def test_rows_of_nearly_equal_elements_keep_their_value(device):
    """Where vLLM's scale would be 0."""
    x = torch.full((2, 64), 1000.0, device=device)
    x[1, 5] = 1000.001
    elements, scales, azp = vllm_kernels.scaled_int8_quant(x, symmetric=False)
    assert ((elements - azp) * scales - x).abs().max() <= 2000 * 2.0**-21


def test_padding_and_given_output(device, dtype):
    x = torch.randn(5, 64, device=device, dtype=dtype)
    for form in ("fp8 given", "fp8 tensor", "fp8 row"):
        given = keywords(form, device)
        want, scales = vllm_kernels.scaled_fp8_quant(x, **given)
        padded, padded_scales = vllm_kernels.scaled_fp8_quant(x, num_token_padding=17, **given)
        assert padded.shape == (17, 64) and torch.equal(bits(padded[:5]), bits(want))
        assert len(padded_scales) == (17 if form == "fp8 row" else 1)
        assert torch.equal(padded_scales[:5], scales)
        assert vllm_kernels.scaled_fp8_quant(x, num_token_padding=2, **given)[0].shape == (5, 64)
        out = torch.zeros_like(want)
        assert vllm_kernels.scaled_fp8_quant(x, output=out, **given)[0] is out
        assert torch.equal(bits(out), bits(want))
    with pytest.raises(InvalidArgument, match=r"^scaled_fp8_quant: output: expected None with num"):
        vllm_kernels.scaled_fp8_quant(x, num_token_padding=9, output=out)
    with pytest.raises(
        InvalidArgument,
        match=r"^scaled_fp8_quant: input: expected 2 dimensions with num_token_padding, got shape "
        r"\[1, 5, 64\]$",
    ):
        vllm_kernels.scaled_fp8_quant(x[None], num_token_padding=9)


@forms
def test_empty(device, dtype, form):
    for shape in ((0, 64), (3, 0)):
        assert run(form, torch.empty(shape, device=device, dtype=dtype))[0].shape == shape


OPS: dict[str, Callable[[dict], tuple]] = {
    "static_scaled_fp8_quant": lambda a: (a["fp8"], a["x"], a["scale"]),
    "dynamic_scaled_fp8_quant": lambda a: (a["fp8"], a["x"], a["scale"]),
    "dynamic_per_token_scaled_fp8_quant": lambda a: (a["fp8"], a["x"], a["scales"], a["bound"]),
    "static_scaled_int8_quant": lambda a: (a["int8"], a["x"], a["scale"], a["azp"]),
    "dynamic_scaled_int8_quant": lambda a: (a["int8"], a["x"], a["scales"], a["azps"]),
}
ops = pytest.mark.parametrize("name", OPS)


def arguments(device: str, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    return {
        "x": torch.randn(4, 128, device=device, dtype=dtype),
        "fp8": torch.zeros(4, 128, device=device, dtype=FP8),
        "int8": torch.zeros(4, 128, device=device, dtype=INT8),
        "scale": torch.ones(1, device=device),
        "scales": torch.zeros(4, 1, device=device),
        "bound": torch.ones((), device=device),
        "azp": torch.zeros((), device=device, dtype=torch.int32),
        "azps": torch.zeros(4, 1, device=device, dtype=torch.int32),
    }


@ops
def test_bad_input(device, name):
    a = arguments(device)
    out = "int8" if "int8" in name else "fp8"
    kind = "int8" if out == "int8" else "float8_e4m3fn"
    memory = torch.zeros(512, device=device, dtype=torch.uint8).view(a[out].dtype).view(4, 128)
    scale = "scales" if "token" in name or name == "dynamic_scaled_int8_quant" else "scale"
    cases = [
        ({"x": a["x"].int()}, r"input: expected float32, float16 or bfloat16, got int32$"),
        ({"x": a["x"].t().contiguous().t()}, r"input: expected stride 1 in the last dimension"),
        ({out: a["x"]}, rf"out: expected {kind}, got float32$"),
        ({out: a[out][:3]}, r"out: expected shape \[4, 128\] \(from input\), got shape \[3, 128\]"),
        ({out: a[out][:1].expand(4, 128)}, r"out: is written, so its elements must not share"),
        ({out: memory[:, :32], "x": memory.view(torch.float32)}, r"out and input overlap in mem"),
        ({scale: a[scale].half()}, rf"{scale}: expected float32, got float16"),
    ]
    if scale == "scale":
        cases += [
            (
                {"scale": torch.ones(2, device=device)},
                r"scale: expected one element, got shape \[2\]$",
            ),
            ({"scale": 0.5}, r"scale: expected a float32 tensor of one element, got 0\.5$"),
        ]
    else:
        cases += [
            (
                {"scales": torch.zeros(5, device=device)},
                r"scales: expected one element a row of input, 4, got shape \[5\]$",
            ),
            ({"scales": a["x"][:, :1]}, r"scales: expected a contiguous tensor"),
            ({"scales": 0.5}, r"scales: expected a tensor, got float$"),
        ]
    overlapping = memory.view(torch.float32).flatten()
    overlapping = overlapping[:1] if scale == "scale" else overlapping[:4]
    cases.append(({out: memory, scale: overlapping.fill_(1)}, r"(out|scales?) and (out|scales?) "
                  r"overlap in memory$"))  # fmt: skip
    if name == "static_scaled_int8_quant":
        cases += [
            ({"azp": a["azp"].float()}, r"azp: expected int32, got float32$"),
            ({"azp": a["azp"].long()}, r"azp: expected int32, got int64; cast it with .int\(\)$"),
            ({"azp": a["azps"]}, r"azp: expected one element, got shape \[4, 1\]$"),
            ({"azp": 3}, r"azp: expected a tensor, got int$"),
        ]
    if name == "dynamic_scaled_int8_quant":
        cases += [
            ({"azps": a["azps"].float()}, r"azp: expected int32, got float32$"),
            ({"azps": a["azps"][:3]}, r"azp: expected one element a row of input, 4, got shape"),
            ({"azps": a["scales"].view(torch.int32)}, r"(azp and scales|scales and azp) overlap"),
        ]
    for change, message in cases:
        with raises(rf"^{name}: {message}"):
            getattr(vllm_kernels, name)(*OPS[name]({**a, **change}))
    for tensor in ("fp8", "int8", "scales", "azps"):
        assert not a[tensor].float().any(), tensor


@pytest.mark.parametrize("name", ["static_scaled_fp8_quant", "static_scaled_int8_quant"])
def test_bad_values_on_the_cpu(name):
    a = arguments("cpu")
    for bad, text in ((float("nan"), "nan"), (INFINITY, "inf"), (0.0, "0"), (-1.0, "-1")):
        with raises(rf"^{name}: scale\[0\] = {text}: expected a finite number > 0$"):
            getattr(vllm_kernels, name)(*OPS[name]({**a, "scale": torch.tensor([bad])}))
    if "int8" in name:
        for bad in (2**21 + 129, -(2**21) - 129):
            with raises(
                rf"^{name}: azp\[0\] = {bad}: expected a zero point in \[-2097280, 2097281\)$"
            ):
                azp = torch.tensor(bad, dtype=torch.int32)
                vllm_kernels.static_scaled_int8_quant(a["int8"], a["x"], a["scale"], azp)


def test_errors_name_the_function_that_was_called(device):
    x = torch.randn(4, 64, device=device)
    one, azp = torch.ones(1, device=device), torch.zeros(1, device=device, dtype=torch.int32)
    fp8, int8 = vllm_kernels.scaled_fp8_quant, vllm_kernels.scaled_int8_quant
    half = r"scale: expected float32, got float16; cast it with .float\(\)$"
    cases: list[tuple[Callable, dict, str]] = [
        (fp8, {"scale": one.half()}, half),
        (fp8, {"output": torch.empty(3, 64, device=device, dtype=FP8)},
         r"output: expected shape \[4, 64\] \(from input\), got shape \[3, 64\]$"),
        (fp8, {"use_per_token_if_dynamic": True, "scale_ub": x},
         r"scale_ub: expected one element, got shape \[4, 64\]$"),
        (int8, {"scale": one.half()}, half),
        (int8, {"azp": azp}, r"azp: expected None without scale$"),
        (int8, {"azp": azp, "scale": one}, r"azp: expected None without symmetric=False$"),
        (int8, {"scale": one, "symmetric": False},
         r"azp: expected a tensor for symmetric=False with a scale, got None$"),
    ]  # fmt: skip
    for function, options, message in cases:
        with raises(rf"^{function.__name__}: {message}"):
            function(x, **options)


@ops
def test_inference_only(device, name):
    a = arguments(device)
    with raises(rf"^{name}: input: requires grad, .*no_grad\(\)$"):
        getattr(vllm_kernels, name)(*OPS[name]({**a, "x": torch.nn.Parameter(a["x"])}))


@ops
def test_opcheck(device, dtype, name):
    a = arguments(device, dtype)
    (opcheck if "int8" in name else opcheck_float8)(name, *OPS[name](a))


@forms
def test_compile(device, form):
    x = torch.randn(4, 128, device=device)
    given = keywords(form, device)
    function = vllm_kernels.scaled_fp8_quant if "fp8" in form else vllm_kernels.scaled_int8_quant
    assert_compiles(lambda x: function(x, **given), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@forms
def test_graph_replay(dtype, form):
    """The scale of the tensor is computed anew in each replay."""
    x = torch.randn(300, 4096, device="cuda", dtype=dtype)
    given = keywords(form, "cuda")
    function = vllm_kernels.scaled_fp8_quant if "fp8" in form else vllm_kernels.scaled_int8_quant
    out = torch.empty(x.shape, device="cuda", dtype=torch.uint8)
    scales = torch.empty(300 if "row" in form else 1, device="cuda")

    def call() -> None:
        result = function(x, **given)
        out.copy_(result[0].view(torch.uint8))
        scales.copy_(result[1].flatten())

    def want() -> Tensor:
        call()
        wanted.append(scales.clone())
        return out.clone()

    wanted: list[Tensor] = []
    assert_graph_replays(call, lambda: x.mul_(0.5), out, want)
    assert torch.equal(scales, wanted[-1])
