"""paged_attention at random points of all its axes at once, against a float64 reference."""

from __future__ import annotations

import random

import pytest
import torch
from paged_attention_cases import EIGHT_BITS, Case, assert_right, make_case, per_head

CASES = 40  # a seed


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


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(device, seed):
    before = torch.get_num_threads()
    try:
        for index in range(CASES):
            random.seed(1000 * seed + index)
            torch.manual_seed(1000 * seed + index)
            torch.set_num_threads(random.choice([1, 2, 3, 7]))
            case = random_case(device)
            with_lse, alone = case.run_with_lse(), case.run()
            assert_right(case, with_lse, alone)
            if device == "cpu":
                assert torch.equal(with_lse[0], alone)
    finally:
        torch.set_num_threads(before)
