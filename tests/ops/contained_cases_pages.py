"""Index faults of the ops that choose pages of a cache on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from contained_cases_base import CUDA, contained, reported
from torch import Tensor

import vllm_kernels as vk


def check_bad_tables(
    op: str, call: Callable[[], Sequence[Tensor]], tables: Tensor, lens: Tensor
) -> None:
    """A bad page or length of the middle sequence leaves the results of the others as they are."""
    want = call()
    reported()
    for tensor, index, bad in ((tables, (1, 5), 40), (tables, (1, 5), -1), (lens, 1, 10**6),
                               (lens, 1, -1)):  # fmt: skip
        good = tensor[index].clone()
        tensor[index] = bad
        got = contained(call, f"{op}: ", f" = {bad}: expected ")
        tensor[index] = good
        assert got is None or all(torch.equal(x[::2], y[::2]) for x, y in zip(got, want))
    assert all(torch.equal(x, y) for x, y in zip(call(), want))


def page_bounds_update() -> None:
    keys = torch.randn(8, 16, 2, 64, device=CUDA)
    want, bounds = torch.zeros(2, 8, 2, 2, 64, device=CUDA)
    vk.page_bounds_update(want, keys, torch.tensor([20, -1, 40], device=CUDA), layout="NHD")
    for bad in (128, -5, 2**40):
        slots = torch.tensor([20, bad, 40], device=CUDA)
        vk.page_bounds_update(bounds, keys, slots, layout="NHD")
        reported("page_bounds_update: slot_mapping[1] = ", "expected -1 (skipped) or a slot in [0")
        assert torch.equal(bounds, want)


def select_pages() -> None:
    bounds = torch.randn(40, 2, 2, 64, device=CUDA).sort(2).values
    query = torch.randn(3, 4, 64, device=CUDA)
    tables = torch.randperm(40, device=CUDA)[:39].view(3, 13).int()
    lens = torch.tensor([200, 208, 150], dtype=torch.int32, device=CUDA)
    call = lambda: vk.select_pages(query, bounds, tables, lens, 96, block_size=16)  # noqa: E731
    check_bad_tables("select_pages", call, tables, lens)


def sparq_attention() -> None:
    keys, values = torch.randn(2, 40, 16, 2, 64, device=CUDA)
    query = torch.randn(3, 4, 64, device=CUDA)
    tables = torch.randperm(40, device=CUDA)[:39].view(3, 13).int()
    lens = torch.tensor([200, 208, 150], dtype=torch.int32, device=CUDA)
    mean = torch.randn(3, 2, 64, device=CUDA)
    call = lambda: vk.sparq_attention(  # noqa: E731
        query, keys, values, tables, lens, k=96, mean_value=mean, layout="NHD"
    )
    check_bad_tables("sparq_attention", lambda: [call()], tables, lens)


def value_mean_update() -> None:
    value = torch.randn(3, 2, 8, device=CUDA)
    for bad in (4, -5, 2**40):
        mean, counts = torch.zeros(4, 2, 8, device=CUDA), torch.zeros(4, device=CUDA).int()
        vk.value_mean_update(mean, counts, value, torch.tensor([1, bad, -1], device=CUDA))
        reported("value_mean_update: rows[1] = ", "expected -1 (skipped) or a row in [0, 4)")
        assert torch.equal(mean[1], value[0]) and counts.tolist() == [0, 1, 0, 0]
