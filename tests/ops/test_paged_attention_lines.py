"""Decode over NHD in 8 bits where a work tile has several KV heads, whose rows fill whole lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import needs_cuda_library
from paged_attention_cases import EIGHT_BITS, Case, assert_right, check, make_case

import vllm_kernels

pytestmark = [
    needs_cuda_library,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="of Hopper's kernels",
    ),
]
FP8 = torch.float8_e4m3fn
HEADS = {64: 2, 80: 8, 96: 4, 112: 8, 128: 2, 160: 4, 192: 2, 224: 4}  # KV heads of a work tile
NAMES = [str(x).split(".")[-1] for x in EIGHT_BITS]
# 32 sequences: ends of a box of 16 tokens, of a stage of 32, and one that many CTAs share.
LENS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 0, 63, 64, 65, 5000] * 2


def make(
    head_size: int,
    stored: torch.dtype,
    lens: list[int] = LENS,
    group: int = 4,
    tiles: int = 1,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    **options: object,
) -> Case:
    """tiles: work tiles of a sequence. Heads of 128 have 32 times as many: few have no lines."""
    kv_heads = tiles * HEADS[head_size] * (32 if head_size == 128 else 1)
    case = make_case(
        "cuda", dtype, lens, heads=group * kv_heads, kv_heads=kv_heads, head_size=head_size,
        block_size=block_size, stored=stored, layout="NHD", scales_per_head=True, **options,
    )  # fmt: skip
    assert "lines of several KV heads" in case.explained()
    return case


@pytest.fixture(autouse=True)
def skip_before_hopper() -> None:
    many_rows = make_case("cuda", torch.bfloat16, [300], heads=16, kv_heads=1, head_size=128)
    if "code for 9.0a" in many_rows.explained():
        pytest.skip("built as before Hopper")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("stored", EIGHT_BITS, ids=NAMES)
@pytest.mark.parametrize("head_size", HEADS)
def test_lines(dtype, head_size, stored):
    for group, tiles, block_size in ((4, 1, 16), (1, 2, 32), (8, 1, 128), (3, 3, 16)):
        case = make(head_size, stored, group=group, tiles=tiles, block_size=block_size, dtype=dtype)
        check(case)
        assert torch.equal(case.run(), case.run())


@pytest.mark.parametrize("head_size", HEADS)
def test_options(head_size):
    case = make(head_size, FP8)
    slopes = torch.linspace(0.1, 1, case.query.shape[1], device="cuda")
    check(case.with_options(sliding_window=70, softcap=20.0))
    check(case.with_options(alibi_slopes=slopes, sinks=slopes))
    check(make(head_size, FP8, group=2, queries=[min(n, 3) for n in LENS]))
    assert torch.equal(case.with_options(kv_ready=True).run(), case.run())
    # Slices of a tensor of K and V.
    packed = torch.stack([case.key_cache, case.value_cache], 2).flatten(2, 3)
    heads = case.key_cache.shape[2]
    sliced = replace(case, key_cache=packed[:, :, :heads], value_cache=packed[:, :, heads:])
    assert "lines of several KV heads" in sliced.explained()
    assert torch.equal(sliced.run(), case.run())


@pytest.mark.parametrize("seqs", [24, 40, 100, 300])
@pytest.mark.parametrize("head_size", [64, 80, 160])
def test_numbers_of_tiles(head_size, seqs):
    """Fewer work tiles than CTAs, and more: each is split, or only long ones."""
    torch.manual_seed(seqs)
    lens = torch.randint(1, 900, (seqs,)).tolist()
    lens[7] = 9000
    tiles = max(1, 32 // seqs + 1)
    check(make(head_size, FP8, lens, tiles=tiles))


@pytest.mark.parametrize("head_size", HEADS)
def test_heads_keep_apart(head_size):
    """NaN in one KV head's keys and values is no other head's."""
    case = make(head_size, FP8)
    heads = case.key_cache.shape[2]
    want = case.run().unflatten(1, (heads, 4))
    caches = []
    for cache in (case.key_cache, case.value_cache):
        bad = cache.clone()
        bad.view(torch.uint8)[:, :, 1] = 0x7F
        caches.append(bad)
    got = replace(case, key_cache=caches[0], value_cache=caches[1]).run()
    got = got.unflatten(1, (heads, 4))
    others = [head for head in range(heads) if head != 1]
    assert torch.equal(got[:, others], want[:, others])
    assert got[torch.tensor(LENS, device="cuda") > 0, 1].isnan().all()


@pytest.mark.parametrize("head_size", [64, 80, 160])
def test_bad_rows_are_contained(head_size):
    case = make(head_size, FP8)
    want = case.run()
    keep = [i for i in range(len(LENS)) if i != 3]
    for bad in (-1, 2**31 - 1, -(2**31)):
        tables, lens = case.block_tables.clone(), case.seq_lens.clone()
        tables[3, 0] = bad
        assert torch.equal(replace(case, block_tables=tables).run()[keep], want[keep])
        lens[3] = bad
        got = replace(case, seq_lens=lens).run()
        torch.testing.assert_close(got[keep], want[keep], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("head_size", [64, 112])
def test_graph_replays_with_other_lengths(head_size):
    case = make(head_size, FP8)
    out = torch.empty_like(case.query)
    arguments = (*case.tensors()[:4], torch.ones_like(case.seq_lens))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vllm_kernels.paged_attention(*arguments, **case.options, out=out)
    arguments[4].copy_(case.seq_lens)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(Case(*arguments, case.block_size, case.options), out)
