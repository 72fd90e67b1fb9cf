"""Random calls of `sample`, and the logits that are hard for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference
from vllm_kernels.reference import sampling

TokenLists = tuple[Tensor, Tensor, Tensor]
VOCABULARIES = [1, 31, 1000, 32_000, 131_072, 151_936, 262_144]


@lru_cache(maxsize=64)
def weights_of(row: bytes, weights: Callable[[Tensor], Tensor] = sampling._weights) -> Tensor:
    return weights(torch.frombuffer(bytearray(row), dtype=torch.float32))


# The reference's slowest step, which it repeats for each sample of a row: here once.
sampling._weights = lambda logits: weights_of(logits.numpy().tobytes())


def check(logits: Tensor, request: dict[str, object]) -> Tensor:
    """The tokens of `sample`, which are those of the reference."""
    want = reference.sample(logits, **request)
    got = vllm_kernels.sample(logits, **on(logits.device.type, request)).cpu()
    assert torch.equal(got, want), f"{got.tolist()}, expected {want.tolist()}"
    return got


def check_logprobs(
    logits: Tensor, request: dict[str, object], *numbers: int, tokens: Tensor | None = None
) -> None:
    """`sample` gives the reference's tokens with any of these numbers of log-probabilities. These
    are those of `token_logprobs`, to the bit on a CPU and where CUDA reads the row again.
    tokens: the reference's, if they are known."""
    given = on(logits.device.type, request)
    tokens = reference.sample(logits, **request) if tokens is None else tokens
    exact = is_read_again(request, len(tokens), logits.shape[1]) | (not logits.is_cuda)
    rows = request.get("rows", torch.arange(len(tokens))).long()
    pairs, places = torch.stack([rows, tokens]).unique(dim=1, return_inverse=True)
    want = reference.token_logprobs(logits, pairs[1], max(numbers), rows=pairs[0])
    want = [x[places] for x in want]
    rounding = 2.0**-23  # two halves of an ulp
    for number in numbers:
        found = vllm_kernels.sample(logits, **given, num_logprobs=number)
        got, logprobs, ids, ranks = (x.cpu() for x in found)
        assert torch.equal(got, tokens)
        assert torch.equal(ids, want[1][:, : 1 + number])
        assert torch.equal(ranks, want[2])
        best = want[0][:, : 1 + number]
        torch.testing.assert_close(logprobs, best, atol=2e-6, rtol=rounding, equal_nan=True)
        torch.testing.assert_close(logprobs[exact], best[exact], atol=0.0, rtol=0.0, equal_nan=True)


def is_read_again(request: dict[str, object], samples: int, vocab_size: int) -> Tensor:
    """Masked, penalized and nucleus rows, and those with a top_k above 127."""
    none = torch.zeros(samples)
    top_k = request.get("top_k", none)
    again = (top_k <= 0) | (top_k > 127) | (top_k >= vocab_size)
    again &= request.get("temperature", none) >= 1e-5
    if "bitmask" in request:
        again |= request.get("bitmask_rows", none) >= 0
    for name in {"bias", "token_counts"} & request.keys():
        again |= request[name][0].diff() > 0
    return again


def drawn(samples: int) -> dict[str, Tensor]:
    return {"temperature": torch.ones(samples), "uniforms": torch.rand(samples)}


def pick(values: list[float], count: int) -> Tensor:
    return torch.tensor(values)[torch.randint(len(values), (count,))]


def few(samples: int, vocab_size: int) -> Tensor:
    """Sizes of lists: up to 40 tokens, none for some."""
    return torch.randint(min(vocab_size, 40) + 1, (samples,)) * torch.randint(2, (samples,))


def token_lists(sizes: Tensor, vocab_size: int, values: str) -> TokenLists:
    """Distinct tokens, sizes[i] of them for sample i."""
    tokens = [torch.randperm(vocab_size)[: int(size)] for size in sizes]
    total = int(sizes.sum())
    numbers = torch.randint(4, (total,)).int() if values == "counts" else 3 * torch.randn(total)
    return ends(sizes), torch.cat([*tokens, torch.empty(0, dtype=torch.int64)]).int(), numbers


def ends(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()


def with_room(lists: TokenLists, room: int = 2) -> TokenLists:
    """The lists with `room` skipped entries at the end of each."""
    indptr, *columns = lists
    sizes = indptr.diff().tolist()
    padded = [
        torch.cat([torch.cat([part, part.new_full((room,), fill)]) for part in column.split(sizes)])
        for column, fill in zip(columns, (-1, 1))
    ]
    return indptr + room * torch.arange(len(indptr), dtype=indptr.dtype), *padded


def random_request(
    samples: int, vocab_size: int, *, full: bool = False, seeded: bool | None = None
) -> dict[str, object]:
    """Parameters of `sample`, on the CPU; some have no effect in some samples. With `full` all
    lists and the mask are there."""
    seeded = bool(torch.randint(2, (1,))) if seeded is None else seeded
    words = -(-vocab_size // 32)
    mask = torch.randint(-(2**31), 2**31, (samples, words)) | torch.randint(
        -(2**31), 2**31, (samples, words)
    )
    penalized = bool(torch.randint(2, (1,))) or full
    masked = bool(torch.randint(2, (1,))) or full
    request: dict[str, object] = {
        "temperature": pick([0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 20.0], samples),
        "top_k": pick([-1, 0, 1, 5, 50, 1000, 5000, vocab_size - 1, 2 * vocab_size], samples).int(),
        "top_p": pick([1.0, 1.0, 0.999, 0.95, 0.5, 0.01, 0.0], samples),
        "min_p": pick([0.0, 0.0, 0.001, 0.05, 1.0], samples),
    }
    if seeded:
        request["seeds"] = torch.randint(-(2**62), 2**62, (samples,))
        request["offsets"] = torch.randint(10**6, (samples,))
    else:
        request["uniforms"] = torch.rand(samples)
    if penalized:
        request |= {
            "token_counts": token_lists(few(samples, vocab_size), vocab_size, "counts"),
            "repetition": pick([1.0, 1.3, 0.8], samples),
            "frequency": pick([0.0, 0.4, -0.2], samples),
            "presence": pick([0.0, 0.6], samples),
            "bias": token_lists(few(samples, vocab_size), vocab_size, "bias"),
        }
    if masked:
        request["bitmask"] = mask.int()
        request["bitmask_rows"] = torch.randint(-1, samples, (samples,)).int()
    return request


def random_sample(device: str) -> tuple[Tensor, dict[str, object]]:
    """Logits, and some of the parameters of `sample`, at a random point of all axes."""
    vocab_size = random.randrange(1, random.choice([300, 300, 40_000, 40_000, 262_145]))
    rows = random.randrange(1, 13 if vocab_size < 100_000 else 4)
    samples = random.choice([rows, random.randrange(1, 20)])
    logits = random.choice([0.1, 1.0, 3.0, 30.0]) * torch.randn(rows, vocab_size)
    if random.random() < 0.2 and vocab_size > 30:
        logits = hard_rows(vocab_size)[torch.randint(12, (rows,))]
    request = random_request(samples, vocab_size)
    request["rows"] = torch.randint(rows, (samples,)).int()
    if samples == rows and random.random() < 0.5:
        del request["rows"]
    for name in ("token_counts", "bias"):
        if name in request and random.random() < 0.5:
            sizes = (vocab_size * torch.rand(samples) ** 4).long()
            request[name] = token_lists(sizes, vocab_size, "counts" if "c" in name else "bias")
        if name in request and random.random() < 0.5:
            request[name] = with_room(request[name], random.randrange(1, 600))
    if "bitmask" in request and random.random() < 0.3:  # tokens past the mask are allowed
        request["bitmask"] = request["bitmask"][:, : random.randrange(1, vocab_size // 32 + 2)]
    for name in ("top_k", "top_p", "min_p", "repetition", "frequency", "presence", "bias"):
        if random.random() < 0.3:
            request.pop(name, None)
    begin, end = random.choice([(0, 0), (random.randrange(9), random.randrange(9))])
    dtype = random.choice([torch.float32, torch.float16, torch.bfloat16])
    strided = torch.empty(rows, begin + vocab_size + end, device=device, dtype=dtype)
    return strided[:, begin : begin + vocab_size].copy_(logits), request


def on(device: str, request: dict[str, object]) -> dict[str, object]:
    def move(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(move(one) for one in value)
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: move(value) for name, value in request.items()}


def flat(request: dict[str, object]) -> dict[str, Tensor]:
    """The arguments of torch.ops.vllm_kernels.sample."""
    lists = {
        "token_counts": ("count_indptr", "count_tokens", "counts"),
        "bias": ("bias_indptr", "bias_tokens", "bias_values"),
    }
    given = {name: value for name, value in request.items() if name not in lists}
    for name in lists.keys() & request.keys():
        given |= zip(lists[name], request[name])
    return given


def of_samples(request: dict[str, object], samples: Tensor) -> dict[str, object]:
    """The parameters of some samples, in that order. The bitmask stays whole."""

    def taken(lists: TokenLists) -> TokenLists:
        indptr, *columns = lists
        sizes = indptr.diff()
        picked = [torch.cat([c.split(sizes.tolist())[i] for i in samples]) for c in columns]
        return ends(sizes[samples]), *picked

    return {
        name: value if name == "bitmask" else taken(value) if isinstance(value, tuple)
        else value[samples]
        for name, value in request.items()
    }  # fmt: skip


def hard_rows(vocab_size: int) -> Tensor:
    """float32 [rows, vocab_size]: ties, equal, infinite and NaN logits, both zeros."""
    x = torch.randn(12, vocab_size)
    x[0] = torch.randint(-2, 3, (vocab_size,)).float()
    x[1] = 0.5
    x[2] = -torch.inf
    x[2, vocab_size // 2] = -3.0
    x[3] = -torch.inf
    x[4, vocab_size // 3] = torch.nan
    x[4, -1] = torch.nan
    x[5, vocab_size // 4] = torch.inf
    x[5, -1] = torch.inf
    x[6] = torch.where(torch.arange(vocab_size) % 2 == 0, 0.0, -0.0)
    x[7, ::2] = -torch.inf
    x[8] *= 100
    x[9] = x[9].round()
    x[10] = -40.0
    x[10, vocab_size // 5] = 40.0
    x[11] *= 1e-30
    return x
