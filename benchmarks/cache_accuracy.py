"""Perplexity of the toy model with keys and values as caches of each dtype hold them, and the
error of attention over unit-variance inputs.

    python -m benchmarks.cache_accuracy [--texts 16]

Windows of 256 tokens of held-out text, in float64 but for the rounding to the cache's elements.
One scale is the largest magnitude of the layer's keys, or values, over all texts. The error is
that of one query token over 2048 tokens, relative to the norm of the float64 result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.toy_perplexity import LENGTH, ToyPerplexity

Stored = Callable[[Tensor, Tensor], Tensor]
"""rows [..., tokens, head_size], the largest magnitude of the layer -> what the cache gives back"""


def one_scale(dtype: torch.dtype) -> Stored:
    largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max

    def stored(rows: Tensor, most: Tensor) -> Tensor:
        quotient = rows * (largest / most)
        rounded = quotient.float().to(dtype) if dtype.is_floating_point else quotient.round()
        return rounded.to(rows.dtype) * (most / largest)

    return stored


def scale_a_token(levels: int) -> Stored:
    """reference.reshape_and_cache_per_token_quant with -levels to levels."""

    def stored(rows: Tensor, most: Tensor) -> Tensor:
        scale = (rows.abs().amax(-1, keepdim=True) / levels).clamp_min(1e-30)
        return (rows / scale).round() * scale

    return stored


def scale_and_zero_a_token(rows: Tensor, most: Tensor) -> Tensor:
    """reference.reshape_and_cache_per_token_quant for int4, in float64."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-30)
    return ((rows - low) / scale).round() * scale + low


def attention_error(stored: Stored) -> float:
    """Of 64 queries with a head of 128; queries, keys and values have unit variance."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(64, 1, 128, dtype=torch.float64, generator=generator)
    key, value = torch.randn(2, 64, 2048, 128, dtype=torch.float64, generator=generator)
    attention = torch.nn.functional.scaled_dot_product_attention
    want = attention(query, key, value)
    got = attention(query, *(stored(x, x.abs().amax()) for x in (key, value)))
    return ((got - want).norm() / want.norm()).item()


def caches() -> Iterator[tuple[str, Stored | None]]:
    yield "float64", None
    yield "e4m3, one scale", one_scale(torch.float8_e4m3fn)
    yield "e5m2, one scale", one_scale(torch.float8_e5m2)
    yield "int8, one scale", one_scale(torch.int8)
    yield "int8, a scale a token and head", scale_a_token(127)
    yield "int4, a scale and a zero a token", scale_and_zero_a_token
    yield "4 bits, a scale a token and head", scale_a_token(7)


class CachedAttention:
    """transformers' attention over keys and values from a cache."""

    def __init__(self) -> None:
        self.stored: Stored | None = None
        self.most: dict[int, tuple[Tensor, Tensor]] = {}  # by layer; of float64's run

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object,
        scaling: float, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        layer = int(module.layer_idx)
        here = key.abs().amax(), value.abs().amax()
        before = self.most.setdefault(layer, here)
        if self.stored is None:
            self.most[layer] = torch.maximum(before[0], here[0]), torch.maximum(before[1], here[1])
        else:
            key, value = (self.stored(x, most) for x, most in zip((key, value), before))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=16)
    asked = parser.parse_args()
    attention = CachedAttention()
    perplexity = ToyPerplexity(attention, asked.texts)
    num_texts = len(perplexity.texts)
    print(f"{num_texts} texts, {num_texts * (LENGTH - 1)} tokens")
    for name, stored in caches():
        attention.stored = stored
        error = f"{attention_error(stored):8.4f}" if stored else ""
        print(f"{name:36} {perplexity.of_tokens_from(1):8.3f} {error}", flush=True)


if __name__ == "__main__":
    main()
