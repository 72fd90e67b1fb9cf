"""What forbids tokens of an engine, hooks among them, and which parameters are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts
from tiny_models import tiny_model
from transformers import MinPLogitsWarper, NoRepeatNGramLogitsProcessor

import vllm_kernels
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import FinishReason, SamplingParams

# --- what forbids tokens


def test_bad_words(overlap: bool, graphs: bool, device: str) -> None:
    """A word may not be completed. Its beginning may come."""
    model = tiny_model(device=device)
    (text,) = prompts((9,))
    first = by_transformers(model, text)
    words = [[first[0]], first[4:6], first[9:12]]
    expected = by_transformers(model, text, bad_words_ids=words)
    with Engine(model, overlap=overlap, cuda_graphs=graphs or None, **SMALL) as engine:
        got = greedy(engine, [text], bad_words=words)
        assert got == [expected] and got != [first]


def test_min_tokens(overlap: bool, graphs: bool, device: str) -> None:
    model = tiny_model(device=device)
    (text,) = prompts((9,))
    first = by_transformers(model, text)
    model.generation_config.eos_token_id = first[2]
    try:
        expected = by_transformers(model, text, min_new_tokens=7)
        with Engine(model, overlap=overlap, cuda_graphs=graphs or None, **SMALL) as engine:
            assert greedy(engine, [text]) == [first[: first.index(first[2]) + 1]]
            assert greedy(engine, [text], min_tokens=7) == [expected]
            # A stop token is forbidden as well.
            got = greedy(
                engine, [text], min_tokens=5, ignore_eos=True, stop_token_ids=[first[1], first[2]]
            )[0]
            assert not {first[1], first[2]} & set(got[:5])
    finally:
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {128: 1}}, "Engine: logit_bias: expected tokens from 0 to 127, got 128"),
        (
            {"allowed_token_ids": [-1]},
            "Engine: allowed_token_ids: expected tokens from 0 to 127, got -1",
        ),
        (
            {
                "allowed_token_ids": [5, 6],
                "bad_words": [[5]],
                "min_tokens": 1,
                "stop_token_ids": [6],
            },
            "Engine: allowed_token_ids: expected a token that bad_words and min_tokens do not "
            "forbid, got [5, 6]",
        ),
        ({"bad_words": [[1, 500]]}, "Engine: bad_words: expected tokens from 0 to 127, got 500"),
        (
            {"stop_token_ids": [128]},
            "Engine: stop_token_ids: expected tokens from 0 to 127, got 128",
        ),
        (
            {"bad_words": ["word"]},
            "Engine: bad_words: expected token ids (there is no tokenizer), got 'word'",
        ),
    ],
)
def test_tokens_outside_the_vocabulary(params: dict[str, object], message: str) -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        with pytest.raises(ValueError) as error:
            engine.add_request([1], SamplingParams(**params))
        assert str(error.value) == message
        assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"n": 0}, vllm_kernels.InvalidArgument, "n: expected at least 1, got 0"),
        ({"temperature": "a"}, vllm_kernels.InvalidType, "temperature: expected a number, got 'a'"),
        ({"stop": 3}, vllm_kernels.InvalidType, "stop: expected a list of strings, got 3"),
    ],
)
def test_wrong_parameters(params: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^SamplingParams: {message}$"):
        SamplingParams(**params)


# --- hooks


class Alternates:
    """A mask that allows even tokens at even places and odd ones at odd places, up to a length."""

    def __init__(self, length: int = 99) -> None:
        self.length, self.accepted = length, []

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> None:
        odd = len(self.accepted) % 2
        bitmask[index] = -0x55555556 if odd else 0x55555555

    def accept_token(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return token_id % 2 == (len(self.accepted) - 1) % 2

    def is_terminated(self) -> bool:
        return len(self.accepted) >= self.length


def test_masks(overlap: bool, graphs: bool, device: str) -> None:
    """Each sequence has a mask of its own, which goes on after preemption."""
    texts = prompts((9, 30, 28, 31))
    options = SMALL | {"num_blocks": 22, "max_batch_tokens": 40, "max_length": 80}
    options |= {"overlap": overlap, "cuda_graphs": graphs or None}
    with Engine(tiny_model(device=device), **options) as engine:
        masked = SamplingParams(
            max_tokens=40, logits_mask=Alternates, n=2, temperature=1.0, allowed_token_ids=range(99)
        )
        plain = engine.generate(texts[1:], SamplingParams(max_tokens=40))
        outputs = engine.generate(texts, [masked, *[SamplingParams(max_tokens=40)] * 3])
        for one in outputs[0].completions:
            assert [token % 2 for token in one.tokens] == [0, 1] * 20
            assert max(one.tokens) < 99
        assert [one.completions[0].tokens for one in outputs[1:]] == [
            one.completions[0].tokens for one in plain
        ]
        assert engine.statistics().scheduler.num_recomputed > 0
        (ended,) = engine.generate(
            texts[:1], SamplingParams(max_tokens=40, logits_mask=lambda: Alternates(5))
        )
        assert ended.completions[0].finish_reason is FinishReason.STOP
        assert len(ended.completions[0].tokens) == 5


class Forbids(Alternates):
    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> None:
        bitmask[index] = 0 if len(self.accepted) == 3 else -1

    def accept_token(self, token_id: int) -> bool:
        self.accepted.append(token_id)
        return True


class Fails(Forbids):
    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> None:
        raise KeyError("a bug")


class Refuses(Forbids):
    def accept_token(self, token_id: int) -> bool:
        return False


def bad_shape(input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [5], "bad_words": [[5, 5]]},
        {"allowed_token_ids": [5, 7], "bad_words": [[5, 5], [5, 7]], "logit_bias": {5: 50}},
    ],
)
def test_no_token_left(params: dict[str, object], overlap: bool) -> None:
    """The request ends with an error, and no token that was forbidden comes out."""
    with Engine(tiny_model(), overlap=overlap, **SMALL) as engine:
        both = [SamplingParams(max_tokens=6, **params), SamplingParams(max_tokens=6)]
        output, other = engine.generate(prompts((5, 9)), both)
    assert other.error is None and len(other.completions[0].tokens) == 6
    assert output.completions[0].tokens == [5]
    assert isinstance(output.error, ValueError) and str(output.error) == (
        "Engine: request 0: expected an allowed token for output token 1 of sequence 0, got none: "
        "allowed_token_ids, bad_words, min_tokens and logits_mask together forbid all"
    )


@pytest.mark.parametrize(
    ("hook", "count", "kind", "message"),
    [
        (
            {"logits_mask": Forbids}, 3, ValueError,
            "Engine: request 1: logits_mask: expected an allowed token for output token 3, got "
            "none",
        ),
        ({"logits_mask": Fails}, 0, KeyError, "'a bug'"),
        (
            {"logits_mask": object}, 0, ValueError,
            "Engine: request 1: logits_mask: expected an object with fill_next_token_bitmask, got "
            "object",
        ),
        (
            {"logits_mask": Refuses}, 1, ValueError,
            "Engine: request 1: logits_mask: expected to accept token 0, which was drawn, got "
            "False",
        ),
        (
            {"logits_processor": bad_shape}, 0, ValueError,
            "Engine: request 1: logits_processor: expected scores of shape (1, 128), got (128,)",
        ),
    ],
    ids=["forbids", "fails", "no mask", "refuses", "shape"],
)  # fmt: skip
def test_a_hook_that_fails_ends_its_request_alone(
    hook: dict[str, Callable], count: int, kind: type[Exception], message: str, overlap: bool
) -> None:
    model = tiny_model()
    texts = prompts((5, 9, 12))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        plain = SamplingParams(max_tokens=20)
        hooked = SamplingParams(max_tokens=20, logit_bias={0: 100}, **hook)
        outputs = engine.generate(texts, [plain, hooked, plain])
        assert isinstance(outputs[1].error, kind) and str(outputs[1].error) == message
        assert len(outputs[1].completions[0].tokens) == count
        assert [outputs[at].completions[0].tokens for at in (0, 2)] == expected[::2]
        assert engine.manager.num_sequences == 0


def test_processors_of_transformers(graphs: bool, overlap: bool, device: str) -> None:
    model = tiny_model(device=device)
    texts = prompts((5, 19))
    expected = [
        by_transformers(model, texts[0], no_repeat_ngram_size=2),
        by_transformers(model, texts[1], repetition_penalty=1.8),
    ]
    params = [
        SamplingParams(max_tokens=20, logits_processor=NoRepeatNGramLogitsProcessor(2)),
        SamplingParams(max_tokens=20, repetition_penalty=1.8),
    ]
    with Engine(model, overlap=overlap, cuda_graphs=graphs or None, **SMALL) as engine:
        outputs = engine.generate(texts, params)
        assert [one.completions[0].tokens for one in outputs] == expected
    # min_p of transformers at temperature 1 without top_p is that of this library.
    sampled = {"max_tokens": 20, "temperature": 1.0, "seed": 3}
    with Engine(model, **SMALL) as engine:
        theirs, ours = (
            engine.generate(texts, SamplingParams(**sampled, **one))
            for one in ({"logits_processor": MinPLogitsWarper(0.2)}, {"min_p": 0.2})
        )
        assert [one.completions[0].tokens for one in theirs] == [
            one.completions[0].tokens for one in ours
        ]
