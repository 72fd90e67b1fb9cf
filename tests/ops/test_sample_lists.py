"""sample with lists of tokens: penalties and a bias."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import check, drawn, ends, on, random_request, token_lists, with_room

import vllm_kernels
from vllm_kernels import reference

VOCAB_SIZE = 20_000
SIZES = [0, 1, 511, 512, 513, 2000]
"""Of lists. A CTA of the CUDA kernel copies 512 entries ahead, and reads more in a loop."""
LIMITS = {
    "greedy": {"temperature": 0.0},
    "all": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "large top_k": {"temperature": 1.3, "top_k": 3000, "min_p": 1e-4},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k and top_p": {"temperature": 0.8, "top_k": 100, "top_p": 0.8},
}


@pytest.fixture(params=LIMITS)
def limits(request: pytest.FixtureRequest) -> dict[str, float]:
    return LIMITS[request.param]


def limited(samples: int, limits: dict[str, float]) -> dict[str, torch.Tensor]:
    values = {name: torch.full((samples,), value) for name, value in limits.items()}
    return drawn(samples) | {
        name: value.int() if name == "top_k" else value for name, value in values.items()
    }


@pytest.mark.parametrize("masked", [False, True])
def test_lists_of_many_sizes(device, dtype, limits, masked):
    """A bias of each size, none among them, with counts of each size."""
    counted, biased = torch.cartesian_prod(torch.tensor(SIZES), torch.tensor(SIZES)).T
    samples = len(counted)
    request = limited(samples, limits) | {
        "token_counts": token_lists(counted, VOCAB_SIZE, "counts"),
        "bias": token_lists(biased, VOCAB_SIZE, "bias"),
        "repetition": 0.5 + torch.rand(samples),
        "frequency": torch.rand(samples) - 0.5,
        "presence": torch.rand(samples) - 0.5,
    }
    if masked:
        request["bitmask"] = torch.randint(-(2**31), 2**31, (samples, VOCAB_SIZE // 32)).int()
    check(torch.randn(samples, VOCAB_SIZE).to(device, dtype), request)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e38, 2.0, -0.0])
def test_a_bias_of_any_value_among_equal_logits(device, dtype, limits, value):
    """It may make a token of lower id the first of the highest, or no longer be one of them."""
    samples = 24
    logits = torch.randint(-2, 3, (samples, VOCAB_SIZE)).to(dtype) * 0.5  # -0.0 among them
    tokens = torch.randint(VOCAB_SIZE, (samples,)).int()
    tokens[::3] = logits.float().argmax(-1)[::3]
    bias = ends(torch.ones(samples, dtype=torch.int64)), tokens, torch.full((samples,), value)
    check(logits.to(device), limited(samples, limits) | {"bias": bias})


@pytest.mark.parametrize("biased", [False, True], ids=["penalized", "biased"])
def test_the_highest_tokens_are_lowered(device, dtype, limits, biased):
    """Lists of a row's highest tokens, in any order. None of them is drawn."""
    logits = torch.randn(len(SIZES), VOCAB_SIZE).to(dtype)
    order = logits.float().argsort(descending=True, stable=True)
    highest = [row[:size][torch.randperm(size)] for row, size in zip(order, SIZES)]
    lists = ends(torch.tensor(SIZES)), torch.cat(highest).int()
    entries = len(lists[1])
    request = limited(len(SIZES), limits)
    if biased:
        request["bias"] = *lists, torch.full((entries,), -60.0)
    else:
        request["token_counts"] = *lists, torch.randint(1, 4, (entries,)).int()
        request["frequency"] = torch.full((len(SIZES),), 60.0)
    tokens = check(logits.to(device), request)
    assert not any(token in listed for token, listed in zip(tokens, highest))
    if not limits["temperature"]:
        assert tokens.tolist() == [int(row[size]) for row, size in zip(order, SIZES)]


@pytest.mark.parametrize("penalized", [False, True], ids=["bias", "penalty"])
def test_a_low_token_is_raised(device, dtype, limits, penalized):
    """Wherever it is in its list. It is drawn then."""
    sizes = torch.tensor([1, 511, 512, 513, 513, 2000, 2000, 2000])
    places = torch.tensor([0, 510, 511, 511, 512, 0, 1024, 1999])
    logits = torch.randn(len(sizes), VOCAB_SIZE).to(dtype)
    order = logits.float().argsort()
    # The lowest token stands where `places` says.
    listed = [
        row[:size].roll(place) for row, size, place in zip(order, sizes.tolist(), places.tolist())
    ]
    lists = ends(sizes), torch.cat(listed).int()
    raised = torch.zeros(len(lists[1]))
    raised[lists[0][:-1] + places] = 1
    request = limited(len(sizes), limits)
    if penalized:
        request["token_counts"] = *lists, (60 * raised).int()
        request["frequency"] = torch.full((len(sizes),), -1.0)
    else:
        request["bias"] = *lists, 60 * raised
    assert check(logits.to(device), request).tolist() == order[:, 0].tolist()


def test_penalties_follow_vllm(device):
    """apply_penalties of vLLM's sampler, written out in torch."""
    logits = torch.randn(2, 6)
    counts = torch.tensor([[0, 2, 1, 0, 0, 3], [1, 0, 0, 0, 4, 0]])
    prompt = torch.tensor([[True, False, True, False, False, False]] * 2)
    repetition, frequency, presence = torch.tensor([[1.5, 0.3, 0.2], [0.7, -0.5, 1.0]]).T
    seen = prompt | (counts > 0)
    scale = torch.where(seen, repetition[:, None], 1.0)
    want = torch.where(logits > 0, logits / scale, logits * scale)
    want = want - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    tokens = [row.nonzero()[:, 0] for row in seen]
    lists = (
        torch.tensor([0, len(tokens[0]), len(tokens[0]) + len(tokens[1])]).int(),
        torch.cat(tokens).int(),
        torch.cat([counts[i, tokens[i]] for i in range(2)]).int(),
    )
    request = {
        "token_counts": lists,
        "repetition": repetition.contiguous(),
        "frequency": frequency.contiguous(),
        "presence": presence.contiguous(),
    }
    for sample in range(2):
        got = reference.processed_logits(logits[sample], sample, **request)
        assert torch.allclose(got, want[sample])
    check(logits.to(device), request | drawn(2))
    assert torch.equal(vllm_kernels.sample(logits.to(device), **on(device, request)).cpu(),
                       want.argmax(1))  # fmt: skip


def test_skipped_entries(device):
    """Token -1 leaves its entry out, so a list may have room at its end."""
    request = random_request(6, 500, full=True)
    roomy = request | {name: with_room(request[name]) for name in ("token_counts", "bias")}
    logits = torch.randn(6, 500).to(device)
    assert torch.equal(check(logits, roomy), check(logits, request))
