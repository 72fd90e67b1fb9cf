"""paged_attention and sample at random points of all their axes at once, against references.

VLLM_KERNELS_FUZZ=60: all tests here together take about that many seconds on one process, in place
of CASES points each. On a GPU machine random_points.py is quicker: it starts processes of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator

import pytest
import random_points
import torch

import vllm_kernels

CASES = 40  # of a seed, in CI
SEEDS = 8
CUDA = torch.cuda.is_available() and vllm_kernels.cuda_loaded


def points(seed: int) -> Iterator[int]:
    """Of one test: CASES of them, or as many as its part of VLLM_KERNELS_FUZZ seconds allows."""
    tests = 2 * SEEDS * (2 if CUDA else 1) + (SEEDS // 2 if CUDA else 0)
    seconds = float(os.environ.get("VLLM_KERNELS_FUZZ", 0)) / tests
    end = time.monotonic() + seconds
    for index in itertools.count():
        if time.monotonic() > end if seconds else index == CASES:
            return
        yield 10**6 * seed + index


@pytest.fixture
def check_points(record_property: Callable[[str, object], None]) -> Iterator[Callable[..., None]]:
    """Checks all points of a seed. Their number is in the summary of the run."""
    threads, done = torch.get_num_threads(), 0

    def check_all(check: Callable[[str], None], device: str, seed: int) -> None:
        nonlocal done
        try:
            for point in points(seed):
                random_points.check_point(check, device, point)
                done += 1
        finally:
            record_property("points", done)

    yield check_all
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_cases(check_points, device, seed):
    check_points(random_points.check_case, device, seed)


@pytest.mark.parametrize("seed", range(100, 100 + SEEDS // 2))
def test_random_fixed_splits(check_points, device, seed):
    check_points(random_points.check_fixed_split, device, seed)


@pytest.mark.parametrize("seed", range(300, 300 + SEEDS // 2))
def test_random_samples(check_points, device, seed):
    check_points(random_points.check_sample, device, seed)


@pytest.mark.skipif(not CUDA, reason="needs a GPU and the CUDA library")
@pytest.mark.parametrize("seed", range(200, 200 + SEEDS // 2), ids=lambda seed: f"cuda-{seed}")
def test_random_graphs_and_streams(check_points, seed):
    check_points(random_points.check_graph, "cuda", seed)
