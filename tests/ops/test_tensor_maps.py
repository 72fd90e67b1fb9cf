"""Caches that differ in one thing from those of calls before: what CUDA remembers of a cache (its
tensor maps) is of that very address, shape, stride and dtype, for each thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_attention_cases import Case, check, make_case
from torch import Tensor

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
MANY = 600  # caches; more than a thread remembers


def place(cache: Tensor, memory: Tensor, pad: int) -> Tensor:
    """The cache at the start of `memory` (bytes), with `pad` elements behind each block."""
    stride = cache[0].numel() + pad
    bytes_ = memory[: stride * cache.shape[0] * cache.itemsize]
    placed = bytes_.view(cache.dtype).as_strided(cache.shape, (stride, *cache.stride()[1:]))
    return placed.copy_(cache)


def moved(case: Case, keys: Tensor, values: Tensor, pad: int = 0) -> Case:
    return replace(
        case,
        key_cache=place(case.key_cache, keys, pad),
        value_cache=place(case.value_cache, values, pad),
    )


@pytest.mark.parametrize("queries", [None, [200, 30, 70]], ids=["decode", "prefill"])
def test_other_caches_at_one_address(device, queries):
    """One buffer has all of them in turn, twice. Only one thing differs from the first one."""
    keys, values = torch.zeros(2, 1 << 21, dtype=torch.uint8, device=device)
    lens = [250, 33, 80]
    changes: list[dict[str, Any]] = [
        {}, {"pad": 64}, {"layout": "HND"}, {"dtype": F16}, {"head_size": 128}, {"kv_heads": 4},
        {"block_size": 32}, {"spare_blocks": 40}, {"layout": "vllm"}, {"stored": E4M3},
    ]  # fmt: skip
    for _ in range(2):
        for change in changes:
            options = {"dtype": BF16, "layout": "NHD", **change}
            pad = options.pop("pad", 0)
            case = make_case(device, lens=lens, queries=queries, **options)
            check(moved(case, keys, values, pad))


def test_more_caches_than_are_remembered(device):
    """They differ in their addresses alone; each in two places, and there twice."""
    cases = [make_case(device, BF16, [20, 9], layout="NHD") for _ in range(MANY)]
    want = [case.run() for case in cases]
    size = cases[0].key_cache.nbytes
    keys, values = torch.zeros(2, MANY, size, dtype=torch.uint8, device=device)
    cases = [moved(*one) for one in zip(cases, keys, values, strict=True)]
    for _ in range(2):
        for case, right in zip(cases, want, strict=True):
            assert torch.equal(case.run(), right)


def test_threads_have_their_own(device):
    """Four threads call with caches of their own and with shared ones at the same time."""
    cases = [make_case(device, BF16, [40 + seed, 9], layout="NHD") for seed in range(8)]
    want = [case.run() for case in cases]
    wrong: list[int] = []

    def work(first: int) -> None:
        with torch.no_grad():
            for turn in range(50):
                index = (first + turn) % len(cases)
                if not torch.equal(cases[index].run(), want[index]):
                    wrong.append(index)

    def on_a_stream(first: int) -> None:
        if device == "cpu":
            return work(first)
        with torch.cuda.stream(torch.cuda.Stream()):
            return work(first)

    threads = [threading.Thread(target=on_a_stream, args=(first,)) for first in range(4)]
    if device == "cuda":
        torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
