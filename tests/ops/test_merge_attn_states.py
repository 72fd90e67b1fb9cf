"""merge_attn_states against its reference: empty parts, infinities, aliases, strides, bad input."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_compiles, assert_graph_replays, opcheck, raises
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

ULPS = {torch.float32: 16, torch.float16: 1.01, torch.bfloat16: 1.01}
# Where the parts cancel, the error is that of the addends: a few ulps of the largest, 5.
FLOOR = {torch.float32: 4e-6, torch.float16: 4e-6, torch.bfloat16: 4e-6}


def parts(
    tokens: int, heads: int, size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    def part() -> tuple[Tensor, Tensor]:
        output = torch.randn(tokens, heads, size, device=device, dtype=dtype)
        return output, torch.randn(heads, tokens, device=device) * 5

    return *part(), *part()


def run(*args: Tensor) -> tuple[Tensor, Tensor]:
    output = torch.full(args[0].shape, torch.nan, dtype=args[0].dtype, device=args[0].device)
    lse = torch.full_like(args[1], torch.nan)
    vllm_kernels.merge_attn_states(output, *args, lse)
    return output, lse


def check(*args: Tensor) -> None:
    output, lse = run(*args)
    want, want_lse = reference.merge_attn_states(*args)
    assert_close(output, want, ULPS[output.dtype], FLOOR[output.dtype])
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize(
    ("heads", "size"), [(1, 8), (3, 7), (32, 128), (5, 40), (2, 256), (2, 600)]
)
def test_matches_reference(device, dtype, tokens, heads, size):
    check(*parts(tokens, heads, size, dtype, device))


def test_far_apart(device, dtype):
    prefix, prefix_lse, suffix, suffix_lse = parts(6, 2, 64, dtype, device)
    prefix_lse[:, 0], suffix_lse[:, 0] = 1e4, -1e4
    prefix_lse[:, 1], suffix_lse[:, 1] = -3e38, 3e38
    prefix_lse[:, 2], suffix_lse[:, 2] = 2e30, 2e30
    check(prefix, prefix_lse, suffix, suffix_lse)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_empty_parts(device, dtype, empty):
    prefix, prefix_lse, suffix, suffix_lse = parts(8, 3, 64, dtype, device)
    prefix_lse[:, 1] = suffix_lse[:, 2] = empty
    prefix_lse[:, 3] = suffix_lse[:, 3] = empty
    prefix[1] = prefix[3] = suffix[2] = suffix[3] = torch.nan  # never looked at
    output, lse = run(prefix, prefix_lse, suffix, suffix_lse)
    assert not output.isnan().any() and not lse.isnan().any()
    assert torch.equal(output[1], suffix[1]) and torch.equal(output[2], prefix[2])
    assert (output[3] == 0).all() and (lse[:, 3] == -torch.inf).all()
    check(prefix, prefix_lse, suffix, suffix_lse)


def test_nan_stays_in_its_row(device, dtype):
    args = parts(4, 3, 64, dtype, device)
    want, want_lse = run(*args)
    args[0][1, 2, 5] = torch.nan
    args[3][0, 3] = torch.nan
    output, lse = run(*args)
    assert output[1, 2, 5].isnan() and output[3, 0].isnan().all() and lse[0, 3].isnan()
    output[1, 2, 5], output[3, 0], lse[0, 3] = want[1, 2, 5], want[3, 0], want_lse[0, 3]
    assert torch.equal(output, want) and torch.equal(lse, want_lse)


def test_without_lse_and_in_place(device, dtype):
    args = parts(9, 4, 64, dtype, device)
    want, want_lse = run(*args)
    output = torch.empty_like(args[0])
    vllm_kernels.merge_attn_states(output, *args)
    assert torch.equal(output, want)
    for index in (0, 2):
        a = [x.clone() for x in args]
        vllm_kernels.merge_attn_states(a[index], *a, a[index + 1])
        assert torch.equal(a[index], want) and torch.equal(a[index + 1], want_lse)


def test_strided(device, dtype):
    packed = torch.randn(6, 9, 3, 64, device=device, dtype=dtype)
    _, prefix_lse, _, suffix_lse = parts(9, 6, 64, dtype, device)
    prefix, suffix, output = (packed[:, :, i].transpose(0, 1) for i in range(3))
    want, _ = reference.merge_attn_states(prefix, prefix_lse, suffix, suffix_lse)
    vllm_kernels.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse)
    assert_close(output, want, ULPS[dtype], FLOOR[dtype])
    odd = [torch.randn(9, 6, 65, device=device, dtype=dtype)[..., 1:] for _ in range(3)]
    want, _ = reference.merge_attn_states(odd[0], prefix_lse, odd[1], suffix_lse)
    vllm_kernels.merge_attn_states(odd[2], odd[0], prefix_lse, odd[1], suffix_lse)
    assert_close(odd[2], want, ULPS[dtype], FLOOR[dtype])


def test_empty(device, dtype):
    run(*parts(0, 4, 64, dtype, device))


def test_many_rows(device):
    check(*parts(70_000 if device == "cuda" else 2000, 4, 16, torch.bfloat16, device))


def test_bad_input(device):
    prefix, prefix_lse, suffix, suffix_lse = parts(5, 4, 64, torch.float32, device)
    good = {
        "output": torch.empty_like(prefix), "prefix_output": prefix, "prefix_lse": prefix_lse,
        "suffix_output": suffix, "suffix_lse": suffix_lse, "output_lse": None,
    }  # fmt: skip
    cases = [
        ({"prefix_output": prefix.long()}, r"prefix_output: expected float32, float16 or bfloat16"),
        ({"prefix_output": prefix[0]},
         r"prefix_output: expected shape \[num_tokens, num_heads, head_size\], got shape \[4, 64"),
        ({"suffix_output": suffix[:3]},
         r"suffix_output: expected shape \[5, 4, 64\] \(from prefix_output\), got shape \[3"),
        ({"suffix_output": suffix.half()},
         r"suffix_output: expected float32 \(from prefix_output\), got float16$"),
        ({"prefix_lse": prefix_lse.t()},
         r"prefix_lse: expected num_heads = 4 \(from prefix_output\) at dimension 0, got "),
        ({"suffix_lse": suffix_lse.half()}, r"suffix_lse: expected float32, got float16"),
        ({"output_lse": suffix_lse.t().contiguous().t()}, r"output_lse: expected a contiguous"),
        ({"output": torch.empty(1, 4, 64, device=device).expand(5, 4, 64)}, r"output: is written"),
        ({"output": prefix.transpose(1, 2).contiguous().transpose(1, 2)},
         r"output: expected stride 1 in the last dimension"),
    ]  # fmt: skip
    for change, message in cases:
        with raises(rf"^merge_attn_states: {message}"):
            vllm_kernels.merge_attn_states(**{**good, **change})
    whole = torch.randn(6, 4, 64, device=device)
    with raises(r"^merge_attn_states: output and prefix_output overlap in memory$"):
        vllm_kernels.merge_attn_states(whole[1:], whole[:5], prefix_lse, suffix, suffix_lse)
    output = good["output"]
    for name, part in {"output": output, "prefix_output": prefix, "suffix_output": suffix}.items():
        with raises(rf"^merge_attn_states: output_lse and {name} overlap in memory$"):
            inside = part.flatten()[100:120].view(4, 5)
            vllm_kernels.merge_attn_states(**{**good, "output_lse": inside})
    for name in ("prefix_lse", "suffix_lse"):
        whole = torch.randn(24, device=device)
        with raises(rf"^merge_attn_states: output_lse and {name} overlap in memory$"):
            shared = {name: whole[:20].view(4, 5), "output_lse": whole[4:].view(4, 5)}
            vllm_kernels.merge_attn_states(**{**good, **shared})


def test_inference_only(device):
    prefix, prefix_lse, suffix, suffix_lse = parts(5, 4, 64, torch.float32, device)
    with raises(r"^merge_attn_states: \w+: requires grad, .*no_grad\(\)$"):
        vllm_kernels.merge_attn_states(
            torch.empty_like(prefix), prefix.requires_grad_(), prefix_lse, suffix, suffix_lse
        )
    for index in range(6):
        args = parts(5, 4, 64, torch.float32, device)
        args = (torch.empty_like(args[0]), *args, torch.empty_like(args[1]))
        args[index].requires_grad_()
        with raises(r"^merge_attn_states: \w+: requires grad, .*no_grad\(\)$"):
            vllm_kernels.merge_attn_states(*args)


def test_opcheck_and_compile(device, dtype):
    args = parts(5, 4, 64, dtype, device)
    output, lse = torch.empty_like(args[0]), torch.empty_like(args[1])
    opcheck("merge_attn_states", output, lse, *args)
    opcheck("merge_attn_states", output, None, *args)
    assert_compiles(vllm_kernels.merge_attn_states, output, *args, lse)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay(dtype):
    args = parts(16, 32, 128, dtype, "cuda")
    output = torch.empty_like(args[0])
    assert_graph_replays(
        lambda: vllm_kernels.merge_attn_states(output, *args),
        lambda: args[0].normal_(), output, lambda: run(*args)[0],
    )  # fmt: skip
