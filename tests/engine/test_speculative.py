"""Speculative decoding gives the tokens of an engine without it."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts, replayed
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.engine.plan import Plan
from vllm_kernels.engine.request import FinishReason, Request, SamplingParams, Sequence
from vllm_kernels.engine.sampling.step import StepLogits
from vllm_kernels.engine.speculative.options import DraftModel, PromptLookup
from vllm_kernels.engine.speculative.prompt_lookup import PromptLookupDrafter


def repeated(lengths: tuple[int, ...] = (5, 19, 33, 8, 70, 3)) -> list[list[int]]:
    """Prompts that repeat themselves."""
    return [(text * 3)[: 2 * len(text) + 1] for text in prompts(lengths)]


def drafters(model: torch.nn.Module, device: str) -> dict[str, PromptLookup | DraftModel]:
    small = tiny_model("llama", device, num_hidden_layers=1)
    return {
        "prompt lookup": PromptLookup(4),
        "small model": DraftModel(small, 3),  # its logits are others: most drafts are rejected
        "equal model": DraftModel(deepcopy(model), 3),
    }


NAMES = ("prompt lookup", "small model", "equal model")
SPECULATIVE = SMALL | {"max_batch_tokens": 40}


# --- equal tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", ["llama", "bloom", "gpt_neox"])
def test_greedy_tokens(target: str, name: str, device: str) -> None:
    model = tiny_model(target, device)
    texts = repeated()
    expected = [by_transformers(model, text, 30) for text in texts]
    with Engine(model, speculative=drafters(model, device)[name], **SPECULATIVE) as engine:
        for _ in range(2):  # prefixes are cached
            assert greedy(engine, texts, max_tokens=30) == expected
            engine.manager.check_integrity()
            assert engine.manager.num_sequences == 0
        counts = engine.statistics().scheduler
        assert counts.num_accepted <= counts.num_drafted > 0


@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens(name: str, device: str) -> None:
    """The token of a position depends on its seed and logits alone."""
    model = tiny_model(device=device)
    texts = repeated()
    params = [
        SamplingParams(max_tokens=25, temperature=0.8, seed=at, top_p=0.9, n=1 + at % 2)
        for at in range(len(texts))
    ]
    with Engine(model, **SPECULATIVE) as engine:
        expected = engine.generate(texts, params)
    with Engine(model, speculative=drafters(model, device)[name], **SPECULATIVE) as engine:
        got = engine.generate(texts, params)
        counts = engine.statistics().scheduler
    for one, other in zip(got, expected):
        assert one.completions == other.completions
    if name == "equal model":
        assert counts.num_accepted > 0.9 * counts.num_drafted > 0


def test_an_equal_model_is_accepted(device: str) -> None:
    model = tiny_model(device=device)
    texts = prompts((9, 30))
    expected = [by_transformers(model, text, 41) for text in texts]
    options = DraftModel(deepcopy(model), 4)
    with Engine(model, speculative=options, check=False, **SPECULATIVE) as engine:
        assert greedy(engine, texts, max_tokens=41) == expected
        counts = engine.statistics().scheduler
        assert counts.num_accepted == counts.num_drafted
        assert counts.num_steps == 1 + 40 // 5  # the prompts, then 5 tokens a pass


@pytest.mark.parametrize("name", ["prompt lookup", "small model"])
def test_distribution(name: str, device: str) -> None:
    """Chi-square of the first two tokens over 4,000 seeds, against exact probabilities.

    The first one comes from the prompt's pass, the second one from a pass with drafts."""
    model = tiny_model(device=device, initializer_range=0.3)
    draws = 4000
    allowed = list(range(0, VOCABULARY, 16))
    text = 2 * allowed
    with torch.no_grad():
        first = model(torch.tensor([text], device=device)).logits[0, -1, allowed].softmax(-1)
        pairs = torch.tensor([[*text, token] for token in allowed], device=device)
        second = model(pairs).logits[:, -1, allowed].softmax(-1)
    expected = (first[:, None] * second).flatten().cpu() * draws
    options = SPECULATIVE | {"max_batch_size": 64, "max_batch_tokens": 400, "num_blocks": 400}
    with Engine(model, speculative=drafters(model, device)[name], **options) as engine:
        params = [
            SamplingParams(max_tokens=3, temperature=1.0, seed=seed, allowed_token_ids=allowed)
            for seed in range(draws)
        ]
        outputs = engine.generate([text] * draws, params)
        assert engine.statistics().scheduler.num_accepted > 0
    found = Counter(tuple(output.completions[0].tokens[:2]) for output in outputs)
    observed = torch.tensor([[found[a, b] for b in allowed] for a in allowed]).flatten()
    assert observed.sum() == draws
    likely = expected >= 5
    observed = torch.cat([observed[likely], observed[~likely].sum()[None]])
    expected = torch.cat([expected[likely], expected[~likely].sum()[None]]).clamp_min(1e-9)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


# --- with the rest of the engine


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_preemption(name: str, host_bytes: int, device: str) -> None:
    model = tiny_model(device=device)
    texts = prompts((30, 28, 31, 29))
    expected = [by_transformers(model, text, 40) for text in texts]
    small = SMALL | {"num_blocks": 22, "max_batch_tokens": 40, "max_length": 80}
    speculative = drafters(model, device)[name]
    with Engine(model, speculative=speculative, host_bytes=host_bytes, **small) as engine:
        assert greedy(engine, texts, max_tokens=40) == expected
        counts = engine.statistics().scheduler
        assert counts.num_swapped + counts.num_recomputed > 0 < counts.num_drafted
        engine.manager.check_integrity()


def test_blocks_of_rejected_tokens_are_free(device: str) -> None:
    """No sequence holds more blocks than its tokens need, and later prompts find right blocks."""
    model = tiny_model(device=device)
    (text,) = repeated((40,))
    options = PromptLookup(7)
    with Engine(model, speculative=options, **SPECULATIVE) as engine:
        request = engine._requests[engine.add_request(text, SamplingParams(max_tokens=40))]
        while engine.has_unfinished:
            engine.step()
            (one,) = request.sequences
            if one.finish_reason is None and one.num_computed:
                assert engine.manager.num_tokens(one.id) == one.num_computed
                assert engine.statistics().cache.used_blocks == -(-one.num_computed // 8)
        counts = engine.statistics().scheduler
        assert counts.num_accepted < counts.num_drafted
        longer = text + one.output + prompts((9,))[0]
        (output,) = engine.generate([longer], SamplingParams(max_tokens=20))
        assert output.num_cached_tokens >= len(text + one.output) // 8 * 8 - 8
        tokens = output.completions[0].tokens
    assert tokens == by_transformers(model, longer)


def test_text_stop_strings_and_logprobs() -> None:
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    texts = ["A class definition is a class definition is", "Functions are", "The for statement"]
    with Engine(model, tokenizer, max_length=128, num_blocks=160) as engine:
        (plain,) = engine.generate(texts[:1], SamplingParams(max_tokens=60))
    params = SamplingParams(max_tokens=60, stop=[plain.completions[0].text[30:34]], logprobs=2)
    outputs, streamed = [], []
    for speculative in (None, PromptLookup(6)):
        with Engine(
            model, tokenizer, max_length=128, num_blocks=160, speculative=speculative
        ) as engine:
            outputs.append(engine.generate(texts, params))
            streamed.append([one.text for one in engine.stream(texts[0], params)])
    assert streamed[0] == streamed[1]
    for one, other in zip(*outputs):
        (ours,), (expected,) = one.completions, other.completions
        assert (ours.text, ours.tokens) == (expected.text, expected.tokens)
        assert ours.finish_reason is expected.finish_reason
        for row, values in zip(ours.logprobs, expected.logprobs, strict=True):
            assert list(row) == list(values)
            for token in row:
                assert row[token].logprob == pytest.approx(values[token].logprob, abs=1e-3)
    assert outputs[1][0].completions[0].finish_reason is FinishReason.STOP


def test_requests_whose_parameters_depend_on_each_token(device: str) -> None:
    """They run beside drafted ones, without drafts of their own."""
    model = tiny_model(device=device)
    (text,) = repeated((20,))
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, frequency_penalty=0.8),
        SamplingParams(max_tokens=20, min_tokens=20),
        SamplingParams(max_tokens=20, bad_words=[[1, 2]]),
    ]
    with Engine(model, **SPECULATIVE) as engine:
        expected = engine.generate([text] * 4, params)
    with Engine(model, speculative=PromptLookup(4), **SPECULATIVE) as engine:
        for one, other in zip(engine.generate([text] * 4, params), expected):
            assert one.completions == other.completions
        drafted = engine.statistics().scheduler.num_drafted
        assert drafted > 0
        engine.generate([text] * 3, params[1:])
        assert engine.statistics().scheduler.num_drafted == drafted


@pytest.mark.parametrize("name", NAMES)
def test_padded_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs have them."""
    monkeypatch.setattr(ModelRunner, "_capture", replayed)
    model = tiny_model()
    texts = repeated()
    expected = [by_transformers(model, text) for text in texts]
    speculative = drafters(model, "cpu")[name]
    with Engine(model, speculative=speculative, cuda_graphs=True, **SPECULATIVE) as engine:
        assert greedy(engine, texts) == expected
        engine.reset()
        engine.warm_up()
        assert greedy(engine, texts) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    texts = repeated((5, 19, 33))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, speculative=drafters(model, "cpu")[name], **SPECULATIVE) as engine:
        calls = 0
        for runner in {engine._packed, getattr(engine._passes.drafter, "_packed", engine._packed)}:
            run = runner.run

            def failing(*given: object, run=run) -> object:
                nonlocal calls
                calls += 1
                step = run(*given)
                if calls % 9 == 5:
                    raise MemoryError("the device is full")
                return step

            monkeypatch.setattr(runner, "run", failing)
        with pytest.warns(RuntimeWarning, match="a pass failed and is computed again"):
            assert greedy(engine, texts) == expected
        engine.manager.check_integrity()


def test_a_draft_cache_that_is_full(device: str) -> None:
    model = tiny_model(device=device)
    texts = prompts((30, 28, 31, 29))
    expected = [by_transformers(model, text, 40) for text in texts]
    options = DraftModel(tiny_model(device=device), 3, cache_bytes=1 << 15)
    with Engine(model, speculative=options, **SPECULATIVE) as engine:
        assert greedy(engine, texts, max_tokens=40) == expected


def test_a_draft_cache_for_some_sequences() -> None:
    """The others get no drafts, and nothing is computed again for each token."""
    model, draft = tiny_model(), tiny_model()
    draft.load_state_dict(model.state_dict())
    options = DraftModel(draft, 3, cache_bytes=22 * 8192)  # blocks of 8 tokens
    computed: list[int] = []
    with Engine(model, speculative=options, **SPECULATIVE) as engine:
        run = engine._passes.drafter._packed.run

        def counted(plan: Plan, *arguments: Tensor) -> StepLogits:
            computed.append(plan.num_tokens)
            return run(plan, *arguments)

        engine._passes.drafter._packed.run = counted
        greedy(engine, prompts((50, 48, 51, 49)), max_tokens=24)
        assert engine.statistics().scheduler.num_accepted > 20
    assert sum(computed) < 600


# --- drafts by lookup


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # the last place
        ([5, 1, 2, 7, 2, 8, 1, 2], [7, 2, 8]),  # the longer n-gram
        ([7, 7], [7, 7, 7]),
        ([1, 2, 1], [2, 1, 2]),  # past the end they repeat
        ([1, 2, 3], None),
        ([1], None),
    ],
    ids=str,
)
def test_lookup(tokens: list[int], expected: list[int] | None) -> None:
    for known in range(1, len(tokens) + 1):  # at once, and as the tokens come
        drafter = PromptLookupDrafter(PromptLookup(3))
        sequence = Sequence(0, Request(0, [1], SamplingParams(), 0.0), 0, tokens[:known])
        drafter.propose([sequence])
        sequence.tokens = tokens
        assert drafter.propose([sequence]).get(sequence) == expected


# --- what is refused


def test_options_are_checked() -> None:
    for options, kind, message in (
        ({"num_tokens": 0}, ValueError, "PromptLookup: num_tokens: expected at least 1, got 0"),
        ({"num_tokens": 1.5}, TypeError, "PromptLookup: num_tokens: expected an integer, got 1.5"),
        (
            {"max_ngram": 1, "min_ngram": 2}, ValueError,
            "PromptLookup: max_ngram: expected at least 2 (min_ngram), got 1",
        ),
    ):  # fmt: skip
        with pytest.raises(kind) as error:
            PromptLookup(**options)
        assert str(error.value) == message
    with pytest.raises(
        TypeError, match=r"^DraftModel: model: expected a transformers model, got str$"
    ):
        DraftModel("name")


def test_what_cannot_be_served_is_refused() -> None:
    model, small = tiny_model(), tiny_model(num_hidden_layers=1)
    other = tiny_model(vocab_size=64)
    cases = [
        (
            model, {"speculative": 3},
            "Engine: speculative: expected PromptLookup, DraftModel or None, got 3",
        ),
        (
            model, {"speculative": PromptLookup(), "overlap": True},
            "Engine: overlap: expected None or False with speculative, which needs the last "
            "tokens, got True",
        ),
        (
            tiny_model("gemma2"), {"speculative": PromptLookup()},
            "Engine: speculative: expected full attention in all layers, got windows of 8 tokens",
        ),
        (
            model, {"speculative": DraftModel(model)},
            "Engine: speculative: expected another model than the engine's",
        ),
        (
            model, {"speculative": DraftModel(other)},
            "Engine: speculative: expected a model with a vocabulary of 128, got 64",
        ),
        (
            model, {"speculative": DraftModel(tiny_model("gemma2"))},
            "Engine: speculative: expected a draft model with full attention in all layers, got "
            "windows of 8 tokens",
        ),
        (
            model, {"speculative": DraftModel(small, cache_bytes=1)},
            "Engine: speculative: cache_bytes: expected at least 2 blocks of 4,096 bytes, got 0",
        ),
    ]  # fmt: skip
    for target, options, message in cases:
        with pytest.raises(RuntimeError) as error:
            Engine(target, **(SPECULATIVE | options))
        assert str(error.value) == message
    with Engine(model, speculative=DraftModel(small), **SPECULATIVE):
        with pytest.raises(ValueError, match="another engine has it"):
            Engine(small, **SMALL)
        with pytest.raises(ValueError, match="another engine has the draft model"):
            Engine(tiny_model(), speculative=DraftModel(small), **SPECULATIVE)
        with pytest.raises(ValueError, match="another engine has it"):
            Engine(small, **SMALL)  # the refused engine changed nothing
    text = prompts((9,))[0]
    assert by_transformers(small, text)  # it has its own attention again
