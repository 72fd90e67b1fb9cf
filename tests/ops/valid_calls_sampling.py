"""Valid calls of the ops that choose tokens."""

from __future__ import annotations

import random
from random import choice

import torch
from torch import Tensor
from valid_calls_base import FLOATS, Call, calls, ints, maybe, unset

VOCABULARY = 70
"""Two words of a bitmask and some tokens past them."""


def some_logits() -> Tensor:
    return 3 * torch.randn(3, VOCABULARY).to(choice(FLOATS))


def limits() -> Call:
    return {
        "top_k": maybe(ints(0, 5, VOCABULARY)), "top_p": maybe(torch.tensor([1.0, 0.5, 0.9])),
        "min_p": maybe(torch.tensor([0.0, 0.1, 0.01])),
    }  # fmt: skip


def bitmask() -> Call:
    words = torch.randint(-(2**31), 2**31, (3, 2)).int()
    return {"bitmask": words, "bitmask_rows": maybe(ints(2, -1, 0))}


def token_list(values: Tensor, names: tuple[str, str, str]) -> Call:
    """Lists of 2, 0 and 3 tokens with a value each."""
    lists = (ints(0, 2, 2, 5), torch.randperm(VOCABULARY)[:5].int(), values)
    return dict(zip(names, lists))


def unset_logprobs() -> Call:
    width = 1 + choice([0, 1, 5])
    return {
        "logprobs": unset(3, width), "ids": torch.full((3, width), -7),
        "ranks": torch.full((3,), -7),
    }  # fmt: skip


@calls("sample")
def draw(op: str) -> Call:
    random_numbers = choice([
        {"uniforms": torch.rand(3)},
        {"seeds": torch.randint(-9, 9, (3,)), "offsets": torch.randint(0, 9, (3,))},
    ])  # fmt: skip
    call: Call = {
        "tokens": torch.full((3,), -7), "logits": some_logits(),
        "temperature": torch.tensor([0.0, 0.7, 1.5]), **random_numbers, **limits(),
        "rows": maybe(ints(2, 0, 0)),
    }  # fmt: skip
    if random.random() < 0.5:
        call |= bitmask()
    if random.random() < 0.5:
        counts = ints(1, 3, 1, 2, 1)
        call |= token_list(counts, ("count_indptr", "count_tokens", "counts"))
        for name in ("repetition", "frequency", "presence"):
            call[name] = maybe(torch.rand(3) + 0.5)
    if random.random() < 0.5:
        call |= token_list(torch.randn(5), ("bias_indptr", "bias_tokens", "bias_values"))
    if random.random() < 0.5:
        call |= unset_logprobs()
    return call


@calls("top_k_top_p_mask_")
def mask_unlikely(op: str) -> Call:
    return {"logits": some_logits(), **limits()}


@calls("token_logprobs")
def logprobs(op: str) -> Call:
    tokens = torch.randint(0, VOCABULARY, (3,))
    rows = maybe(ints(2, 0, 0))
    return {**unset_logprobs(), "logits": some_logits(), "tokens": tokens, "rows": rows}


@calls("softmax")
def probabilities(op: str) -> Call:
    logits = some_logits()
    return {
        "out": unset(*logits.shape), "logits": logits, "temperature": maybe(torch.rand(3) + 0.5),
    }  # fmt: skip


@calls("apply_token_bitmask_")
def forbid(op: str) -> Call:
    return {"logits": some_logits(), **bitmask()}


@calls("apply_repetition_penalties")
def penalize(op: str) -> Call:
    logits = some_logits()
    seen = torch.rand(2, *logits.shape) < 0.3
    return {
        "logits": logits, "prompt_mask": seen[0].clone(), "output_mask": seen[1].clone(),
        "repetition_penalties": torch.rand(3) + 0.5,
    }  # fmt: skip


@calls("append_token_counts")
def count_tokens(op: str) -> Call:
    """Lists of 3, 0 and 4 entries, 2, 0 and 4 of them in use."""
    call: Call = {
        "tokens": ints(5, 9, -1, 3, 8, 2, 6), "counts": ints(1, 2, 0, 1, 1, 4, 0),
        "lengths": ints(2, 0, 4), "indptr": ints(0, 3, 3, 7),
        "new_tokens": torch.tensor([random.choice([9, 4, -1]), 1, random.choice([8, 2])]),
    }  # fmt: skip
    if random.random() < 0.5:
        counted = {"positions": torch.tensor([7, 3, 9]), "next_positions": torch.tensor([7, 0, 11])}
        call |= counted
    return call


@calls("spec_verify")
def verify(op: str) -> Call:
    drafts = torch.randint(0, VOCABULARY, (2, 3))
    call: Call = {"tokens": torch.full((2, 4), -7), "accepted": ints(-7, -7)}
    if random.random() < 0.5:
        targets = torch.cat([drafts, drafts[:, :1]], 1)
        targets[0, 1] += 1
        return call | {"draft_tokens": drafts, "target_tokens": targets}
    drafts[1, 2] = -1
    return call | {
        "draft_tokens": drafts, "target_probs": torch.randn(2, 4, VOCABULARY).softmax(-1),
        "draft_probs": maybe(torch.randn(2, 3, VOCABULARY).softmax(-1)),
        "uniforms": torch.rand(2, 4, 2),
    }  # fmt: skip
