"""Small batches: how they are split, and their last pages, which are not full."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_attention_cases import check, make_case, with_token_scales, with_token_zeros

STORED = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
    "scaled": torch.int8,
    "int4": torch.int8,
}
# Whole sequences, splits for half of the SMs, and for all. Ends of pages and of stages. Nine
# sequences and more: CTAs of half an SM in 8 bits. Splits of [500, ...] would make two waves.
BATCHES = [
    [1],
    [255],
    [257],
    [300],
    [385],
    [513],
    [700],
    [1024],
    [1500],
    [2049],
    [4000],
    [70, 90, 500],
    [50, 1000],
    [700] * 3,
    [400] * 4,
    [330] * 7,
    [200, 200, 200, 3000],
    [100, 400, 100, 400],
    [1, 1, 1, 1, 1, 1, 900],
    [130] * 16,
    [1000, 900, 800, *[20] * 9],
    [33, 1, 300, 1000, *[250, 5] * 6],
    [4100, 2500, 600, *[17] * 8],
    [500, 500, *[10] * 9],
    [1500, *[1] * 15],
]


def make(device, stored, lens, layout, head_size=128, **options):
    case = make_case(
        device, torch.bfloat16, lens, heads=32, kv_heads=8, head_size=head_size, block_size=16,
        stored=STORED[stored], layout=layout, **options,
    )  # fmt: skip
    if stored in ("scaled", "int4"):
        case = with_token_scales(case)
    return with_token_zeros(case) if stored == "int4" else case


@pytest.mark.parametrize("layout", ["vllm", "NHD", "HND"])
@pytest.mark.parametrize("stored", STORED)
def test_batches(device, stored, layout):
    for lens in BATCHES if device == "cuda" else BATCHES[3::9]:  # the CPU splits otherwise
        case = make(device, stored, lens, layout)
        check(case)
        # The host knows another bound on the lengths, so that a small batch may get more CTAs.
        wide = case.block_tables.new_full((len(lens), 600), -1)
        wide[:, : case.block_tables.shape[1]] = case.block_tables
        case.block_tables = wide
        check(case)


@pytest.mark.parametrize("heads", [32, 128])
@pytest.mark.parametrize("stored", ["bf16", "e4m3", "scaled"])
def test_waves_of_long_sequences(device, stored, heads):
    """72 query tiles of 132 SMs: several waves of work tiles, of equal and unequal lengths."""
    cuda_lens = ((8000, 0), (4100, 1), (4100, 37), (4100, 900))
    for first, step in cuda_lens if device == "cuda" else ((600, 37),):
        lens = [max(1, first - step * i) for i in range(9)]
        case = make_case(
            device, torch.bfloat16, lens, heads=heads, kv_heads=8, head_size=128, block_size=16,
            stored=STORED[stored], layout="NHD",
        )  # fmt: skip
        check(with_token_scales(case) if stored == "scaled" else case)


@pytest.mark.parametrize("queries, window", [(1, 0), (2, 0), (1, 3000)])
def test_waves_of_many_sequences(device, queries, window):
    """More sequences than a warp has lanes, several query tokens, and a sliding window."""
    lens = [4100 - i % 20 for i in range(70)] if device == "cuda" else [300, 290] * 17
    case = make_case(
        device, torch.bfloat16, lens, heads=4, kv_heads=1, head_size=128, block_size=16,
        layout="NHD", queries=[queries] * len(lens),
    )  # fmt: skip
    case = case.with_options(sliding_window=window) if window else case
    check(case)
    assert torch.equal(case.run(), case.run())


@pytest.mark.parametrize("seqs", [40, 100, 130])
@pytest.mark.parametrize("stored", ["bf16", "e4m3"])
def test_many_sequences(device, stored, seqs):
    """More sequences than a warp has lanes, and a few long ones: one wave of work tiles, or two."""
    for step, longest in ((9, 1500), (3, 2000), (3, 4500)) if device == "cuda" else ((9, 300),):
        lens = [longest - i if i % step == 0 else 1 + i % 40 for i in range(seqs)]
        check(
            make_case(
                device, torch.bfloat16, lens, heads=4, kv_heads=1, head_size=128,
                block_size=16, stored=STORED[stored], layout="NHD",
            )
        )  # fmt: skip


@pytest.mark.parametrize("stored", ["bf16", "e4m3"])
def test_beside_a_prompt(device, stored):
    """Decode runs beside prefill, and some sequences have no query tokens."""
    lens, queries = [1000, 900, 800, *[20] * 8, 700, 300], [*[1] * 7, 0, *[1] * 3, 0, 200]
    check(make(device, stored, lens, "NHD", queries=queries))


@pytest.mark.parametrize("others", [[256], [300], [1500, *[100] * 14]])
def test_length_without_query_tokens(device, others):
    """A sequence without query tokens does not change how the others are split."""
    queries = [*[1] * len(others), 0]
    case = make(device, "bf16", [*others, 30000], "NHD", queries=queries)
    shorter = replace(case, seq_lens=torch.tensor([*others, 1], device=device, dtype=torch.int32))
    assert torch.equal(case.run(), shorter.run())


@pytest.mark.parametrize("head_size", [64, 80, 256])
@pytest.mark.parametrize("stored", ["bf16", "e4m3"])
def test_head_sizes(device, stored, head_size):
    for lens in ([130], [200], [520], [777], [1500], [300] * 4, [90, 2000], [700] + [20] * 9):
        check(make(device, stored, lens, "vllm", head_size))


@pytest.mark.parametrize("stored", ["bf16", "e4m3"])
def test_masks(device, stored):
    """Rows that see different tokens, and scores that are modified, beside those that are not."""
    slopes = torch.linspace(0.1, 1, 32, device=device)
    for lens in ([7], [300], [40, 700]):
        case = make(device, stored, lens, "NHD")
        check(case.with_options(sliding_window=37))
        check(case.with_options(softcap=15.0))
        check(case.with_options(alibi_slopes=slopes))
        check(make(device, stored, lens, "NHD", queries=[2] * len(lens)))
        check(make(device, stored, lens, "NHD", queries=[2] * len(lens), sliding_window=37))
