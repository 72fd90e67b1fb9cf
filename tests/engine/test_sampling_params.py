"""Every sampling parameter of an engine gives the tokens of the reference."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, prompts
from helpers import needs_cuda_library
from tiny_models import VOCABULARY, tiny_model
from transformers import PreTrainedModel

from vllm_kernels import reference
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.op_counter import OpCounter
from vllm_kernels.engine.request import Request, SamplingParams, Sequence
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
    "bias": {"logit_bias": {5: 2.5, 9: -(10**400)}, "temperature": 1.0, "seed": 7},
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


@needs_cuda_library
def test_cuda_graphs_change_no_token(overlap: bool) -> None:
    model, texts = tiny_model(device="cuda"), prompts(tuple(range(3, 3 + len(PARAMETERS))))
    options = SMALL | {"max_batch_size": 7, "max_batch_tokens": 40}
    got = []
    for graphs in (False, None):
        with Engine(model, overlap=overlap, cuda_graphs=graphs, **options) as engine:
            got.append(served(engine, texts, list(PARAMETERS.values()), max_tokens=24))
            assert bool(engine._packed._graphs) == (graphs is None)
    assert dict(zip(PARAMETERS, got[0])) == dict(zip(PARAMETERS, got[1]))


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
