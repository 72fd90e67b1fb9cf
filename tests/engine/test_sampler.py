"""Sampling, and the text of tokens as they come."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from transformers import (
    AutoTokenizer,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.engine.detokenizer import Detokenizer
from vllm_kernels.engine.request import Request, SamplingParams, Sequence
from vllm_kernels.engine.sampling.pending_tokens import PendingTokens
from vllm_kernels.engine.sampling.sampler import Sampler


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    sampler = Sampler(len(sequences), logits.shape[1], logits.device)
    sampler.prepare(sequences)
    last = torch.tensor([one.tokens[-1] for one in sequences], device=logits.device)
    positions = torch.tensor([len(one.tokens) - 1 for one in sequences], device=logits.device)
    pending = PendingTokens(sequences, *sampler.draw(logits, last, positions))
    return [token for ((token, _),) in pending.fetch()]


def sequence(tokens: list[int] | None = None, index: int = 0, **params: object) -> Sequence:
    request = Request(0, [1], SamplingParams(**params), time.perf_counter())
    return Sequence(index, request, index, tokens or [1])


def frequencies(logits: Tensor, draws: int, **params: object) -> Tensor:
    """How often each token was drawn, for one row of logits."""
    rows = [sequence(index=index, seed=7, **params) for index in range(draws)]
    tokens = torch.tensor(sample(logits.expand(draws, -1), rows))
    return tokens.bincount(minlength=len(logits)) / draws


def by_transformers(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """The probabilities that transformers would draw from."""
    scores = TemperatureLogitsWarper(temperature)(None, logits[None].cpu())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.9},
        {"top_p": 1e-6},
    ],
    ids=str,
)
def test_draws_from_the_probabilities_of_transformers(
    params: dict[str, float], device: str
) -> None:
    logits = torch.randn(20, device=device) * 2
    expected = by_transformers(logits, **params)
    got = frequencies(logits, 8000, **({"temperature": 1.0} | params))
    assert not got[expected == 0].any(), "a token that is not allowed"
    assert (got - expected).abs().max() < 5 * (0.25 / 8000) ** 0.5  # five standard errors


def test_rows_have_parameters_of_their_own(device: str) -> None:
    logits = torch.randn(6, 50, device=device)
    best = logits.argmax(-1).tolist()
    rows = [
        sequence(),
        sequence(temperature=1.0, top_k=1),
        sequence(temperature=1.0, top_p=1e-9),
        sequence(temperature=1e-4),
        sequence(temperature=1.0, seed=3),
        sequence(temperature=1.0, seed=3, repetition_penalty=1.5),
    ]
    tokens = sample(logits, rows)
    assert tokens[:4] == best[:4]
    alone = sample(logits[4:5], [sequence(temperature=1.0, seed=3)])
    assert tokens[4:5] == alone  # whatever else is in the batch


def test_seeds(device: str) -> None:
    logits = torch.zeros(1, 1000, device=device)

    def draw(**params: object) -> list[int]:
        one = sequence([1], temperature=1.0, **params)
        for _ in range(8):
            token = sample(logits, [one])
            assert sample(logits, [one]) == token  # until it is there, after a failed pass
            one.tokens += token
        return one.tokens

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert draw(seed=1) != draw(seed=1, index=1)
    assert draw() != draw()


def test_repetition_penalty_is_that_of_transformers(device: str) -> None:
    logits = torch.randn(3, 30, device=device)
    before = logits.clone()
    tokens = [[1, 2, 2, 5], [7], [0, 29]]
    expected = RepetitionPenaltyLogitsProcessor(4.0)
    for row, seen in zip(logits, tokens):
        best = int(row.argmax())
        seen.append(best)
        got = sample(row[None], [sequence(seen, repetition_penalty=4.0)])
        scores = expected(torch.tensor([seen], device=device), row[None].clone())
        assert got == scores.argmax(-1).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.9}], ids=str
)
def test_of_equal_tokens_the_first_are_kept(params: dict[str, float], device: str) -> None:
    logits = torch.zeros(2, 1000, device=device)
    logits[:, [500, 700]] = 1.0
    logits[1] = 0
    drawn = {
        row: {
            sample(logits[row : row + 1], [sequence(temperature=1.0, seed=seed, **params)])[0]
            for seed in range(300)
        }
        for row in (0, 1)
    }
    if "top_k" in params:
        assert drawn == {0: {500, 700, *range(params["top_k"] - 2)}, 1: set(range(params["top_k"]))}
    else:
        assert max(drawn[0] - {500, 700}) < 500 and max(drawn[1]) <= 500
    # A sort of thousands would give equal tokens in any order, and another one in each batch.
    rows = [sequence(temperature=1.0, seed=seed, **params) for seed in range(64)]
    alone = [sample(logits[1:], [row])[0] for row in rows]
    assert sample(logits[1:].expand(64, -1), rows) == alone


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}], ids=str
)
def test_rows_that_are_not_finite(params: dict[str, object], device: str) -> None:
    """NaN, +inf and nothing but -inf give -1. A masked row is legitimate, and so are the others."""
    logits = torch.zeros(5, 50, device=device)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 9] = -1e30
    rows = [sequence(index=index, **params) for index in range(5)]
    for dtype in (torch.float32, torch.bfloat16):
        tokens = sample(logits.to(dtype), rows)
        assert tokens[:4] == [-1, -1, -1, 9] and 0 <= tokens[4] < 50


def test_extreme_logits(device: str) -> None:
    logits = torch.full((2, 10), -torch.inf, device=device)
    logits[:, 4] = 0
    logits[1, 9] = 1e30
    rows = [sequence(temperature=1.0, seed=seed) for seed in range(2)]
    for _ in range(20):
        assert sample(logits, rows) == [4, 9]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"temperature": -1}, "temperature: expected a finite float32 >= 0, got -1"),
        ({"temperature": float("nan")}, "temperature: expected a finite float32"),
        ({"temperature": 10**400}, "temperature: expected a finite float32"),
        ({"top_k": -2}, "top_k: expected 0 or -1 .all., or up to 2147483647, got -2"),
        ({"top_k": 2**31}, "top_k: expected 0 or -1 .all., or up to 2147483647, got 2147483648"),
        ({"top_p": 0}, "top_p: expected more than 0, up to 1, got 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite float32 above 0, got 0"),
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"stop": "end"}, "stop: expected a list of strings, got 'end'"),
        ({"stop": [""]}, "stop: expected strings that are not empty"),
        ({"temperature": float("inf")}, "temperature: expected a finite float32"),
        ({"top_p": float("nan")}, "top_p: expected more than 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: expected a finite float32"),
        ({"min_p": 1.5}, "min_p: expected 0 to 1, got 1.5"),
        ({"presence_penalty": float("nan")}, "presence_penalty: expected a finite float32, got"),
        ({"frequency_penalty": 1e39}, "frequency_penalty: expected a finite float32, got 1e"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty: expected a finite float32 above 0"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty: expected a finite float32"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias: expected numbers, got {3: nan}"),
        ({"allowed_token_ids": []}, r"allowed_token_ids: expected at least one token, got \[\]"),
        (
            {"bad_words": ["a", ""]},
            r"bad_words: expected words that are not empty, got \['a', ''\]",
        ),
        ({"min_tokens": 17}, "min_tokens: expected 0 to max_tokens, got 17"),
        ({"logprobs": -2}, "logprobs: expected -1 .all. or more, got -2"),
        ({"prompt_logprobs": -2}, "prompt_logprobs: expected -1 .all. or more, got -2"),
    ],
)
def test_parameters_are_checked(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 2.5}, "max_tokens: expected an integer, got 2.5"),
        ({"max_tokens": None}, "max_tokens: expected an integer, got None"),
        ({"top_k": 2.5}, "top_k: expected an integer, got 2.5"),
        ({"n": True}, "n: expected an integer, got True"),
        ({"seed": "a"}, "seed: expected an integer or None, got 'a'"),
        ({"temperature": "1"}, "temperature: expected a number, got '1'"),
        ({"temperature": True}, "temperature: expected a number, got True"),
        ({"top_p": True}, "top_p: expected a number, got True"),
        ({"repetition_penalty": False}, "repetition_penalty: expected a number, got False"),
        ({"top_p": None}, "top_p: expected a number, got None"),
        ({"stop_token_ids": 7}, "stop_token_ids: expected a list of integers, got 7"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: expected a list of integers"),
        ({"stop": 7}, "stop: expected a list of strings, got 7"),
        ({"stop": [7]}, "stop: expected a list of strings"),
        ({"min_p": None}, "min_p: expected a number, got None"),
        ({"min_tokens": 1.0}, "min_tokens: expected an integer, got 1.0"),
        ({"logit_bias": [3]}, r"logit_bias: expected numbers by token id, or None, got \[3\]"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: expected numbers by token id, or None"),
        ({"allowed_token_ids": 3}, "allowed_token_ids: expected a list of integers or None, got 3"),
        ({"bad_words": "word"}, "bad_words: expected a list of strings or of lists of integers"),
        ({"bad_words": [3]}, "bad_words: expected a list of strings or of lists of integers"),
        ({"logprobs": True}, "logprobs: expected an integer or None, got True"),
        ({"logits_mask": 3}, "logits_mask: expected a function or None, got 3"),
        ({"logits_processor": 3}, "logits_processor: expected a function or None, got 3"),
    ],
)
def test_types_of_parameters_are_checked(params: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(**params)


def test_integers_of_numpy_are_integers() -> None:
    params = SamplingParams(max_tokens=np.int64(3), top_p=np.float32(0.5), stop_token_ids=(4,))
    assert params.max_tokens == 3


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -3.0, -2.0]])
    rows = [sequence(temperature=temperature, seed=seed) for seed in range(2)]
    assert sample(logits, rows) == [1, 0]
    rows = [sequence(temperature=temperature, top_k=2, top_p=0.9) for _ in range(2)]
    assert sample(logits, rows) == [1, 0]


# --- text


TEXT = 'The "yield" statement; naïve, 日本語 and 🙂🙂 text.\n    print(x)  # two'


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """What is sent, token by token, and at the end."""
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    prompt = tokenizer("A prompt, 日本")["input_ids"]
    detokenizer = Detokenizer(tokenizer, prompt, stop)
    sent = []
    for token in tokenizer(text)["input_ids"]:
        sent.append(detokenizer.add(token))
        if detokenizer.is_stopped:
            return sent, detokenizer
    return [*sent, detokenizer.finish()], detokenizer


def test_text_comes_piece_by_piece() -> None:
    sent, detokenizer = pieces(TEXT)
    assert "".join(sent) == detokenizer.text == TEXT
    assert sum(map(bool, sent)) > 20
    assert not any("\ufffd" in piece for piece in sent)


@pytest.mark.parametrize("stop", ["語 an", "statement", "T", " two", "🙂🙂"])
def test_stop_strings(stop: str) -> None:
    """They may begin and end within tokens; nothing of them is sent."""
    sent, detokenizer = pieces(TEXT, ("not there", stop))
    assert detokenizer.is_stopped
    assert "".join(sent) == detokenizer.text == TEXT[: TEXT.index(stop)]


def test_a_stop_string_that_came_too_early_does_not_cut_later_text() -> None:
    """Whatever the lengths of other stop strings."""
    _, detokenizer = pieces("", ("*", "@" * 40))
    for token in detokenizer._tokenizer("a * b")["input_ids"]:
        detokenizer.add(token, may_stop=False)
    for token in detokenizer._tokenizer(" c d")["input_ids"]:
        detokenizer.add(token)
    assert not detokenizer.is_stopped and "*" in detokenizer.text


def test_what_looks_like_the_beginning_of_a_stop_string_is_sent_late() -> None:
    sent, detokenizer = pieces(TEXT, ("two towers",))
    assert not detokenizer.is_stopped
    assert "".join(sent) == TEXT


@pytest.mark.parametrize("text", ["🙂", "日本", "é"])
def test_a_character_that_the_prompt_began(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    tokens = tokenizer(text)["input_ids"]
    for begun in range(1, len(tokens)):
        detokenizer = Detokenizer(
            tokenizer, tokenizer("A prompt")["input_ids"] + tokens[:begun], ()
        )
        sent = [
            detokenizer.add(token) for token in [*tokens[begun:], *tokenizer(" end")["input_ids"]]
        ]
        whole = tokenizer.decode(tokens[:begun]).rstrip("\ufffd")
        assert whole + "".join(sent) + detokenizer.finish() == text + " end"
    # One that stays broken is the prompt's.
    detokenizer = Detokenizer(tokenizer, tokenizer("🙂")["input_ids"][:1], ())
    assert [detokenizer.add(token) for token in tokenizer("end")["input_ids"]][-1].endswith("d")
    assert "\ufffd" not in detokenizer.text


def test_unfinished_characters_are_sent_at_the_end() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    tokens = tokenizer("🙂")["input_ids"]
    assert len(tokens) > 1
    detokenizer = Detokenizer(tokenizer, [5], ())
    assert detokenizer.add(tokens[0]) == ""
    assert detokenizer.finish() == "\ufffd"
