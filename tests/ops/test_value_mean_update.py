"""value_mean_update: the running mean of V, against its definition in float64."""

from __future__ import annotations

import torch
from helpers import assert_compiles, opcheck, raises

import vllm_kernels
from vllm_kernels import reference


class Case:
    def __init__(self, device: str, dtype: torch.dtype, tokens: int = 50, size: int = 40) -> None:
        self.mean = torch.randn(5, 3, size, device=device)
        self.counts = torch.tensor([0, 7, 1, 0, 9], dtype=torch.int32, device=device)
        self.value = torch.randn(tokens, 3, size).to(device, dtype)
        self.rows = torch.randint(-1, 4, (tokens,), device=device)  # none of row 4

    def check(self) -> None:
        want, counts = reference.value_mean_update(self.mean, self.counts, self.value, self.rows)
        vllm_kernels.value_mean_update(self.mean, self.counts, self.value, self.rows)
        torch.testing.assert_close(self.mean.double(), want, rtol=1e-5, atol=1e-6)
        assert torch.equal(self.counts, counts)


def test_matches_reference(device, dtype):
    for tokens, size in ((50, 40), (1, 128), (700, 7), (0, 8)):
        Case(device, dtype, tokens, size).check()


def test_one_call_and_many_give_the_mean(device):
    case = Case(device, torch.float32)
    case.counts.zero_()
    case.rows.random_(0, 5)
    case.mean.fill_(float("nan"))  # not read where nothing was counted
    for first in range(0, 50, 7):
        part = slice(first, first + 7)
        vllm_kernels.value_mean_update(case.mean, case.counts, case.value[part], case.rows[part])
    for row in range(5):
        want = case.value[case.rows == row].mean(0)
        torch.testing.assert_close(case.mean[row], want, rtol=1e-5, atol=1e-6)


def test_strided_values_and_nan(device, dtype):
    case = Case(device, dtype)
    packed = torch.zeros(50, 8, 41, device=device, dtype=dtype)
    packed[:, 2:5, 1:] = case.value
    case.value = packed[:, 2:5, 1:]
    case.check()
    case.value[case.rows == 2] = float("nan")
    vllm_kernels.value_mean_update(case.mean, case.counts, case.value, case.rows)
    assert case.mean[2].isnan().all() and case.mean[[0, 1, 3, 4]].isfinite().all()


def test_bad_rows(device):
    case = Case(device, torch.float32)
    before = case.mean.clone()
    case.rows[:] = -1
    case.rows[3] = 5
    if device == "cpu":
        with raises(
            r"^value_mean_update: rows\[3\] = 5: expected -1 \(skipped\) or a row in \[0, 5\)"
        ):
            vllm_kernels.value_mean_update(case.mean, case.counts, case.value, case.rows)
    else:  # skipped
        vllm_kernels.value_mean_update(case.mean, case.counts, case.value, case.rows)
    assert torch.equal(case.mean, before)


def test_bad_input(device):
    case = Case(device, torch.float32)
    good = (case.mean, case.counts, case.value, case.rows)
    cases = [
        ({0: case.mean.half()}, r"mean: expected float32, got float16; cast it with .float\(\)$"),
        ({0: case.mean[:, :, :20]}, r"mean: expected .*contiguous"),
        ({1: case.counts.long()}, r"counts: expected int32, got int64; cast it with .int\(\)$"),
        ({1: case.counts[:3]}, r"counts: expected num_rows = 5 \(from mean\) at dimension 0, got"),
        ({2: case.value[:, :2]}, r"value: expected num_kv_heads = 3 \(from mean\) at dimension 1"),
        ({3: case.rows.int()}, r"rows: expected int64, got int32; cast it with .long\(\)$"),
        ({3: case.rows[:9]}, r"rows: expected num_tokens = 50 \(from value\) at dimension 0, got"),
        ({2: case.mean, 3: case.rows[:5]}, r"(mean and value|value and mean) overlap in memory$"),
    ]
    for changed, message in cases:
        with raises(rf"^value_mean_update: {message}"):
            vllm_kernels.value_mean_update(*(changed.get(i, x) for i, x in enumerate(good)))


def test_opcheck_and_compile(device, dtype):
    case = Case(device, dtype)
    args = (case.mean, case.counts, case.value, case.rows)
    opcheck("value_mean_update", *args)
    assert_compiles(vllm_kernels.value_mean_update, *args)
