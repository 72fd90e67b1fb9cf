"""Every sampling parameter of an engine gives the tokens of the reference."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts
from test_engine import replayed
from tiny_models import VOCABULARY, tiny_model
from transformers import MinPLogitsWarper, NoRepeatNGramLogitsProcessor, PreTrainedModel

import vllm_kernels
from vllm_kernels import reference
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.engine.op_counter import OpCounter
from vllm_kernels.engine.request import FinishReason, Request, SamplingParams, Sequence
from vllm_kernels.engine.sampling import token_counts
from vllm_kernels.engine.sampling.sampler import Sampler

PARAMETERS: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_k of all": {"temperature": 1.3, "seed": 2, "top_k": -1},
    "top_k": {"temperature": 1.3, "seed": 2, "top_k": 7},
    "top_p": {"temperature": 1.3, "seed": 3, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "seed": 4, "min_p": 0.3},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.0, "temperature": 0.7, "seed": 5},
    "repetition": {"repetition_penalty": 1.7},
    "all penalties": {
        "repetition_penalty": 0.8, "presence_penalty": 0.5, "frequency_penalty": -0.3,
        "temperature": 1.0, "seed": 6, "top_k": 50, "top_p": 0.95, "min_p": 0.01,
    },
    "bias": {"logit_bias": {5: 2.5, 9: -200.0}, "temperature": 1.0, "seed": 7},
    "allowed": {"allowed_token_ids": [3, 64, 127], "temperature": 1.0, "seed": 8},
    "allowed, bias, penalty": {
        "allowed_token_ids": range(0, 128, 3), "logit_bias": {6: 1.0}, "frequency_penalty": 0.7,
    },
}  # fmt: skip


def by_reference(
    model: PreTrainedModel, prompt: list[int], max_tokens: int, **given: object
) -> list[int]:
    """The tokens that the model and vllm_kernels.reference give one request alone."""
    params = SamplingParams(max_tokens=max_tokens, **given)
    request = Request(0, prompt, params, time.perf_counter())
    sequence = Sequence(0, request, 0, list(prompt))
    for _ in range(max_tokens):
        ids = torch.tensor([sequence.tokens], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        token = reference.sample(logits.cpu(), **arguments(sequence))
        sequence.tokens.append(int(token))
    return sequence.output


def arguments(sequence: Sequence) -> dict[str, object]:
    """The parameters of a sequence's next token for ``reference.sample``, written out."""
    params, tokens, output = sequence.request.params, sequence.tokens, sequence.output
    counts = {token: output.count(token) for token in tokens}
    bias = {t: min(max(b, -100.0), 100.0) for t, b in (params.logit_bias or {}).items()}
    mask = torch.full((1, VOCABULARY // 32), -1, dtype=torch.int32)
    if params.allowed_token_ids is not None:
        mask = torch.tensor(
            [[
                sum(1 << j for j in range(32) if 32 * word + j in params.allowed_token_ids)
                for word in range(VOCABULARY // 32)
            ]]
        ).int()  # fmt: skip

    def one(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float32)

    return {
        "temperature": one(params.temperature),
        "top_k": torch.tensor([params.top_k]),
        "top_p": one(params.top_p),
        "min_p": one(params.min_p),
        "seeds": torch.tensor([sequence.seed]),
        "offsets": torch.tensor([len(tokens) - 1]),
        "bitmask": mask,
        "token_counts": (
            torch.tensor([0, len(counts)]),
            torch.tensor(list(counts)),
            torch.tensor(list(counts.values())),
        ),
        "repetition": one(params.repetition_penalty),
        "frequency": one(params.frequency_penalty),
        "presence": one(params.presence_penalty),
        "bias": (
            torch.tensor([0, len(bias)]),
            torch.tensor(list(bias), dtype=torch.int64),
            torch.tensor(list(bias.values())),
        ),
    }


def served(
    engine: Engine, texts: list[list[int]], params: list[dict[str, object]], **common: object
) -> list[list[int]]:
    outputs = engine.generate(texts, [SamplingParams(**one, **common) for one in params])
    return [output.completions[0].tokens for output in outputs]


@pytest.fixture(params=[False, True], ids=["", "graphs"])
def graphs(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether passes run as CUDA graphs do, on a CPU."""
    if request.param and device != "cpu":
        pytest.skip("imitates CUDA graphs on a CPU")
    if request.param:
        monkeypatch.setattr(ModelRunner, "_capture", replayed)
    return request.param


# --- against the reference


def test_tokens_of_the_reference(
    graphs: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """All requests in one batch, some waiting. So each gets what it gets alone."""
    monkeypatch.setattr(token_counts, "_GROWTH", 5)  # lists are full now and then
    monkeypatch.setattr(token_counts, "_ENTRIES_PER_ROW", 4)  # and need more room
    model = tiny_model(device=device)
    texts = prompts(tuple(3 + 5 * at for at in range(len(PARAMETERS))))
    params = list(PARAMETERS.values())
    expected = [by_reference(model, text, 24, **one) for text, one in zip(texts, params)]
    options = SMALL | {"max_batch_size": 7, "max_batch_tokens": 40, "num_blocks": 60}
    with Engine(model, overlap=overlap, cuda_graphs=graphs or None, **options) as engine:
        got = served(engine, texts, params, max_tokens=24)
        assert dict(zip(PARAMETERS, got)) == dict(zip(PARAMETERS, expected))
        assert served(engine, texts, params, max_tokens=24) == expected  # prefixes are cached
        if graphs:
            assert True in {penalized for *_, penalized in engine._packed._graphs}


@pytest.mark.parametrize("name", PARAMETERS)
def test_alone(name: str, device: str) -> None:
    model = tiny_model("gemma2", device)
    (text,) = prompts((9,))
    expected = by_reference(model, text, 12, **PARAMETERS[name])
    with Engine(model, **SMALL) as engine:
        assert served(engine, [text], [PARAMETERS[name]], max_tokens=12) == [expected]


def test_penalties_of_parallel_samples(overlap: bool, device: str) -> None:
    """Each sequence counts its own tokens."""
    model = tiny_model(device=device)
    (text,) = prompts((20,))
    params = {"temperature": 1.0, "frequency_penalty": 1.5, "max_tokens": 12}
    with Engine(model, overlap=overlap, **SMALL) as engine:
        (output,) = engine.generate([text], SamplingParams(**params, n=3, seed=4))
    request = Request(0, text, SamplingParams(**params, seed=4), time.perf_counter())
    for one in output.completions:
        sequence = Sequence(0, request, one.index, list(text))
        for token in one.tokens:
            with torch.no_grad():
                logits = model(torch.tensor([sequence.tokens], device=device)).logits[:, -1]
            assert int(reference.sample(logits.cpu(), **arguments(sequence))) == token
            sequence.tokens.append(token)


def test_counts_on_the_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The lists have what a Counter has, though each pass runs twice, as before a capture."""
    monkeypatch.setattr(token_counts, "_GROWTH", 4)
    monkeypatch.setattr(token_counts, "_ENTRIES_PER_ROW", 2)
    penalized = [True, False, True]
    sequences = [
        Sequence(
            row, Request(row, text, SamplingParams(presence_penalty=float(flag)), 0.0), 0, text[:]
        )
        for row, (text, flag) in enumerate(zip(([3, 5, 3], [1], [7, 8]), penalized))
    ]
    lists = token_counts.CountLists(4, torch.device(device))
    for step in range(11):
        for one in sequences:
            one.tokens.append(int(torch.randint(9, (1,))))
        if not step or lists.needs_load():
            lists.load(sequences)
        last = torch.tensor([one.tokens[-1] for one in sequences], device=device)
        positions = torch.tensor([len(one.tokens) - 1 for one in sequences], device=device)
        for _ in range(2):
            lists.append(last, positions)
        for is_captured in (False, True):
            indptr, tokens, counts = (x.tolist() for x in lists.lists(3, is_captured))
            for row, one in enumerate(sequences):
                part = slice(indptr[row], indptr[row + 1])
                found = [pair for pair in zip(tokens[part], counts[part]) if pair[0] >= 0]
                expected = {token: one.output.count(token) for token in one.tokens}
                assert dict(found) == (expected if penalized[row] else {})
                assert len(found) == len(dict(found))
    assert lists.generation > 0


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
            {"logits_mask": Refuses}, 1, ValueError,
            "Engine: request 1: logits_mask: expected to accept token 0, which was drawn, got "
            "False",
        ),
        (
            {"logits_processor": bad_shape}, 0, ValueError,
            "Engine: request 1: logits_processor: expected scores of shape (1, 128), got (128,)",
        ),
    ],
    ids=["forbids", "fails", "refuses", "shape"],
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


# --- log-probabilities


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


@pytest.mark.parametrize("num_top", [0, 3, -1])
def test_logprobs(num_top: int, overlap: bool, device: str) -> None:
    """They are the model's own, before penalties and temperature, beside requests without any."""
    model = tiny_model(device=device)
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


@pytest.mark.parametrize("num_top", [0, 2, -1])
def test_prompt_logprobs(num_top: int, overlap: bool, device: str) -> None:
    """Of all tokens but the first, in chunks, though another request left the prompt cached."""
    model = tiny_model(device=device)
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


# --- what it costs


def test_parameters_are_uploaded_once_per_batch(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"_upload_numbers": 0, "_upload_bias": 0}
    for name in counts:
        method = getattr(Sampler, name)

        def counted(sampler: Sampler, *given: object, name: str = name, method=method) -> None:
            counts[name] += 1
            method(sampler, *given)

        monkeypatch.setattr(Sampler, name, counted)
    with Engine(tiny_model(), overlap=overlap, check=False, **SMALL) as engine:
        params = [
            SamplingParams(max_tokens=30, temperature=1.0, logit_bias={3: 1.0}),
            SamplingParams(max_tokens=30, frequency_penalty=1.0),
        ]
        engine.generate(prompts((5, 9)), params)
        assert counts == {"_upload_numbers": 1, "_upload_bias": 1}


def test_a_mixed_batch_takes_one_launch_per_pass() -> None:
    with Engine(tiny_model(), cuda_graphs=False, overlap=False, **SMALL) as engine:
        requests = [{}, PARAMETERS["top_p"], PARAMETERS["all penalties"], PARAMETERS["allowed"]]
        engine.reset()
        with OpCounter() as counter:
            served(engine, prompts((3, 5, 4, 6)), requests, max_tokens=5)
        assert counter.ours("sample") == engine.statistics().scheduler.num_steps == 5
