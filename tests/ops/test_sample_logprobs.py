"""sample(num_logprobs=): the tokens of sample, and what token_logprobs gives for them."""

from __future__ import annotations

import pytest
import torch
from helpers import raises
from sampling_cases import check_logprobs, drawn, hard_rows, of_samples, on, random_request
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

NUMBERS = (0, 1, 5, 20, 127, 128)
REQUESTS = torch.tensor([  # temperature, top_k, top_p, min_p
    [0.0, 0, 1.0, 0.0], [0.0, 50, 0.9, 0.1],
    [1.0, 1, 1.0, 0.0], [0.7, 50, 1.0, 0.0], [3.0, 50, 0.9, 0.0], [1.0, 127, 0.9, 0.01],
    [3.0, 127, 1.0, 0.0], [0.7, 128, 0.9, 0.0], [1.0, 129, 0.9, 0.0], [1.0, 1000, 1.0, 0.0],
    [1.0, 0, 0.9, 0.0], [0.7, 0, 0.9, 0.0], [3.0, 0, 0.5, 0.0],
    [1.0, 0, 1.0, 0.05], [20.0, 0, 1.0, 0.0],
])  # fmt: skip


def all_requests(num_rows: int) -> dict[str, Tensor]:
    """Each of REQUESTS for each row."""
    temperature, top_k, top_p, min_p = REQUESTS.repeat(num_rows, 1).T.contiguous()
    rows = torch.arange(num_rows).repeat_interleave(len(REQUESTS)).int()
    limits = {"temperature": temperature, "top_k": top_k.int(), "top_p": top_p, "min_p": min_p}
    return drawn(len(rows)) | limits | {"rows": rows}


def changes(samples: int, vocab_size: int) -> dict[str, object]:
    """A bitmask, a bias and penalties. Some samples lack the mask, or all of them."""
    request = random_request(samples, vocab_size, full=True)
    names = ("bitmask", "bitmask_rows", "bias", "token_counts", "repetition", "frequency")
    return {name: request[name] for name in names}


@pytest.mark.parametrize("vocab_size", [1, 31, 100, 4099, 32_000, 131_072])
def test_all_requests(device, dtype, vocab_size):
    logits = (3 * torch.randn(2, vocab_size)).to(device, dtype)
    request = all_requests(2)
    check_logprobs(logits, request, *NUMBERS)
    check_logprobs(logits, request | changes(2 * len(REQUESTS), vocab_size), 0, 5, 128)
    check_logprobs(logits, {}, *NUMBERS)


@pytest.mark.parametrize("vocab_size", [100, 4099, 33_000])
def test_hard_rows(device, dtype, vocab_size):
    """Ties, equal, infinite and NaN logits."""
    logits = hard_rows(vocab_size).to(device, dtype)
    request = all_requests(len(logits))
    check_logprobs(logits, request, 0, 5, 128)
    if vocab_size < 30_000:
        check_logprobs(logits, request | changes(len(request["rows"]), vocab_size), 5)


@pytest.mark.parametrize("temperature", [1e-5, 0.7, 0.9999999, 3.0, 1e5, torch.inf])
def test_logits_with_equal_quotients(device, temperature):
    """Logits that differ have one quotient, at the end of the top-k, too."""
    steps = torch.randint(100, (4, 20_000))
    logits = 1 + steps * 2.0**-23
    logits[1] = 1e-30 * torch.randn(20_000)
    logits[2] *= -50
    logits[3] = torch.where(steps[3] < 50, 0.0, 1e-38 * steps[3])
    request = all_requests(4)
    request["temperature"] = torch.full_like(request["temperature"], temperature)
    check_logprobs(logits.to(device), request, 0, 5, 128)


def test_few_tokens_above_minus_infinity(device, dtype):
    """Fewer than are listed, or than top_k keeps."""
    logits = torch.full((4, 40_000), -torch.inf)
    for row, count in zip(logits, (1, 3, 60, 1000)):
        row[torch.randperm(40_000)[:count]] = torch.randn(count)
    check_logprobs(logits.to(device, dtype), all_requests(4), 0, 5, 128)


@pytest.mark.parametrize("low", [-torch.inf, -3e38, -200.0, -64.0, -50.0, -16.0, -10.0])
def test_first_logits_far_below_the_rest(device, dtype, low):
    """CUDA adds up e^(logit - base), where the base is that of the first logits of a thread."""
    logits = torch.randn(4, 33_024)
    logits[2:] = torch.tensor([0.1, 0.7])[torch.randint(2, (2, 33_024))]  # equal rounding adds up
    logits[::2].view(2, 8, -1)[..., :2048] += low
    logits[1::2].view(2, 8, -1)[..., 2048:] += low
    check_logprobs(logits.to(device, dtype), all_requests(4), 0, 5, 128)


def test_strided_and_unaligned_rows(device, dtype):
    packed = torch.randn(3, 3000, device=device, dtype=dtype)
    for part in (packed[:, :2048], packed[:, 1:2049], packed[::2, 8:1007]):
        check_logprobs(part, all_requests(len(part)), 20)


def test_random_requests(device, dtype):
    for vocab_size in (70, 5000):
        logits = (3 * torch.randn(7, vocab_size)).to(device, dtype)
        rows = {"rows": torch.randint(7, (20,)).int()}
        check_logprobs(logits, random_request(20, vocab_size) | rows, 3)


def test_matches_reference(device):
    logits, request = torch.randn(5, 300), random_request(5, 300)
    want = reference.sample(logits, **request, num_logprobs=4)
    got = vllm_kernels.sample(logits.to(device), **on(device, request), num_logprobs=4)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    for one, other in zip(got, want):
        torch.testing.assert_close(one.cpu(), other, atol=2e-6, rtol=2e-6)


def test_a_row_does_not_depend_on_its_batch(device, dtype):
    vocab_size = 20_000
    logits = (3 * torch.randn(8, vocab_size)).to(device, dtype)
    request = all_requests(8)
    samples = len(request["rows"])
    for given in (request, request | changes(samples, vocab_size)):
        together = vllm_kernels.sample(logits, **on(device, given), num_logprobs=20)
        others = (torch.randperm(samples), *torch.randperm(samples)[:20, None])
        for some in others:
            alone = on(device, of_samples(given, some))
            for one, all_ in zip(
                vllm_kernels.sample(logits, **alone, num_logprobs=20), together, strict=True
            ):
                assert torch.equal(one, all_[some])


def test_out(device):
    logits, out = torch.randn(3, 50, device=device), torch.zeros(3, dtype=torch.int64).to(device)
    tokens, *_ = vllm_kernels.sample(logits, num_logprobs=1, out=out)
    assert tokens is out and torch.equal(out, logits.argmax(1))


def test_no_samples(device):
    none = torch.randn(0, 10, device=device)
    shapes = [x.shape for x in vllm_kernels.sample(none, num_logprobs=3)]
    assert shapes == [(0,), (0, 4), (0, 4), (0,)]


def test_bad_input(device):
    x = torch.randn(2, 40, device=device)
    for number in (-1, 129, 1.5, "3"):
        with raises(rf"^sample: num_logprobs: expected an int of 0 to 128, got {number!r}$"):
            vllm_kernels.sample(x, num_logprobs=number)
    tokens, ranks, ids = (torch.zeros(n, 2, dtype=torch.int64, device=device) for n in (1, 1, 2))
    good = {"logprobs": torch.zeros(2, 2, device=device), "ids": ids, "ranks": ranks[0]}
    wide = torch.zeros(2, 130, device=device)
    cases = [
        (
            {"ranks": None},
            r"logprobs: expected logprobs, ids and ranks together, got some of them$",
        ),
        ({"logprobs": ids}, r"logprobs: expected float32, got int64; cast it with .float\(\)$"),
        ({"logprobs": x[0]}, r"logprobs: expected shape \[num_samples, 1 \+ num_top\], got .*"),
        (
            {"ids": ids[:, :1]},
            r"ids: expected 1 \+ num_top = 2 \(from logprobs\) at dimension 1, .*",
        ),
        ({"ranks": ids}, r"ranks: expected shape \[num_samples\], got shape \[2, 2\]$"),
        (
            {"logprobs": wide, "ids": wide.long()},
            r"logprobs: expected 1 to 129 columns, got shape \[2, 130\]$",
        ),
        ({"ranks": tokens[0]}, r"ranks and tokens overlap in memory$"),
        (
            {"ids": ids[:, :1].contiguous(), "logprobs": x.view(-1)[:2, None]},
            r"logprobs and logits .*",
        ),
    ]
    for change, message in cases:
        with raises("^sample: " + message):
            torch.ops.vllm_kernels.sample(tokens[0], x, **good | change)
