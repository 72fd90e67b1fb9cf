"""Requests that cannot be served are found and ended, and the others go on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts
from tiny_models import VOCABULARY, tiny_model

from vllm_kernels import NonFiniteLogits
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.outputs import RequestOutput
from vllm_kernels.engine.plan import Plan
from vllm_kernels.engine.request import FinishReason, SamplingParams
from vllm_kernels.engine.sampling.step import StepLogits

PARAMS = SamplingParams(max_tokens=20)


class PoisonError(Exception):
    pass


def unused_token(*texts: list[int], vocabulary: int = VOCABULARY) -> int:
    return min(set(range(1, vocabulary)).difference(*texts))


@contextmanager
def poison(engine: Engine, poison: int) -> Iterator[None]:
    """Every pass over this token fails."""

    def refuse(_: object, arguments: tuple[Tensor, ...]) -> None:
        if (arguments[0] == poison).any():
            raise PoisonError("poison")

    handle = engine.model.get_input_embeddings().register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def served(engine: Engine, ids: list[int]) -> tuple[dict[int, list[int]], list[PoisonError]]:
    """Tokens by request, and the errors that step() raised. -1: an output with an error."""
    got: dict[int, list[int]] = {request: [] for request in ids}
    errors = []
    while engine.has_unfinished:
        try:
            for output in engine.step():
                got[output.request_id].append(output.token)
        except PoisonError as error:
            errors.append(error)
        assert len(errors) < 50
    return got, errors


def test_a_request_that_always_fails(overlap: bool) -> None:
    """3 failures together, then 3 alone. The other request has lost nothing."""
    model = tiny_model()
    (text,) = prompts((2,))
    expected = by_transformers(model, text)
    token = unused_token(text, expected)
    with Engine(model, overlap=overlap, **SMALL) as engine, poison(engine, token):
        culprit, other = (engine.add_request(one, PARAMS) for one in ([token, 8], text))
        got, errors = served(engine, [culprit, other])
        assert got == {culprit: [-1], other: expected}
        assert [error.request_ids for error in errors] == [[culprit, other]] * 3 + [[culprit]] * 2
        statistics = engine.statistics().scheduler
        assert statistics.num_failed_passes == 6 and statistics.num_errors == 1
        assert engine.manager.num_sequences == 0


@pytest.mark.parametrize("culprits", [(0,), (5,), (1, 4), (0, 1, 2, 3, 4, 5)], ids=str)
def test_the_batch_is_bisected(culprits: tuple[int, ...], overlap: bool) -> None:
    """Long prompts run in chunks, so a failure may come several passes after the start."""
    model = tiny_model(vocab_size=2 * VOCABULARY)
    texts = prompts((5, 19, 60, 8, 70, 3))
    expected = [by_transformers(model, text) for text in texts]
    token = unused_token(*texts, *expected, vocabulary=2 * VOCABULARY)
    for at in culprits:
        texts[at][-1] = token
    options = SMALL | {"max_batch_size": 8, "prefix_caching": False}
    with Engine(model, overlap=overlap, **options) as engine, poison(engine, token):
        if len(culprits) == len(texts):
            with pytest.warns(RuntimeWarning), pytest.raises(PoisonError, match="poison"):
                engine.generate(texts, PARAMS)
            return
        with pytest.warns(RuntimeWarning, match="a pass failed and is computed again: PoisonErr"):
            outputs = engine.generate(texts, PARAMS)
        for at, output in enumerate(outputs):
            if at in culprits:
                check_failed(output, PoisonError)
            else:
                assert output.error is None and output.completions[0].tokens == expected[at]
        assert engine.manager.num_sequences == 0
        engine.manager.check_integrity()
        ids = [engine.add_request(text, PARAMS) for text in texts]
        for at in culprits:
            engine.abort(ids[at])
        got, errors = served(engine, ids)  # all run again, and together
        assert not errors
        for at, request in enumerate(ids):
            assert got[request] == ([] if at in culprits else expected[at])


def check_failed(output: RequestOutput, error: type[Exception]) -> None:
    (completion,) = output.completions
    assert completion.finish_reason is FinishReason.ERROR
    assert type(output.error) is error and output.error.request_ids == [output.request_id]


def test_poison_in_the_output(overlap: bool) -> None:
    """A request that fails after some tokens keeps them."""
    model = tiny_model()
    texts = prompts((5, 9))
    expected = [by_transformers(model, text) for text in texts]
    others = {*texts[0], *texts[1], *expected[1]}
    at = next(at for at, token in enumerate(expected[0]) if token not in others)
    with (
        Engine(model, overlap=overlap, **SMALL) as engine,
        poison(engine, expected[0][at]),
        pytest.warns(RuntimeWarning),
    ):
        stream = engine.stream(texts[0], PARAMS)
        got = []
        with pytest.raises(PoisonError):
            for output in stream:
                got.append(output.token)
        assert got == expected[0][: at + 1]
        assert greedy(engine, texts[1:]) == [expected[1]]


def test_new_requests_wait_for_the_end_of_the_search() -> None:
    model = tiny_model()
    texts = prompts((5, 9, 4))
    expected = [by_transformers(model, text) for text in texts]
    token = unused_token(*texts, *expected)
    with Engine(model, **SMALL) as engine, poison(engine, token):
        ids = [engine.add_request(text, PARAMS) for text in (texts[0], [token], texts[1])]
        for _ in range(4):
            with pytest.raises(PoisonError):
                engine.step()
        ids.append(engine.add_request(texts[2], PARAMS))
        engine.abort(ids.pop(0))
        got, _ = served(engine, ids)
        assert list(got.values()) == [[-1], expected[1], expected[2]]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_logits_that_are_not_finite(value: float, n: int, overlap: bool, device: str) -> None:
    """Only the request that draws from them ends."""
    model = tiny_model(device=device)
    texts = prompts((5, 9, 30))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, cuda_graphs=False, **SMALL) as engine:
        run = engine._packed.run

        def spoilt(plan: Plan, *arguments: Tensor) -> StepLogits:
            """Output token 4 of the culprit has no finite logits."""
            step = run(plan, *arguments)
            logits = step.logits.clone()
            ready = [one for one, size in zip(plan.sequences, plan.num_logits) if size]
            for row, one in enumerate(ready):
                if one.request.id == culprit and one.num_sampled == 4:
                    logits[row, 5] = value
            return replace(step, logits=logits)

        engine._packed.run = spoilt
        params = SamplingParams(max_tokens=20, n=n, temperature=float(n > 1))
        culprit = 1  # in the middle: the others keep their rows of logits
        ids = [engine.add_request(texts[0], PARAMS), engine.add_request(texts[2], params)]
        ids[1] = engine.add_request(texts[1], PARAMS)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        for request, tokens in zip(ids, expected):
            assert [one.token for one in outputs if one.request_id == request] == tokens
        ended = [one for one in outputs if one.finish_reason is FinishReason.ERROR]
        assert {one.request_id for one in ended} == {culprit} and len(ended) == n
        message = (
            f"Engine: request {culprit}: expected finite logits for output token 4 of sequence 0, "
            "got NaN or infinity"
        )
        assert type(ended[0].error) is NonFiniteLogits and str(ended[0].error) == message
        assert len([one for one in outputs if one.request_id == culprit]) == 4 * n + n
        statistics = engine.statistics().scheduler
        assert statistics.num_non_finite == statistics.num_errors == 1
        assert statistics.num_failed_passes == 0
        assert engine.manager.num_sequences == 0
        # Its blocks may hold NaN, so no later request finds them.
        culprit = -1
        (again,) = engine.generate([texts[2]], PARAMS)
        assert again.num_cached_tokens == 0 and again.completions[0].tokens == expected[2]


def test_a_weight_that_is_not_finite() -> None:
    """Without the comparison of logits: the request ends with an error instead of text."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with Engine(model, check=False, **SMALL) as engine:
        with pytest.raises(NonFiniteLogits, match="request 0: expected finite logits"):
            engine.generate([[2, 3]])
        with pytest.raises(NonFiniteLogits, match="request 1: expected finite logits"):
            list(engine.stream([2, 3], SamplingParams(temperature=1.0, top_k=5)))


def test_failures_without_a_request_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are recovered from. A third in a row is raised."""
    model = tiny_model()
    (text,) = prompts((5,))
    expected = by_transformers(model, text)
    with Engine(model, **SMALL) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = engine.scheduler.schedule
        failures = 2

        def fails(*given: object) -> object:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise MemoryError("full")
            return schedule(*given)

        monkeypatch.setattr(engine.scheduler, "schedule", fails)
        assert greedy(engine, [text]) == [expected]
        failures = 100
        with pytest.raises(MemoryError, match="full"):
            engine.generate([text])
        assert not engine.has_unfinished
        failures = 0
        assert greedy(engine, [text]) == [expected]


def test_a_model_in_training_mode_is_refused() -> None:
    model = tiny_model()
    (text,) = prompts((5,))
    with Engine(model, **SMALL) as engine:
        expected = greedy(engine, [text])
        request = engine.add_request(text)
        model.train()
        for call in (engine.step, lambda: engine.add_request(text), lambda: greedy(engine, [text])):
            with pytest.raises(RuntimeError, match="Engine: model: expected one in eval mode"):
                call()
        model.eval()
        engine.abort(request)
        assert greedy(engine, [text]) == expected
        assert engine.statistics().scheduler.num_failed_passes == 0
