"""Perplexity of the toy model with SparQ, beside dense attention and beside windows of its newest
tokens.

    python -m benchmarks.sparse_accuracy [--texts 16]

Tokens 129 to 256 of windows of held-out text are scored in float64. All layers are sparse for them,
and dense for the tokens before. A window of the same bytes as SparQ has k + n r / (2 head_size) of
the n tokens of the context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.toy_perplexity import LENGTH, ToyPerplexity
from vllm_kernels.reference import sparq_choice

DENSE = 128
Keep = Callable[[Tensor, Tensor, float], Tensor]
"""heads [group, queries, head_size], keys [tokens, head_size], scale -> the weight of each token
[group, queries, tokens] in place of softmax's for all; the queries are those of the last tokens."""


def before(queries: int, tokens: int) -> Tensor:
    """How many tokens each token comes before each query; negative: after it."""
    return torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)


def weights(heads: Tensor, keys: Tensor, scale: float, kept: Tensor) -> Tensor:
    return (scale * heads @ keys.T).masked_fill(~kept, -torch.inf).softmax(-1)


def window(k: int, r: int = 0) -> Keep:
    def keep(heads: Tensor, keys: Tensor, scale: float) -> Tensor:
        ages = before(heads.shape[1], len(keys))
        context = torch.arange(len(keys) - len(ages), len(keys))[:, None] + 1
        newest = k + r * context // (2 * keys.shape[1])
        return weights(heads, keys, scale, (ages >= 0) & (ages < newest))

    return keep


def sparq(r: int, k: int, chunk: int, unit: int, mean: bool = False) -> Keep:
    """reference.sparq_choice for all queries at once."""

    def keep(heads: Tensor, keys: Tensor, scale: float) -> Tensor:
        ages, newest = before(heads.shape[1], len(keys)), k // 4
        magnitudes = heads.abs().sum(0).unflatten(1, (-1, chunk)).sum(2)
        chosen = torch.zeros_like(magnitudes).scatter(1, magnitudes.topk(r // chunk).indices, 1.0)
        part = heads * chosen.repeat_interleave(chunk, 1)
        norms = heads.abs().sum(-1, keepdim=True) / part.abs().sum(-1, keepdim=True)
        scores = (scale * norms.sqrt() * part @ keys.T).masked_fill(ages < 0, -torch.inf)
        units = scores.sum(0).unflatten(1, (-1, unit)).amax(2)
        last = torch.arange(len(keys) - len(ages), len(keys))[:, None] // unit
        behind = last - torch.arange(units.shape[1])
        units[(behind >= 0) & (behind < (newest + unit - 2) // unit + 1)] = torch.inf
        best = torch.zeros_like(units).scatter(1, units.topk(k // unit).indices, 1.0)
        kept = (best.repeat_interleave(unit, 1) > 0) & (ages >= 0)
        share = weights(heads, keys, scale, kept)
        if mean:
            alpha = (scores.softmax(-1) * kept).sum(-1, keepdim=True)
            share = alpha * share + (1 - alpha) * (ages >= 0) / (ages >= 0).sum(1, keepdim=True)
        return share

    return keep


def check_choice() -> None:
    heads, keys = torch.randn(3, 8, 32).double(), torch.randn(256, 32).double()
    for chunk, unit in ((1, 1), (8, 8)):
        got = sparq(16, 32, chunk, unit)(heads, keys, 0.2)[0] > 0
        for query in range(8):
            tokens = 249 + query
            _, kept = sparq_choice(
                heads[:, query], keys[:tokens], scale=0.2, r=16, k=32, window=8, chunk=chunk,
                unit=unit,
            )  # fmt: skip
            assert torch.equal(got[query, :tokens], kept) and not got[query, tokens:].any()


class SparseAttention:
    """transformers' attention, with a choice of tokens from position DENSE on."""

    def __init__(self) -> None:
        self.keep: Keep | None = None

    def __call__(
        self, module: object, query: Tensor, key: Tensor, value: Tensor, mask: object,
        scaling: float, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        if self.keep is not None:
            grouped = query[0].unflatten(0, (key.shape[1], -1))[:, :, DENSE:]
            rows = [
                self.keep(heads, keys, scaling) @ values
                for heads, keys, values in zip(grouped, key[0], value[0])
            ]
            out[0, :, DENSE:] = torch.cat(rows)
        return out.transpose(1, 2), None


def choices() -> Iterator[tuple[str, Keep | None]]:
    yield "dense", None
    for k in (32, 64, 128):
        yield f"window of {k}", window(k)
        for r in (8, 16, 32):
            yield f"window of the bytes of r = {r}, k = {k}", window(k, r)
            yield f"r = {r}, k = {k}, single, tokens", sparq(r, k, 1, 1)
            yield f"r = {r}, k = {k}, chunks of 8, tokens", sparq(r, k, 8, 1)
            yield f"r = {r}, k = {k}, chunks of 8, tokens, mean", sparq(r, k, 8, 1, True)
            yield f"r = {r}, k = {k}, chunks of 8, pages of 8", sparq(r, k, 8, 8)
            if r >= 16:
                yield f"r = {r}, k = {k}, chunks of 16, tokens", sparq(r, k, 16, 1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=16)
    asked = parser.parse_args()
    check_choice()
    attention = SparseAttention()
    perplexity = ToyPerplexity(attention, asked.texts)
    num_texts = len(perplexity.texts)
    print(f"{num_texts} texts, {num_texts * (LENGTH - DENSE)} tokens")
    for name, keep in choices():
        attention.keep = keep
        print(f"{name:48} {perplexity.of_tokens_from(DENSE):7.2f}", flush=True)


if __name__ == "__main__":
    main()
