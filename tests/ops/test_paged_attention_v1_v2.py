"""paged_attention_v1 and _v2 against a float64 reference: dtypes, shapes and lengths."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, opcheck
from paged_attention_v1_v2_cases import assert_right, make_case

import vllm_kernels


def border_lengths(block_size: int) -> list[int]:
    b = block_size
    return [1, 2, b - 1, b, b + 1, 3 * b + 5, 511, 512, 513, 1023, 1024, 1025]


# --- right results


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_tails_and_partition_borders(device, dtype, version, kv_cache_dtype, block_size):
    case = make_case(
        device,
        dtype,
        border_lengths(block_size),
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
    )
    assert_right(case, case.run(version))


@pytest.mark.parametrize("head_size", range(32, 257, 8))
def test_head_sizes(device, version, head_size):
    """Every head size, with the other axes drawn along."""
    step = head_size // 8
    dtype = [torch.float32, torch.float16, torch.bfloat16][step % 3]
    block_size = [8, 16, 32][step // 3 % 3]
    caches = ["auto", "fp8", "fp8_e5m2"] if head_size % 16 == 0 else ["auto"]
    for kv_cache_dtype in caches:
        case = make_case(
            device,
            dtype,
            [37, 530, 1, 64],
            heads=6,
            kv_heads=2,
            head_size=head_size,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
        )
        assert_right(case, case.run(version))


@pytest.mark.parametrize("head_size", [40, 64, 128, 256])
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (2, 1), (8, 2), (5, 1), (12, 2), (7, 1),
                                             (16, 2), (16, 1), (64, 1), (71, 1)])  # fmt: skip
def test_groups(device, version, heads, kv_heads, head_size):
    for dtype, kv_cache_dtype in (
        (torch.float32, "auto"),
        (torch.bfloat16, "auto"),
        (torch.float16, "fp8"),
    ):
        if head_size % 16 != 0:
            kv_cache_dtype = "auto"
        case = make_case(
            device,
            dtype,
            [140, 23],
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            kv_cache_dtype=kv_cache_dtype,
        )
        assert_right(case, case.run(version))


def test_long_context(device, version):
    """v1 needs no scratch, whatever the length."""
    case = make_case(device, torch.float32, [60_000, 5], heads=4, kv_heads=1)
    assert_right(case, case.run(version))
    case.max_seq_len = 10**9 if version == 1 else case.max_seq_len
    assert_right(case, case.run(version))


def test_ragged_batch(device, dtype, version):
    lens = [int(x) for x in torch.randint(0, 700, (37,))]
    case = make_case(device, dtype, lens, heads=8, kv_heads=2, head_size=80)
    assert_right(case, case.run(version))


def test_very_large_query_with_fp8_cache(device, version):
    case = make_case(device, torch.bfloat16, [40, 700], kv_cache_dtype="fp8")
    case.query *= 1e5
    case.scale *= 1e-5
    assert_right(case, case.run(version))


def test_large_scores_stay_finite(device, dtype, version):
    """A softmax that is one-hot, and logits up to 1e6."""
    case = make_case(device, dtype, [33, 600])
    case.scale = 2e4
    out = case.run(version)
    assert not out.isnan().any()
    best = case.naive()
    clear = ((out.double() - best).abs().amax(-1) < 0.05).float().mean().item()
    assert clear > 0.9  # near ties may fall either way


def test_context_0(device, dtype, version):
    case = make_case(device, dtype, [0, 5, 0])
    got = case.run(version)
    assert torch.equal(got[[0, 2]], torch.zeros_like(got[[0, 2]]))
    assert_right(case, got)
    empty = make_case(device, dtype, [0])
    assert torch.equal(empty.run(version), torch.zeros_like(empty.query))


def test_empty_batch(device, dtype, version):
    case = make_case(device, dtype, [])
    assert case.run(version).shape == (0, 8, 64)


def test_threads_give_right_results(version):
    """Work is cut by the number of threads; every cut must be right."""
    before = torch.get_num_threads()
    case = make_case("cpu", torch.float32, [3000, 0, 129, 1, 700], heads=4, kv_heads=2)
    want = case.naive()
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            assert_right(case, case.run(version), want)
    finally:
        torch.set_num_threads(before)


# --- v2's scratch: checked, its contents unspecified


def test_larger_scratch_changes_nothing(device, dtype):
    case = make_case(device, dtype, [0, 1, 511, 512, 513, 1600])
    out = case.out()
    vllm_kernels.paged_attention_v2(out, *case.scratch(6), *case.arguments())
    assert torch.equal(out, case.v2())


def test_v1_and_v2_agree(device, dtype):
    case = make_case(device, dtype, [2000, 77], heads=8, kv_heads=2, head_size=128)
    assert_right(case, case.v2(), case.v1().double())


# --- torch


def test_opcheck_and_compile(device, dtype):
    case = make_case(device, dtype, [5, 40])
    opcheck("paged_attention_v1", case.out(), *case.arguments())
    opcheck("paged_attention_v2", case.out(), *case.scratch(), *case.arguments())
    assert_compiles(vllm_kernels.paged_attention_v1, case.out(), *case.arguments())
    assert_compiles(vllm_kernels.paged_attention_v2, case.out(), *case.scratch(), *case.arguments())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_calls_of_many_python_threads():
    """Each asks for another amount of shared memory; no launch may see another thread's amount."""
    cases = [make_case("cuda", torch.bfloat16, [length], heads=heads, head_size=size)
             for length in (40, 3000, 9000) for heads in (2, 32) for size in (64, 128)]  # fmt: skip
    want = [(case.v1(), case.v2()) for case in cases]
    torch.cuda.synchronize()

    def work(index: int) -> bool:
        case = cases[index]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            rounds = [(case.v1(), case.v2()) for _ in range(200)]
            stream.synchronize()
        return all(torch.equal(a, b) for got in rounds for a, b in zip(got, want[index]))

    with ThreadPoolExecutor(len(cases)) as pool:
        assert all(pool.map(work, range(len(cases))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_graph_replay(dtype, version, kv_cache_dtype):
    """Captured at one set of lengths, replayed at others, with padded rows (length 0)."""
    case = make_case("cuda", dtype, [700, 40, 1200, 8], kv_cache_dtype=kv_cache_dtype)
    out = torch.empty_like(case.query)
    scratch = case.scratch()

    def call() -> None:
        if version == 1:
            vllm_kernels.paged_attention_v1(out, *case.arguments())
        else:
            vllm_kernels.paged_attention_v2(out, *scratch, *case.arguments())

    def refill() -> None:
        case.seq_lens.copy_(torch.tensor([13, 0, 1024, 0], device="cuda"))
        case.query.normal_()

    assert_graph_replays(call, refill, out, lambda: case.run(version))
