"""Log-probabilities of an engine are the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts
from tiny_models import tiny_model
from transformers import PreTrainedModel

from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams

VOCABULARY = 160
"""More than the op token_logprobs reports."""


def raw_logprobs(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Log-probabilities after each token, [tokens, vocabulary]."""
    with torch.no_grad():
        return model(torch.tensor([tokens], device=model.device)).logits[0].log_softmax(-1).cpu()


def check_logprobs(row: dict, expected: Tensor, token: int, num_top: int) -> None:
    """On CUDA the two models round differently, so tokens of nearly equal logits may swap."""
    near = 2e-4
    best = [one for one in row if one != token or row[one].rank <= num_top]
    best.sort(key=lambda one: row[one].rank)
    assert list(row) == list(dict.fromkeys([token, *best]))
    assert [row[one].rank for one in best] == list(range(1, num_top + 1))
    for one, found in row.items():
        value = expected[one]
        assert found.logprob == pytest.approx(value.item(), abs=near)
        assert (expected > value + near).sum() < found.rank <= (expected >= value - near).sum()


@pytest.mark.parametrize("num_top", [0, 3, 128, 129, -1])
def test_logprobs(num_top: int, overlap: bool, device: str) -> None:
    """They are the model's own, before penalties and temperature, beside requests without any."""
    model = tiny_model(device=device, vocab_size=VOCABULARY)
    texts = prompts((5, 19, 33))
    asking = SamplingParams(
        max_tokens=9, logprobs=num_top, temperature=1.5, seed=1, presence_penalty=1.0
    )
    with Engine(model, overlap=overlap, **SMALL) as engine:
        plain = SamplingParams(max_tokens=9)
        outputs = engine.generate(texts, [plain, asking, SamplingParams(max_tokens=9, logprobs=1)])
        streamed = [one.logprobs for one in engine.stream(texts[1], asking)]
    assert outputs[0].completions[0].logprobs is None and outputs[0].prompt_logprobs is None
    for output, num in ((outputs[1], num_top), (outputs[2], 1)):
        (one,) = output.completions
        expected = raw_logprobs(model, output.prompt + one.tokens)[len(output.prompt) - 1 :]
        assert one.logprobs is not None and len(one.logprobs) == 9
        for row, values, token in zip(one.logprobs, expected, one.tokens):
            check_logprobs(row, values, token, VOCABULARY if num < 0 else num)
    assert [list(row or ()) for row in streamed] == [
        list(row) for row in outputs[1].completions[0].logprobs or ()
    ]


@pytest.mark.parametrize("num_top", [0, 2, 128, 129, -1])
def test_prompt_logprobs(num_top: int, overlap: bool, device: str) -> None:
    """Of all tokens but the first, in chunks, though another request left the prompt cached."""
    model = tiny_model(device=device, vocab_size=VOCABULARY)
    texts = prompts((70, 1, 2, 33))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        assert greedy(engine, texts) == expected
        params = SamplingParams(max_tokens=20, prompt_logprobs=num_top, n=2)
        outputs = engine.generate(texts, params)
        assert greedy(engine, texts) == expected
    for output, tokens in zip(outputs, expected):
        assert [one.tokens for one in output.completions] == [tokens, tokens]
        found, values = output.prompt_logprobs, raw_logprobs(model, output.prompt)
        assert found is not None and len(found) == len(output.prompt) and found[0] is None
        for row, row_values, token in zip(found[1:], values, output.prompt[1:]):
            check_logprobs(row, row_values, token, VOCABULARY if num_top < 0 else num_top)
