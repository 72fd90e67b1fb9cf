"""The random numbers of sample: their distribution, torch's draws, Philox."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import on

import vllm_kernels
from vllm_kernels import reference
from vllm_kernels.reference.sampling import philox_words


@pytest.mark.parametrize("limits", [{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(device, limits):
    """Chi-square of 1,000,000 draws against the exact probabilities."""
    draws, vocab_size = 1_000_000, 64
    logits = 2 * torch.randn(1, vocab_size)
    filled = {
        name: torch.full((draws,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
        for name, value in limits.items()
    }
    request = filled | {
        "temperature": torch.full((draws,), 1.3),
        "seeds": torch.full((draws,), 1234),
        "offsets": torch.arange(draws),
        "rows": torch.zeros(draws, dtype=torch.int32),
    }
    tokens = vllm_kernels.sample(logits.to(device), **on(device, request)).cpu()
    x = logits[0] / 1.3
    kept = reference.kept_tokens(x, **limits)
    probabilities = x.double().masked_fill(~kept, -torch.inf).softmax(0)
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    assert not counts[~kept].any()
    expected = draws * probabilities[kept]
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    degrees = int(kept.sum()) - 1
    # Wilson and Hilferty's normal approximation; 3.7 is p = 1e-4.
    normal = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (
        2 / (9 * degrees)
    ) ** 0.5
    assert normal < 3.7


def by_torch(logits, temperature, top_k, top_p, uniforms):
    """Top-k, top-p and an inverted cumulated softmax, all in torch's float32."""
    tempered = logits / temperature[:, None]
    best, order = tempered.sort(descending=True, stable=True)
    best[:, top_k:] = -torch.inf
    probabilities = best.softmax(-1)
    best[probabilities.cumsum(-1) - probabilities >= top_p] = -torch.inf
    kept = torch.full_like(logits, -torch.inf).scatter(1, order, best)
    cumulated = kept.softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulated, uniforms[:, None] * cumulated[:, -1:], right=True)[:, 0]


def test_agrees_with_torch(device):
    """Up to draws within 1e-6 of a border, where float32 sums differ."""
    samples = 100_000
    logits = 3 * torch.randn(samples, 100, device=device)
    request = {
        "temperature": torch.full((samples,), 0.8),
        "top_k": torch.full((samples,), 40).int(),
        "top_p": torch.full((samples,), 0.9),
        "uniforms": torch.rand(samples),
    }
    request = on(device, request)
    want = by_torch(logits, request["temperature"], 40, 0.9, request["uniforms"])
    got = vllm_kernels.sample(logits, **request)
    assert (got != want).float().mean() < 1e-4


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_known_answers_of_philox(counter, key, expected):
    """Random123's published vectors (tests/kat_vectors, philox4x32-10)."""
    counter, key, expected = (
        [int(word, 16) for word in words.split()] for words in (counter, key, expected)
    )
    assert philox_words(counter, key) == expected


def test_seeds_and_offsets(device):
    """Of equal logits, the token of a draw is the upper 18 bits of the random number."""
    logits = torch.zeros(1, 2**18, device=device)
    pairs = [(0, 0), (0, 1), (1, 0), (-1, -1), (2**32, 5), (5, 2**32), (-(2**63), 2**63 - 1)]
    seeds, offsets = torch.tensor(pairs).T.contiguous()
    request = {"temperature": torch.ones(len(pairs)), "seeds": seeds, "offsets": offsets}
    rows = torch.zeros(len(pairs), dtype=torch.int32)
    tokens = vllm_kernels.sample(logits, **on(device, request | {"rows": rows}))
    assert tokens.tolist() == [reference.philox(*pair) >> 46 for pair in pairs]
    assert tokens[0] == 0xE169C58D6627E8D5 >> 46  # Random123's
    assert len(set(tokens.tolist())) == len(pairs)
