"""Random calls of `sample`, and the logits that are hard for it."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARIES = [1, 31, 1000, 32_000, 131_072, 151_936, 262_144]


def pick(values: list[float], count: int) -> Tensor:
    return torch.tensor(values)[torch.randint(len(values), (count,))]


def token_lists(samples: int, vocab_size: int, values: str) -> tuple[Tensor, Tensor, Tensor]:
    """Up to 40 distinct tokens a sample, none for some."""
    sizes = torch.randint(min(vocab_size, 40) + 1, (samples,)) * torch.randint(2, (samples,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    tokens = [torch.randperm(vocab_size)[: int(size)] for size in sizes]
    total = int(indptr[-1])
    numbers = torch.randint(4, (total,)).int() if values == "counts" else 3 * torch.randn(total)
    return indptr.int(), torch.cat([*tokens, torch.empty(0, dtype=torch.int64)]).int(), numbers


def random_request(samples: int, vocab_size: int) -> dict[str, object]:
    """All parameters of `sample`, on the CPU; some have no effect in some samples."""
    words = -(-vocab_size // 32)
    mask = torch.randint(-(2**31), 2**31, (samples, words)) | torch.randint(
        -(2**31), 2**31, (samples, words)
    )
    penalized = bool(torch.randint(2, (1,)))
    masked = bool(torch.randint(2, (1,)))
    request: dict[str, object] = {
        "temperature": pick([0.0, 0.3, 0.7, 1.0, 1.0, 1.5, 20.0], samples),
        "top_k": pick([-1, 0, 1, 5, 50, 1000, 5000, vocab_size - 1, 2 * vocab_size], samples).int(),
        "top_p": pick([1.0, 1.0, 0.999, 0.95, 0.5, 0.01, 0.0], samples),
        "min_p": pick([0.0, 0.0, 0.001, 0.05, 1.0], samples),
    }
    if torch.randint(2, (1,)):
        request["uniforms"] = torch.rand(samples)
    else:
        request["seeds"] = torch.randint(-(2**62), 2**62, (samples,))
        request["offsets"] = torch.randint(10**6, (samples,))
    if penalized:
        request |= {
            "token_counts": token_lists(samples, vocab_size, "counts"),
            "repetition": pick([1.0, 1.3, 0.8], samples),
            "frequency": pick([0.0, 0.4, -0.2], samples),
            "presence": pick([0.0, 0.6], samples),
            "bias": token_lists(samples, vocab_size, "bias"),
        }
    if masked:
        request["bitmask"] = mask.int()
        request["bitmask_rows"] = torch.randint(-1, samples, (samples,)).int()
    return request


def on(device: str, request: dict[str, object]) -> dict[str, object]:
    def move(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(move(one) for one in value)
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: move(value) for name, value in request.items()}


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
