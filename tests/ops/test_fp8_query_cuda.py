"""e4m3 queries on CUDA: the prompts that Hopper multiplies in 8 bits, and those beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_query_cases import BF16, E4M3, check_varlen, e4m3_case, moved
from helpers import assert_graph_replays, ints, needs_cuda_library
from paged_attention_cases import NAN, Case, check, query_scales
from torch import Tensor

import vllm_kernels

pytestmark = needs_cuda_library
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SIZES = {"heads": 16, "kv_heads": 4, "head_size": 128}


def check_in_8_bits(case: Case, expected: bool = True) -> None:
    """check() of a case that Hopper multiplies in 8 bits, or not."""
    assert case.multiplies_in_8_bits() == (expected and ON_HOPPER)
    check(case)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("layout", ["vllm", "NHD", "HND"])
@pytest.mark.parametrize(
    "lens, queries",
    [([2048], [2048]), ([300, 280, 311, 257, 299, 1, 290, 128], None), ([4024], [1024])],
    ids=["prompt", "ragged", "chunk"],
)
def test_large_prompts(layout, head_size, lens, queries):
    for heads in ((16, 16), (16, 4), (16, 2)):
        sizes = {"heads": heads[0], "kv_heads": heads[1], "head_size": head_size, "layout": layout}
        q_scale = query_scales(heads[1])
        case = e4m3_case("cuda", lens, queries or lens, q_scale, **sizes, scales_per_head=True)
        rows = max(queries or lens) * heads[0] // heads[1]
        check_in_8_bits(case, head_size <= 128 and rows >= 256)


@pytest.mark.parametrize("tokens", [63, 64])
def test_fewest_rows(layout, tokens):
    """256 query rows of a KV head."""
    lens = 20 * [tokens]
    case = e4m3_case("cuda", lens, lens, query_scales(4), **SIZES, layout=layout)
    check_in_8_bits(case, tokens == 64)


@pytest.mark.parametrize("options", [{"causal": False}, {}, {"window": (300, 0)}], ids=str)
def test_large_varlen(options):
    sizes = {"heads": 16, "kv_heads": 4, "head_size": 128, "layout": "NHD"}
    for lens in ([2048], [300, 280, 311, 257, 299, 1, 290, 128]):
        case = e4m3_case("cuda", lens, lens, query_scales(4), **sizes)
        assert check_varlen(case, **options) == ON_HOPPER


# 16 query heads per KV head: so many rows that K is copied.
GROUPS = pytest.mark.parametrize("group", [4, 16])


@GROUPS
@pytest.mark.parametrize("page", [32, 256])
def test_other_pages(layout, page, group):
    sizes = {**SIZES, "heads": 4 * group, "layout": layout, "block_size": page}
    check_in_8_bits(e4m3_case("cuda", [1500, 300], [900, 300], query_scales(4), **sizes))


@GROUPS
@pytest.mark.parametrize("page", [16, 64])
def test_large_windows(layout, page, group):
    """Pages before the window hold NaN, and then have the id -1."""
    sizes = {**SIZES, "heads": 4 * group, "layout": layout, "block_size": page}
    case = e4m3_case("cuda", [4024], [1024], query_scales(4), **sizes, sliding_window=500)
    check_in_8_bits(case)
    want = case.run()
    unseen = (3000 - 499) // page
    for cache in (case.key_cache, case.value_cache):
        cache[case.block_tables[0, :unseen].long()] = torch.tensor(NAN, device="cuda").to(E4M3)
    assert torch.equal(case.run(), want)
    case.block_tables[0, :unseen] = -1
    assert torch.equal(case.run(), want)


@pytest.mark.parametrize("group", [5, 6, 7])
def test_other_groups(layout, group):
    sizes = {"heads": 4 * group, "kv_heads": 4, "head_size": 128, "layout": layout}
    check_in_8_bits(e4m3_case("cuda", [1500, 300], [900, 300], query_scales(4), **sizes))


@GROUPS
@pytest.mark.parametrize("head_size", [32, 80, 96, 112, 160])
def test_other_head_sizes(layout, head_size, group):
    sizes = {**SIZES, "heads": 4 * group, "head_size": head_size, "layout": layout}
    case = e4m3_case("cuda", [1500, 300], [900, 300], query_scales(4), **sizes)
    check_in_8_bits(case, head_size <= 128)


def test_pages_of_8(layout):
    sizes = {**SIZES, "layout": layout, "block_size": 8}
    case = e4m3_case("cuda", [1500, 300], [900, 300], query_scales(4), **sizes)
    check_in_8_bits(case, layout != "vllm")


def sliced(cache: Tensor, dim: int, heads: int) -> Tensor:
    """A copy that is a slice of a cache with so many more heads, which are NaN."""
    sizes = list(cache.shape)
    sizes[dim] += heads
    wide = torch.full(sizes, NAN, device=cache.device).to(E4M3)
    return wide.narrow(dim, heads // 2, cache.shape[dim]).copy_(cache)


@GROUPS
def test_slices_of_caches(layout, group):
    """K and V with other strides, and those of one head for all, change no bit."""
    sizes = {**SIZES, "heads": 4 * group, "layout": layout}
    case = e4m3_case("cuda", [1500, 300], [900, 300], query_scales(4), **sizes)
    want, dim = case.run(), 2 if layout == "NHD" else 1
    key, value = sliced(case.key_cache, dim, 2), sliced(case.value_cache, dim, 4)
    other = replace(case, key_cache=key, value_cache=value)
    assert other.multiplies_in_8_bits() == ON_HOPPER
    assert torch.equal(other.run(), want)
    heads = [cache.narrow(dim, 1, 1).expand(cache.shape) for cache in (key, value)]
    other = replace(case, key_cache=heads[0], value_cache=heads[1])
    assert other.multiplies_in_8_bits() == ON_HOPPER
    copied = replace(case, key_cache=heads[0].contiguous(), value_cache=heads[1].contiguous())
    assert torch.equal(other.run(), copied.run())


def test_other_memory(layout):
    """Slices of query and out change no bit. Queries of other addresses are converted."""
    case = e4m3_case("cuda", [1500, 300], [900, 300], query_scales(4), **SIZES, layout=layout)
    check_in_8_bits(case)
    want, (tokens, heads, size) = case.run(), case.query.shape
    packed = torch.zeros(tokens, heads + 4, size, device="cuda").to(E4M3)
    packed[:, 2:-2] = case.query
    sliced = replace(case, query=packed[:, 2:-2])
    out = torch.full(packed.shape, NAN, device="cuda", dtype=BF16)[:, 2:-2]
    assert sliced.multiplies_in_8_bits() == ON_HOPPER
    vllm_kernels.paged_attention(
        *sliced.tensors(), **case.options, max_query_len=case.max_query_len, out=out
    )
    assert torch.equal(out, want)
    for elements in (1, 8):
        check_in_8_bits(replace(case, query=moved(case.query, elements)), False)


def test_many_sequences():
    """More than a CTA has threads to add their lengths, most of them for decode."""
    queries = [64 if seq % 50 == 0 else 1 + seq % 3 for seq in range(1101)]
    lens = [20 + count for count in queries]
    sizes = {"heads": 32, "kv_heads": 2, "head_size": 64, "layout": "NHD"}
    case = e4m3_case("cuda", lens, queries, query_scales(2), **sizes)
    check_in_8_bits(case)
    assert check_varlen(case) == ON_HOPPER


@pytest.mark.parametrize("length", [8192, 32768])
def test_mean_of_long_rows(length):
    """Where V has a mean, the roundings of weights cancel. Truncated sums would show."""
    case = e4m3_case("cuda", [length], [576], query_scales(4), **SIZES, layout="NHD")
    shift = 1 / case.options["v_scale"].float()
    case.value_cache = (case.value_cache.float() + shift).to(E4M3)
    check_in_8_bits(case)
    want = case.naive()[0]
    assert ((case.run().double() - want).norm() / want.norm()).item() <= 1e-2


# --- bad input


@GROUPS
@pytest.mark.parametrize("bad", [-1, 2**30, -(2**31)])
def test_bad_block_ids(layout, bad, group):
    """Such a page counts as one of zeros. No other sequence changes."""
    lens, sizes = [700, 600], {**SIZES, "heads": 4 * group, "layout": layout}
    case = e4m3_case("cuda", lens, lens, query_scales(4), **sizes)
    check_in_8_bits(case)
    good = case.run()
    zeros = sorted(set(range(len(case.key_cache))) - set(case.block_tables.flatten().tolist()))[0]
    for cache in (case.key_cache, case.value_cache):
        cache[zeros] = torch.zeros(1, device="cuda").to(E4M3)
    runs = []
    for page in (zeros, bad):
        case.block_tables[0, 3] = page
        runs.append(case.run())
    assert torch.equal(runs[1][700:], good[700:])
    if ON_HOPPER:
        assert torch.equal(*runs)


def test_overlapping_keys():
    """They need more rows than there are tokens. Sequences that do not fit have no keys."""
    query = torch.randn(1800, 16, 128, device="cuda").to(E4M3)
    key, value = torch.randn(2, 900, 4, 128, device="cuda").to(E4M3)
    starts = ints([0, 900, 900, 1800], "cuda")
    bad, good = ints([0, 900, 0, 900], "cuda"), ints([0, 900, 900, 900], "cuda")
    got, want = (
        vllm_kernels.varlen_attention(query, key, value, starts, keys, max_query_len=900)
        for keys in (bad, good)
    )
    torch.cuda.synchronize()
    assert torch.equal(got[:900], want[:900]) and got.isfinite().all()


@pytest.mark.parametrize("lens", [[300, 40], [1500, 700]], ids=str)
def test_cuda_graph(lens):
    for queries in (None, [min(600, length) for length in lens]):
        case = e4m3_case("cuda", lens, queries, query_scales(2), head_size=128)
        if queries is not None and max(queries) == 600:
            assert case.multiplies_in_8_bits() == ON_HOPPER
        other = torch.randn(case.query.shape, device="cuda").to(E4M3)
        query, q_scale = case.query.clone(), case.options["q_scale"].clone()
        out = case.unset_out()
        call = replace(case, query=query).with_options(q_scale=q_scale, out=out)

        def run(call: Case = call) -> None:
            vllm_kernels.paged_attention(
                *call.tensors(), **call.options, max_query_len=call.max_query_len
            )

        def refill(query: Tensor = query, other: Tensor = other, scale: Tensor = q_scale) -> None:
            query.copy_(other)
            scale.mul_(2)

        def want(case: Case = case, other: Tensor = other) -> Tensor:
            scale = 2 * case.options["q_scale"]
            return replace(case, query=other).with_options(q_scale=scale).run()

        assert_graph_replays(run, refill, out, want)
