"""sample against its reference, token for token."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, needs_cuda_library, opcheck, raises
from sampling_cases import VOCABULARIES, hard_rows, on, pick, random_request

import vllm_kernels
from vllm_kernels import reference


def check(logits: torch.Tensor, request: dict[str, object]) -> None:
    want = reference.sample(logits, **request)
    got = vllm_kernels.sample(logits, **on(logits.device.type, request))
    assert torch.equal(got.cpu(), want)


def drawn(samples: int) -> dict[str, torch.Tensor]:
    return {"temperature": torch.ones(samples), "uniforms": torch.rand(samples)}


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


@pytest.mark.parametrize("limits", [{}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(device, limits):
    """Chi-square of 200,000 draws against the exact probabilities."""
    draws, vocab_size = 200_000, 64
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


def test_a_row_does_not_depend_on_its_batch(device, dtype):
    vocab_size = 20_000
    logits = torch.randn(256, vocab_size, device=device, dtype=dtype)
    request = on(device, random_request(256, vocab_size))
    lists = {"token_counts", "bias"}
    simple = {name: value for name, value in request.items() if name not in lists}
    for name in ("repetition", "frequency", "presence", "bitmask", "bitmask_rows"):
        simple.pop(name, None)
    together = vllm_kernels.sample(logits, **simple)
    order = torch.randperm(256, device=device)
    shuffled = {name: value[order] for name, value in simple.items()}
    assert torch.equal(vllm_kernels.sample(logits[order], **shuffled), together[order])
    for i in (0, 100, 255):
        alone = {name: value[i : i + 1] for name, value in simple.items()}
        assert vllm_kernels.sample(logits[i : i + 1], **alone) == together[i]


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


def test_agrees_with_torch():
    """Up to draws within 1e-6 of a border, where float32 sums differ."""
    logits = 3 * torch.randn(400, 3000)
    request = {
        "temperature": torch.full((400,), 0.8),
        "top_k": torch.full((400,), 40).int(),
        "top_p": torch.full((400,), 0.9),
        "uniforms": torch.rand(400),
    }
    want = by_torch(logits, request["temperature"], 40, 0.9, request["uniforms"])
    got = vllm_kernels.sample(logits, **request)
    assert (got != want).sum() <= 1


def test_skipped_entries_of_lists(device):
    """Token -1 leaves its entry out, so a list may have room at its end."""
    request = random_request(6, 500)
    with_room = dict(request)
    for name in ("token_counts", "bias"):
        indptr, tokens, values = request[name]
        ends = indptr.tolist()
        parts = [slice(ends[i], ends[i + 1]) for i in range(6)]
        room = torch.full((2,), -1, dtype=tokens.dtype)
        with_room[name] = (
            indptr + 2 * torch.arange(7, dtype=indptr.dtype),
            torch.cat([torch.cat([tokens[part], room]) for part in parts]),
            torch.cat([torch.cat([values[part], values.new_ones(2)]) for part in parts]),
        )
    logits = torch.randn(6, 500, device=device)
    want = vllm_kernels.sample(logits, **on(device, request))
    assert torch.equal(vllm_kernels.sample(logits, **on(device, with_room)), want)
    check(logits, with_room)


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
        (
            {"repetition": ones},
            r"counts: expected the counts of tokens to penalize, got None$",
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


def test_opcheck_and_compile(device, dtype):
    x = torch.randn(4, 64, device=device, dtype=dtype)
    tokens = torch.empty(4, dtype=torch.int64, device=device)
    opcheck("sample", tokens, x)
    request = on(device, drawn(4))
    opcheck("sample", tokens, x, **request)
    assert_compiles(lambda: vllm_kernels.sample(x, **request))


@needs_cuda_library
def test_graph_replay(dtype):
    vocab_size = 32_000
    logits = torch.randn(8, vocab_size, device="cuda", dtype=dtype)
    torch.manual_seed(1)
    request = on("cuda", drawn(8) | {"top_k": torch.full((8,), 50).int(), "top_p": torch.ones(8)})
    out = torch.empty(8, dtype=torch.int64, device="cuda")

    def refill() -> None:
        logits.normal_()
        request["temperature"].uniform_(0.0, 2.0)
        request["temperature"][0] = 0.0
        request["uniforms"].uniform_()
        request["top_k"].random_(0, 5000)
        request["top_p"].uniform_()

    assert_graph_replays(
        lambda: vllm_kernels.sample(logits, **request, out=out),
        refill,
        out,
        lambda: vllm_kernels.sample(logits, **request),
    )
    check(logits, {name: value.cpu() for name, value in request.items()})
