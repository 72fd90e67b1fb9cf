"""Perplexity of the toy model with SparQ, with page selection (Quest) and with caches of fewer
bits, beside dense attention and beside windows of its newest tokens.

    python -m benchmarks.sparse_accuracy [--texts 16]

Tokens 129 to 256 of windows of held-out text are scored in float64. All layers are sparse for them,
and dense for the tokens before. A window of the same bytes as SparQ has k + n r / (2 head_size) of
the n tokens of the context. A cache of fewer bits holds all tokens, and attention is dense.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.cache_accuracy import Stored, scale_a_token, scale_and_zero_a_token
from benchmarks.toy_perplexity import LENGTH, ToyPerplexity
from vllm_kernels.reference import page_bounds_update, select_pages, sparq_choice

DENSE = 128
SINK_PAGES, RECENT_PAGES = 1, 2  # of page selection
Keep = Callable[[Tensor, Tensor, float], Tensor]
"""heads [kv_heads, group, queries, head_size], keys [kv_heads, 1, tokens, head_size], scale -> the
weight of each token [kv_heads, group, queries, tokens] in place of softmax's for all; the queries
are those of the last tokens."""


def before(queries: int, tokens: int) -> Tensor:
    """How many tokens each token comes before each query; negative: after it."""
    return torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)


def weights(heads: Tensor, keys: Tensor, scale: float, kept: Tensor) -> Tensor:
    return (scale * heads @ keys.mT).masked_fill(~kept, -torch.inf).softmax(-1)


def kept_tokens(scores: Tensor, ages: Tensor, unit: int, budget: int, behind: Tensor) -> Tensor:
    """The best units by ``scores`` [..., queries, units], and those that ``behind`` marks, as
    tokens [..., queries, tokens]."""
    scores = scores.masked_fill(behind, torch.inf)
    best = torch.zeros_like(scores).scatter(-1, scores.topk(budget).indices, 1.0)
    return (best.repeat_interleave(unit, -1) > 0) & (ages >= 0)


def units_behind(ages: Tensor, unit: int) -> Tensor:
    """How many units each unit comes before that of each query."""
    queries, tokens = ages.shape
    last = torch.arange(tokens - queries, tokens)[:, None] // unit
    return last - torch.arange(tokens // unit)


def window(k: int, r: int = 0) -> Keep:
    def keep(heads: Tensor, keys: Tensor, scale: float) -> Tensor:
        queries, (tokens, size) = heads.shape[-2], keys.shape[-2:]
        ages = before(queries, tokens)
        context = torch.arange(tokens - queries, tokens)[:, None] + 1
        newest = k + r * context // (2 * size)
        return weights(heads, keys, scale, (ages >= 0) & (ages < newest))

    return keep


def sparq(r: int, k: int, chunk: int, unit: int, mean: bool = False) -> Keep:
    """reference.sparq_choice for all queries at once."""

    def keep(heads: Tensor, keys: Tensor, scale: float) -> Tensor:
        ages, newest = before(heads.shape[-2], keys.shape[-2]), k // 4
        magnitudes = heads.abs().sum(-3, keepdim=True).unflatten(-1, (-1, chunk)).sum(-1)
        chosen = torch.zeros_like(magnitudes).scatter(-1, magnitudes.topk(r // chunk).indices, 1.0)
        part = heads * chosen.repeat_interleave(chunk, -1)
        norms = heads.abs().sum(-1, keepdim=True) / part.abs().sum(-1, keepdim=True)
        scores = (scale * norms.sqrt() * part @ keys.mT).masked_fill(ages < 0, -torch.inf)
        units = scores.sum(-3, keepdim=True).unflatten(-1, (-1, unit)).amax(-1)
        behind = units_behind(ages, unit)
        always = (behind >= 0) & (behind < (newest + unit - 2) // unit + 1)
        kept = kept_tokens(units, ages, unit, k // unit, always)
        share = weights(heads, keys, scale, kept)
        if mean:
            alpha = (scores.softmax(-1) * kept).sum(-1, keepdim=True)
            share = alpha * share + (1 - alpha) * (ages >= 0) / (ages >= 0).sum(1, keepdim=True)
        return share

    return keep


def quest(k: int, page: int, per_kv_head: bool) -> Keep:
    """reference.select_pages for all queries at once. A page's bounds are those of all its tokens.
    The newest page, which may have later ones, is kept whatever its bounds are."""

    def keep(heads: Tensor, keys: Tensor, scale: float) -> Tensor:
        ages = before(heads.shape[-2], keys.shape[-2])
        pages = keys.unflatten(-2, (-1, page))
        positive, negative = (x.sum(-3, keepdim=True) for x in (heads.clamp(0), heads.clamp(max=0)))
        scores = positive @ pages.amax(-2).mT + negative @ pages.amin(-2).mT
        if not per_kv_head:
            scores = scores.sum(0, keepdim=True)
        behind = units_behind(ages, page)
        always = (behind >= 0) & (behind < RECENT_PAGES) | (
            torch.arange(len(behind[0])) < SINK_PAGES
        )
        scores = scores.masked_fill(behind < 0, -torch.inf)
        return weights(heads, keys, scale, kept_tokens(scores, ages, page, k // page, always))

    return keep


def check_sparq() -> None:
    heads, keys = torch.randn(1, 3, 8, 32).double(), torch.randn(1, 1, 256, 32).double()
    for chunk, unit in ((1, 1), (8, 8)):
        got = sparq(16, 32, chunk, unit)(heads, keys, 0.2)[0, 0] > 0
        for query in range(8):
            tokens = 249 + query
            _, kept = sparq_choice(
                heads[0, :, query], keys[0, 0, :tokens], scale=0.2, r=16, k=32, window=8,
                chunk=chunk, unit=unit,
            )  # fmt: skip
            assert torch.equal(got[query, :tokens], kept) and not got[query, tokens:].any()


def check_quest() -> None:
    heads, keys = torch.randn(2, 3, 8, 32).double(), torch.randn(2, 1, 256, 32).float().double()
    for page, per_kv_head in ((4, False), (16, True)):
        got = quest(64, page, per_kv_head)(heads, keys, 0.2)[:, 0] > 0  # [kv_heads, queries, ...]
        cache = keys[:, 0].float().unflatten(1, (-1, page)).transpose(0, 1)  # layout HND
        tables = torch.arange(len(cache), dtype=torch.int32)[None]
        for query in range(8):
            tokens = 249 + query
            bounds = page_bounds_update(
                torch.zeros(len(cache), 2, 2, 32), cache, torch.arange(tokens), layout="HND"
            )
            kept, lens = select_pages(
                heads[:, :, query].flatten(0, 1)[None], bounds, tables,
                torch.tensor([tokens], dtype=torch.int32), 64, block_size=page,
                sink_pages=SINK_PAGES, recent_pages=RECENT_PAGES, per_kv_head=per_kv_head,
            )  # fmt: skip
            for head, row in enumerate(kept[0] if per_kv_head else kept.expand(2, -1)):
                want = row.repeat_interleave(page) * page + torch.arange(page).repeat(len(row))
                assert torch.equal(got[head, query].nonzero()[:, 0], want[: int(lens)])


class SparseAttention:
    """transformers' attention, with a choice of tokens from position DENSE on, or with keys and
    values as a cache holds them."""

    def __init__(self) -> None:
        self.keep: Keep | None = None
        self.stored: Stored | None = None

    def __call__(
        self, module: object, query: Tensor, key: Tensor, value: Tensor, mask: object,
        scaling: float, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if self.stored is not None:
            key, value = (self.stored(x, x.abs().amax()) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        if self.keep is not None:
            grouped = query[0].unflatten(0, (key.shape[1], -1))[:, :, DENSE:]
            rows = self.keep(grouped, key[0][:, None], scaling) @ value[0][:, None]
            out[0, :, DENSE:] = rows.flatten(0, 1)
        return out.transpose(1, 2), None


def choices() -> Iterator[tuple[str, Keep | None, Stored | None]]:
    yield "dense", None, None
    yield "int8, a scale a token and head", None, scale_a_token(127)
    yield "int4, a scale and a zero a token and head", None, scale_and_zero_a_token
    for name, keep in sparse_choices():
        yield name, keep, None


def sparse_choices() -> Iterator[tuple[str, Keep]]:
    for k in (32, 64, 128):
        yield f"window of {k}", window(k)
        for page in (4, 8, 16) if k > 32 else (4, 8):  # room for the pages that are always kept
            yield f"Quest, k = {k}, pages of {page}", quest(k, page, False)
            yield f"Quest, k = {k}, pages of {page}, per KV head", quest(k, page, True)
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
    check_sparq()
    check_quest()
    attention = SparseAttention()
    perplexity = ToyPerplexity(attention, asked.texts)
    num_texts = len(perplexity.texts)
    print(f"{num_texts} texts, {num_texts * (LENGTH - DENSE)} tokens")
    for name, attention.keep, attention.stored in choices():
        print(f"{name:48} {perplexity.of_tokens_from(DENSE):7.2f}", flush=True)


if __name__ == "__main__":
    main()
