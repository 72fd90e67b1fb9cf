"""sample against its reference, token for token."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, needs_cuda_library, opcheck, raises
from sampling_cases import (
    VOCABULARIES,
    check,
    drawn,
    flat,
    hard_rows,
    of_samples,
    on,
    pick,
    random_request,
)

import vllm_kernels


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_matches_reference(device, dtype, vocab_size):
    samples = 24 if vocab_size < 30_000 else 6
    for scale in (1.0, 4.0):
        logits = (scale * torch.randn(samples, vocab_size)).to(device, dtype)
        check(logits, random_request(samples, vocab_size))


@pytest.mark.parametrize("vocab_size", [3, 1000, 40_000])
def test_many_random_requests(device, dtype, vocab_size):
    for _ in range(10):
        samples = int(torch.randint(1, 20, (1,)))
        logits = (3 * torch.randn(samples, vocab_size)).to(device, dtype)
        check(logits, random_request(samples, vocab_size))


@pytest.mark.parametrize("vocab_size", [31, 1000, 33_000])
def test_hard_rows(device, dtype, vocab_size):
    logits = hard_rows(vocab_size).to(device, dtype)
    for _ in range(8):
        check(logits, random_request(12, vocab_size))


@pytest.mark.parametrize("temperature", [1e-5, 0.7, 0.9999999, 1.3, 1e5, torch.inf])
@pytest.mark.parametrize("top_k", [1, 50, 128, 129])
def test_logits_with_equal_quotients(device, temperature, top_k):
    """Division by the temperature rounds neighbouring logits to one number."""
    steps = torch.randint(100, (8, 20_000)).int()
    signs = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 1.0, 1.0, 1.0])[:, None]
    base = torch.tensor([1.0, 1.0, 0.0, 1e-38, 1e-38, 3e33, 1e-3, 50.0])[:, None]
    logits = signs * (base.view(torch.int32) + steps).view(torch.float32)
    logits[2] = steps[2].view(torch.float32) * (1 - 2 * (steps[2] % 2))  # denormal
    logits[6, ::2] = -torch.inf
    samples = logits.shape[0]
    request = drawn(samples) | {
        "temperature": torch.full((samples,), temperature),
        "top_k": torch.full((samples,), top_k, dtype=torch.int32),
        "top_p": torch.full((samples,), 0.9),
    }
    check(logits.to(device), request)


@pytest.mark.parametrize("allowed", [1.0, 0.01])
@pytest.mark.parametrize("vocab_size", [2000, 4096, 131_072])
@pytest.mark.parametrize("top_k", [50, 128])
def test_short_lists_that_overflow(device, dtype, vocab_size, top_k, allowed):
    """Few threads of a CTA have a token, or the highest tokens are neighbours: lists are long."""
    logits = torch.randn(6, vocab_size)
    logits[torch.rand(6, vocab_size) > allowed] = -torch.inf
    logits[1:3, 100:400] = 10 + torch.randn(2, 300)
    logits[4:, : vocab_size // 16] += 20
    request = drawn(6) | {"top_k": torch.full((6,), top_k).int(), "top_p": torch.full((6,), 0.9)}
    check(logits.to(device, dtype), request)


def test_quotients_and_biases_that_overflow(device):
    logits = torch.randn(2, 40_000)
    logits[0, [700, 20_000, 39_000]] = 1e35  # the quotient is infinite
    logits[1, 30_000] = -torch.inf
    bias = torch.tensor([0, 0, 1]).int(), torch.tensor([30_000]).int(), torch.tensor([torch.inf])
    for top_k in (0, 50):
        request = drawn(2) | {
            "temperature": torch.tensor([1e-5, 1.0]),
            "top_k": torch.full((2,), top_k).int(),
            "bias": bias,
        }
        check(logits.to(device), request)
        tokens = vllm_kernels.sample(logits.to(device), **on(device, request))
        assert tokens.tolist() == [700, 30_000]


@pytest.mark.parametrize("temperature", [1.0, 0.8, 1e-4, 100.0])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.5, 0.9, 0.99999, 1 - 2.0**-24, 1.0])
def test_nucleus(device, dtype, temperature, top_p):
    """Rows without a top-k. Some have more tokens at the border of top-p than a list takes."""
    vocab_size = 20_000
    logits = torch.randn(10, vocab_size)
    logits[1] = logits[1].bfloat16().float()
    logits[2] = torch.randint(4, (vocab_size,)).float()
    logits[3] = 0.25
    logits[4, 1:] = -torch.inf
    logits[5] *= 1e-39  # denormal
    logits[6] *= 0.01
    logits[7] *= 10
    logits[8, :1000] = 3.0
    logits[9] = -logits[9].abs() * 1e-4 - 80.0
    samples = 2 * logits.shape[0]
    min_p = pick([0.0, 1e-9, 0.01, 0.9], samples)
    min_p[: logits.shape[0]] = 0.0
    request = drawn(samples) | {
        "rows": torch.arange(samples).int() % logits.shape[0],
        "temperature": torch.full((samples,), temperature),
        "top_p": torch.full((samples,), top_p),
        "min_p": min_p,
    }
    check(logits.to(device, dtype), request)


@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("vocab_size", [20_001, 20_005, 20_007, 20_008])
def test_hard_rows_with_an_infinite_temperature(device, dtype, vocab_size, top_k):
    """All finite logits have the quotient 0, and -inf has NaN. A CPU's last vector is not full."""
    logits = torch.randn(4, vocab_size)
    logits[1] = 0.0
    logits[2:] = -torch.inf
    logits[2, [300, 7000, vocab_size - 1]] = torch.randn(3)
    logits[3, : vocab_size // 2] = 1.0
    request = drawn(4) | {
        "temperature": torch.full((4,), torch.inf),
        "top_k": torch.full((4,), top_k).int(),
    }
    words = torch.randint(-(2**31), 2**31, (4, -(-vocab_size // 32))).int()
    for uniform in (0.0, 0.5, 1.0):
        request["uniforms"] = torch.full((4,), uniform)
        check(logits.to(device, dtype), request)
        check(logits.to(device, dtype), request | {"bitmask": words})


@pytest.mark.parametrize("vocab_size", [50, 131_072])
def test_a_row_that_is_not_finite_gives_its_first_highest_token(device, vocab_size):
    logits = torch.randn(3, vocab_size, device=device)
    logits[0] = -torch.inf
    logits[1, [7, 9]] = torch.nan
    logits[2, [11, 12]] = torch.inf
    for request in (drawn(3), {}, drawn(3) | {"top_k": torch.full((3,), 3).int()}):
        got = vllm_kernels.sample(logits, **on(device, request))
        assert got.tolist() == [0, 7, 11]


@pytest.mark.parametrize("uniform", [0.0, 1e-30, 0.5, 1 - 2.0**-24, 1.0])
def test_ends_of_the_unit_interval(device, uniform):
    logits = torch.randn(4, 5000, device=device)
    logits[:, :10] = logits[:, -10:] = -torch.inf
    request = {"temperature": torch.ones(4), "uniforms": torch.full((4,), uniform)}
    check(logits, request)
    token = vllm_kernels.sample(logits, **on(device, request))
    assert logits.gather(1, token[:, None]).isfinite().all()


def test_top_k_keeps_the_first_of_equal_logits(device):
    logits = torch.zeros(1000, 300, device=device)
    top_k = torch.full((1000,), 7).int()
    tokens = vllm_kernels.sample(logits, **on(device, drawn(1000) | {"top_k": top_k}))
    assert set(tokens.tolist()) == set(range(7))


def test_a_row_does_not_depend_on_its_batch(device, dtype):
    """All parameters, alone and in another order."""
    logits = torch.randn(256, 20_000).to(device, dtype)
    request = random_request(256, 20_000, full=True)
    together = vllm_kernels.sample(logits, **on(device, request))
    for samples in (torch.randperm(256), *torch.tensor([[0], [100], [255]])):
        got = vllm_kernels.sample(logits[samples], **on(device, of_samples(request, samples)))
        assert torch.equal(got, together[samples])


def test_samples_share_rows(device):
    logits = torch.randn(3, 700)
    rows = torch.tensor([2, 0, 0, 1, 2]).int()
    request = random_request(5, 700) | {"rows": rows}
    check(logits.to(device), request)


def test_strided_and_unaligned_rows(device, dtype):
    packed = torch.randn(5, 3000, device=device, dtype=dtype)
    for part in (packed[:, :2048], packed[:, 1:2049], packed[::2, 8:1007]):
        check(part, random_request(part.shape[0], part.shape[1]))


def test_short_bitmask_allows_what_it_lacks(device):
    logits = torch.zeros(1, 100, device=device)
    logits[0, 70] = 1.0
    mask = torch.zeros(1, 2, dtype=torch.int32, device=device)
    assert vllm_kernels.sample(logits, bitmask=mask).tolist() == [70]
    assert vllm_kernels.sample(logits[:, :64], bitmask=mask).tolist() == [0]


def test_a_mask_that_ends_inside_of_a_row(device, dtype):
    logits = torch.randn(4, 131_072)
    request = drawn(4) | {
        "top_k": torch.full((4,), 50).int(),
        "bitmask": torch.randint(-(2**31), 2**31, (4, 2000)).int(),
    }
    check(logits.to(device, dtype), request)


def test_rows_outside_the_logits(device):
    logits = torch.randn(2, 50, device=device)
    rows = torch.tensor([1, 2, -1], dtype=torch.int32, device=device)
    if device == "cpu":
        with raises(r"^sample: rows\[1\] = 2: expected a row of logits in \[0, 2\)$"):
            vllm_kernels.sample(logits, rows=rows)
    else:
        assert vllm_kernels.sample(logits, rows=rows)[1:].tolist() == [-1, -1]


def test_no_samples(device):
    assert vllm_kernels.sample(torch.randn(0, 10, device=device)).shape == (0,)


def test_bad_input(device):
    x, ones = torch.randn(2, 40, device=device), torch.ones(2, device=device)
    ints = torch.ones(2, dtype=torch.int32, device=device)
    entry = torch.zeros(1, dtype=torch.int32, device=device)
    ends = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    longs = torch.ones(2, dtype=torch.int64, device=device)
    packed = (
        r"bitmask: expected int32 words of 32 tokens each, got one element per token: "
        r"pack the bits$"
    )
    cases = [
        ({"logits": x.int()}, r"logits: expected float32, float16 or bfloat16, got int32$"),
        ({"logits": x[0]}, r"logits: expected shape \[num_rows, vocab_size\], got shape \[40\]$"),
        ({"logits": x[:, :0]}, r"logits: expected vocab_size of 1 to 262144, got shape \[2, 0\]$"),
        ({"logits": x.t()}, r"logits: expected stride 1 in the last dimension, .*"),
        (
            {"temperature": ones},
            r"temperature: expected uniforms, or seeds and offsets, to draw with, got none$",
        ),
        (
            {"temperature": ones[:1], "uniforms": ones},
            r"temperature: expected num_samples = 2 \(from logits\) at dimension 0, "
            r"got shape \[1\]$",
        ),
        ({"top_k": ints.long()}, r"top_k: expected int32, got int64; cast it with .int\(\)$"),
        ({"top_p": ones.double()}, r"top_p: expected float32, got float64; cast it .*$"),
        (
            {"seeds": ints.long()},
            r"seeds: expected seeds and offsets together, got one of them$",
        ),
        (
            {"seeds": ints.long(), "offsets": ints.long(), "uniforms": ones},
            r"uniforms: expected uniforms or seeds, got both$",
        ),
        ({"bitmask_rows": ints}, r"bitmask_rows: expected a bitmask with it, got None$"),
        ({"bitmask": x > 0}, packed),
        ({"bitmask": (x > 0).int()}, packed),
        (
            {"bias": (entry, ones)},
            r"bias: expected \(indptr, tokens, values\), got \[a tensor, a "
            r"tensor\]$",
        ),
        ({"token_counts": {1: 2}}, r"token_counts: expected \(indptr, tokens, counts\), got .*"),
        (
            {"repetition": ones},
            r"token_counts: expected lists of the tokens to penalize, got None$",
        ),
        (
            {"token_counts": (ends[:2], entry, entry)},
            r"count_indptr: expected num_samples \+ 1 = 3 \(from logits\) at dimension 0, "
            r"got shape \[2\]$",
        ),
        (
            {"bias": (ends, entry, ones)},
            r"bias_values: expected entries = 1 \(from bias_tokens\) at dimension 0, "
            r"got shape \[2\]$",
        ),
        (
            {"out": torch.empty(2, device=device)},
            r"tokens: expected int64, got float32$",
        ),
        ({"logits": 3}, r"logits: expected a tensor, got int$"),
        ({"rows": x.int()}, r"rows: expected shape \[num_samples\], got shape \[2, 40\]$"),
        (
            {"temperature": ones, "seeds": longs, "offsets": longs + 1, "out": longs},
            r"tokens and seeds overlap in memory$",
        ),
    ]
    for change, message in cases:
        with raises("^sample: " + message):
            vllm_kernels.sample(**{"logits": x} | change)


def test_bad_tokens_on_the_cpu():
    x = torch.randn(2, 40)
    entry = torch.tensor([40], dtype=torch.int32)
    good = torch.tensor([0, 1, 1], dtype=torch.int32)
    with raises(
        r"^sample: count_tokens\[0\] = 40: expected -1 \(skipped\) or a token in \[0, 40\)$"
    ):
        vllm_kernels.sample(x, token_counts=(good, entry, entry))
    for ends in ([0, 2, 1], [0, 1, 0], [-1, 1, 1]):
        with raises(r"^sample: bias_indptr\[\d\] = -?\d: expected a rising end of a list in "):
            indptr = torch.tensor(ends, dtype=torch.int32)
            vllm_kernels.sample(x, bias=(indptr, 0 * entry, entry.float()))


@needs_cuda_library
def test_bad_tokens_are_contained():
    x = torch.randn(2, 40, device="cuda")
    tokens = torch.tensor([40, -1, 2**31 - 1], dtype=torch.int32, device="cuda")
    ends = torch.tensor([-5, 2, 900], dtype=torch.int32, device="cuda")
    got = vllm_kernels.sample(x, bias=(ends, tokens, torch.ones(3, device="cuda")))
    assert torch.equal(got, x.argmax(1))


def test_inference_only(device):
    with raises(r"^sample: logits: requires grad, .*no_grad\(\)$"):
        vllm_kernels.sample(torch.randn(2, 40, device=device, requires_grad=True))


@pytest.mark.parametrize("seeded", [False, True])
def test_opcheck_and_compile(device, dtype, seeded):
    x = torch.randn(4, 64).to(device, dtype)
    tokens = torch.empty(5, dtype=torch.int64, device=device)
    request = random_request(5, 64, full=True, seeded=seeded)
    request = on(device, request | {"rows": torch.tensor([0, 3, 3, 1, 2]).int()})
    opcheck("sample", tokens[:4], x)
    logprobs, ids = torch.empty(5, 3, device=device), tokens[:, None].repeat(1, 3)
    written = {"logprobs": logprobs, "ids": ids, "ranks": torch.empty_like(tokens)}
    opcheck("sample", tokens, x, **flat(request))
    opcheck("sample", tokens, x, **flat(request), **written)
    assert_compiles(lambda: vllm_kernels.sample(x, **request))
    assert_compiles(lambda: vllm_kernels.sample(x, **request, num_logprobs=2))
