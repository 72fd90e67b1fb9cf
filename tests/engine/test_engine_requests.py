"""How requests end, stream, and are taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts, served_with_failures
from tiny_models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import FinishReason, SamplingParams, Sequence


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOY_MODEL)


@pytest.fixture(scope="module")
def toy() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype=torch.float32).eval()


def test_end_tokens(overlap: bool, device: str) -> None:
    model = tiny_model(device=device)
    (text,) = prompts((9,))
    plain = by_transformers(model, text)
    end = plain[6]
    at = plain.index(end)
    model.generation_config.eos_token_id = [end, 1_000]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        (output,) = engine.generate([text], SamplingParams(max_tokens=20))
        assert output.completions[0].tokens == plain[: at + 1]
        assert output.completions[0].finish_reason is FinishReason.STOP
        assert greedy(engine, [text], ignore_eos=True) == [plain]
        assert greedy(engine, [text], ignore_eos=True, stop_token_ids=[plain[2]]) == [
            plain[: plain.index(plain[2]) + 1]
        ]


def test_nothing_comes_after_the_end(overlap: bool, device: str) -> None:
    """Not even what a pass that had started before computed in vain."""
    model = tiny_model(device=device)
    short, long = prompts((9, 12))
    expected = [by_transformers(model, text) for text in (short, long)]
    stop = expected[0][4]
    at = expected[0].index(stop) + 1
    with Engine(model, overlap=overlap, **SMALL) as engine:
        ids = [
            engine.add_request(short, SamplingParams(max_tokens=20, stop_token_ids=[stop])),
            engine.add_request(long, SamplingParams(max_tokens=20)),
        ]
        got: dict[int, list[int]] = {request: [] for request in ids}
        while engine.has_unfinished:
            for output in engine.step():
                got[output.request_id].append(output.token)
        assert list(got.values()) == [expected[0][:at], expected[1]]


def test_longest_sequence() -> None:
    model = tiny_model()
    with Engine(model, max_length=24, **SMALL) as engine:
        (output,) = engine.generate(prompts((20,)), SamplingParams(max_tokens=20))
        assert len(output.completions[0].tokens) == 4
        assert output.completions[0].finish_reason is FinishReason.LENGTH
        with pytest.raises(ValueError, match="prompt: expected fewer than 24 tokens"):
            engine.generate(prompts((24,)))


def test_text_and_stop_strings(toy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    text = "The for statement is used to"
    with Engine(toy, tokenizer, max_length=256, num_blocks=160) as engine:
        params = SamplingParams(max_tokens=40)
        (output,) = engine.generate([text], params)
        (one,) = output.completions
        assert one.text == tokenizer.decode(one.tokens, skip_special_tokens=True)
        stop = one.text[20:26]
        (output,) = engine.generate([text], SamplingParams(max_tokens=40, stop=[stop]))
        (stopped,) = output.completions
        assert stopped.text == one.text[: one.text.index(stop)]
        assert stopped.finish_reason is FinishReason.STOP
        assert len(stopped.tokens) < 40


def test_stream(toy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    params = SamplingParams(max_tokens=30)
    with Engine(toy, tokenizer, max_length=256, num_blocks=160) as engine:
        other = engine.add_request("Functions are", params)
        outputs = list(engine.stream("A class definition", params))
        assert len(outputs) == 30
        assert [output.finish_reason for output in outputs[-2:]] == [None, FinishReason.LENGTH]
        (expected,) = engine.generate(["A class definition"], params)
        assert "".join(output.text for output in outputs) == expected.completions[0].text
        assert other not in engine._requests  # it was served meanwhile
        assert [output.request_id for output in engine.step()] == [other] * 30
        for _ in engine.stream("A class definition", params):
            break  # the request ends with the loop
        assert not engine.has_unfinished and engine.manager.num_sequences == 0


def test_streams_in_turns(overlap: bool) -> None:
    """Each call of one moves the other on; no tokens are lost, and generate takes no one's."""
    model = tiny_model()
    texts = prompts((5, 9, 7, 4))
    expected = [by_transformers(model, text) for text in texts]
    params = SamplingParams(max_tokens=20)
    with Engine(model, overlap=overlap, **SMALL) as engine:
        other = engine.add_request(texts[2], params)
        pairs = list(zip(engine.stream(texts[0], params), engine.stream(texts[1], params)))
        assert [[one.token for one in outputs] for outputs in zip(*pairs)] == expected[:2]
        stream = engine.stream(texts[0], params)
        got = [next(stream).token]
        assert greedy(engine, [texts[3]]) == [expected[3]]
        assert got + [one.token for one in stream] == expected[0]
        outputs = engine.step()
        assert {one.request_id for one in outputs} == {other}
        assert [one.token for one in outputs] == expected[2]
        assert not engine.has_unfinished and not engine._queues


def test_text_that_fails_ends_its_request_alone(
    toy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=12)
    texts = ["A class", "The for statement", "Functions"]
    with Engine(toy, tokenizer, max_length=128, num_blocks=160, overlap=overlap) as engine:
        expected = [one.completions[0].tokens for one in engine.generate(texts, params)]
        add_text = engine._open.outputs._add_text

        def failing(sequence: Sequence, *arguments: Any) -> Any:
            if sequence.request.id == 4 and sequence.num_output == 5:  # of 3, 4 and 5
                raise KeyError("an unknown piece")
            return add_text(sequence, *arguments)

        monkeypatch.setattr(engine._open.outputs, "_add_text", failing)
        got, failures = served_with_failures(engine, texts, 12)
        assert failures == 0
        assert got[0] == expected[0] and got[2] == expected[2]
        assert got[1] == [*expected[1][:4], -1]  # -1: the output with the error
        assert engine.manager.num_sequences == 0
        assert engine.statistics().scheduler.num_errors == 1


def test_text_that_fails_in_one_of_several_sequences(
    tokenizer: PreTrainedTokenizerBase, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences of the request end. With overlap, the next pass has rows for them."""
    model = tiny_model(vocab_size=len(tokenizer))
    texts = prompts((5, 9, 7))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, tokenizer, overlap=overlap, **SMALL) as engine:
        add_text = engine._open.outputs._add_text

        def failing(sequence: Sequence, *arguments: Any) -> Any:
            if (sequence.request.id, sequence.index, sequence.num_output) == (0, 0, 5):
                raise KeyError("an unknown token")
            return add_text(sequence, *arguments)

        monkeypatch.setattr(engine._open.outputs, "_add_text", failing)
        ids = [
            engine.add_request(text, SamplingParams(max_tokens=20, n=n))
            for text, n in zip(texts, (2, 1, 1))
        ]
        got: dict[int, list[int]] = {request: [] for request in ids}
        while engine.has_unfinished:
            for output in engine.step():
                got[output.request_id].append(output.token)
        assert got[0][-2:] == [-1, -1] and len(got[0]) == 2 * 4 + 2
        assert [got[1], got[2]] == expected[1:]


@pytest.mark.parametrize("failing", ["schedule", "schedule_ahead", "take"])
def test_failures_around_a_pass(
    failing: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    texts = prompts((5, 19, 9))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        owner = engine._open if failing == "take" else engine.scheduler
        call = getattr(owner, failing)
        calls = 0

        def fails(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (2, 6):
                raise MemoryError("full")
            return call(*arguments)

        monkeypatch.setattr(owner, failing, fails)
        got, failures = served_with_failures(engine, texts, 20)
        assert bool(failures) is (overlap or failing != "schedule_ahead")
        assert got == expected


def test_abort() -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        ids = [engine.add_request(text, SamplingParams(n=2)) for text in prompts()]
        for _ in range(4):
            engine.step()
        for request in ids:
            if request in engine._requests:
                engine.abort(request)
        assert not engine.has_unfinished and engine.manager.num_sequences == 0
        with pytest.raises(KeyError, match=r"^Engine: abort: unknown or finished request 12345$"):
            engine.abort(12345)
