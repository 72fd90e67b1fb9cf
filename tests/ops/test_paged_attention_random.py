"""paged_attention at random points of all its axes at once, against a float64 reference.

VLLM_KERNELS_FUZZ=60: each test runs that many seconds, in place of CASES points.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from paged_attention_cases import EIGHT_BITS, Case, alone, assert_right, make_case, per_head

import vllm_kernels

CASES = 40  # of a seed, in CI


def random_case(device: str) -> Case:
    kv_heads = random.choice([1, 2, 3, 5, 7, 8, 12, 20])
    heads = kv_heads * random.choice([1, 2, 3, 4, 5, 7, 8, 16])
    if kv_heads == 1:
        heads = random.choice([1, 4, 16, 64, 71])
    stored = random.choice([None, None, *EIGHT_BITS])
    block_size = 2 ** random.randrange(9)
    near = [0, 1, block_size, block_size + 1]
    lens = [random.choice([*near, random.randrange(1, 900)]) for _ in range(random.randrange(1, 6))]
    queries = None
    if random.random() < 0.5:
        queries = [random.choice([0, 1, 1, 2, 3, random.randrange(9)]) for _ in lens]
    options: dict[str, object] = {}
    for name, value in (
        ("sliding_window", random.choice([1, block_size, 90, 2000])),
        ("softcap", 20.0),
        ("alibi_slopes", per_head(heads, 0.01, 0.4)),
        ("sinks", per_head(heads, -1, 1)),
        ("causal", False),
    ):
        if random.random() < 0.3:
            options[name] = value
    if device == "cpu" and queries is not None and "causal" not in options:  # as it must be there
        lens = [length and max(length, count) for length, count in zip(lens, queries)]
    return make_case(
        device,
        random.choice([torch.float32, torch.bfloat16, torch.float16]),
        lens,
        queries,
        heads=heads,
        kv_heads=kv_heads,
        head_size=random.randrange(32, 257, 16 if stored else 8),
        block_size=block_size,
        stored=stored,
        layout=random.choice(["vllm", "NHD", "HND"]),
        scales_per_head=stored is not None and random.random() < 0.5,
        **options,
    )


def fixed_split_case(device: str) -> Case:
    """A batch with fixed_split_size: lengths from one token to hundreds of splits."""
    kv_heads = random.choice([1, 1, 2, 4])
    heads = kv_heads * random.choice([1, 4, 8, 16, 16])
    stored = random.choice([None, *EIGHT_BITS])
    block_size = random.choice([16, 16, 64, 256])
    longest = random.choice([300, 3000, 26000])
    lens = [random.randrange(1, longest) for _ in range(random.randrange(2, 5))]
    most = random.choice([1, 1, 3])
    queries = [random.randrange(1, most + 1) for _ in lens]
    case = make_case(
        device,
        random.choice([torch.bfloat16, torch.float16]),
        lens,
        [min(pair) for pair in zip(queries, lens, strict=True)],
        heads=heads,
        kv_heads=kv_heads,
        head_size=random.choice([48, 64, 80, 96, 128, 192, 256]),
        block_size=block_size,
        stored=stored,
        layout=random.choice(["vllm", "NHD", "HND"]),
        fixed_split_size=random.choice([100, 256, 1000, 2048]),
        causal=random.random() < 0.85,
    )
    return replace(case, max_query_len=most)


def points(seed: int) -> Iterator[int]:
    """Seeds of the points of one test: CASES, or as many as VLLM_KERNELS_FUZZ seconds allow."""
    seconds = float(os.environ.get("VLLM_KERNELS_FUZZ", 0))
    end = time.monotonic() + seconds
    for index in itertools.count():
        if time.monotonic() > end if seconds else index == CASES:
            print(f"{index} points")
            return
        point = 10**6 * seed + index
        random.seed(point)
        torch.manual_seed(point)
        yield point


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(device, seed):
    before = torch.get_num_threads()
    try:
        for point in points(seed):
            torch.set_num_threads(random.choice([1, 2, 3, 7]))
            case = random_case(device)
            try:
                with_lse, plain = case.run_with_lse(), case.run()
                assert_right(case, with_lse, plain)
                assert device != "cpu" or torch.equal(with_lse[0], plain), "lse changes out"
            except (AssertionError, RuntimeError) as error:
                raise AssertionError(f"point {point}") from error
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(4))
def test_random_fixed_splits(device, seed):
    """A sequence has the same bits in a batch, alone, and again."""
    for point in points(100 + seed):
        case = fixed_split_case(device)
        try:
            got = case.run()
        except RuntimeError as error:
            assert "fixed_split_size: block_tables has room" in str(error), point
            continue
        assert torch.equal(case.run(), got), f"point {point}: a second call"
        for seq in range(len(case.seq_lens)):
            one, rows = alone(case, seq)
            differ = (one.run() != got[rows]).sum().item()
            assert differ == 0, f"point {point}: sequence {seq}: {differ} of {got[rows].numel()}"


@pytest.mark.parametrize("seed", range(4))
def test_random_graphs_and_streams(seed):
    """A graph replayed at other lengths, and calls on two streams at once, change no bit."""
    if not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        pytest.skip("needs a GPU and the CUDA library")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for point in points(200 + seed):
        case = random_case("cuda")
        if len(case.query) == 0:
            continue
        out = torch.empty_like(case.query)
        graph = torch.cuda.CUDAGraph()
        call = replace(case, seq_lens=case.seq_lens.clone()).with_options(out=out)
        tensors, options = call.tensors(), {**call.options, "max_query_len": call.max_query_len}
        vllm_kernels.paged_attention(*tensors, **options)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            vllm_kernels.paged_attention(*tensors, **options)
        shorter = torch.minimum(call.seq_lens, torch.randint_like(call.seq_lens, 1, 900))
        for lens in (shorter, case.seq_lens):
            call.seq_lens.copy_(lens)
            want = replace(case, seq_lens=lens).run()
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want), f"point {point}: replay"
        results = []
        torch.cuda.synchronize()
        for stream in streams * 2:
            with torch.cuda.stream(stream):
                results.append(case.run())
        torch.cuda.synchronize()
        assert all(torch.equal(one, results[0]) for one in results), f"point {point}: streams"
