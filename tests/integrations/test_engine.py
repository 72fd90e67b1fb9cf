"""Continuous batching gives what transformers gives for each request alone."""

from __future__ import annotations

import gc
import os
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from tiny_models import SERVED, VOCABULARY, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import vllm_kernels
from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.integrations.engine import Engine
from vllm_kernels.integrations.op_counter import OpCounter
from vllm_kernels.integrations.packed import PackedModel
from vllm_kernels.integrations.request import FinishReason, SamplingParams, Sequence

LENGTHS = (5, 19, 33, 8, 70, 3)
SMALL = {"num_blocks": 160, "block_size": 8, "max_batch_size": 4, "max_batch_tokens": 24}
"""Chunks of prompts, and more requests than places."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [torch.randint(1, VOCABULARY, (length,)).tolist() for length in lengths]


def by_transformers(
    model: PreTrainedModel, prompt: list[int], max_tokens: int = 20, **settings: object
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
        **settings,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def greedy(engine: Engine, texts: list[list[int]], **params: object) -> list[list[int]]:
    outputs = engine.generate(texts, SamplingParams(**({"max_tokens": 20} | params)))
    return [output.completions[0].tokens for output in outputs]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOY_MODEL)


@pytest.fixture(scope="module")
def toy() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype=torch.float32).eval()


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


# --- equal to transformers


@pytest.mark.parametrize("name", SERVED)
def test_models(name: str, device: str) -> None:
    model = tiny_model(name, device)
    texts = prompts()
    expected = [by_transformers(model, text) for text in texts]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with Engine(model, **SMALL) as engine:
        for cache in (*engine.cache.key_caches, *engine.cache.value_caches):
            cache.fill_(float("nan"))
        assert greedy(engine, texts) == expected
        engine.manager.check_integrity()
        assert engine.manager.num_sequences == 0
    assert by_transformers(model, texts[0]) == expected[0]  # the model is as it was
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 5), (2, 3), (3, 200)], ids=str)
def test_small_passes(name: str, sizes: tuple[int, int], device: str) -> None:
    """One token a pass, one sequence a pass, and whole prompts."""
    model = tiny_model(name, device)
    texts = prompts((5, 19))
    expected = [by_transformers(model, text, 6) for text in texts]
    size, tokens = sizes
    with Engine(model, num_blocks=40, max_batch_size=size, max_batch_tokens=tokens) as engine:
        assert greedy(engine, texts, max_tokens=6) == expected


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_next_pass_before_the_tokens_are_known(name: str, device: str) -> None:
    model = tiny_model(name, device)
    texts = prompts()
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=True, **SMALL) as engine:
        scheduler = engine.scheduler
        ahead = 0
        schedule_ahead = scheduler.schedule_ahead

        def counted() -> object:
            nonlocal ahead
            plan = schedule_ahead()
            ahead += plan is not None
            return plan

        scheduler.schedule_ahead = counted
        assert greedy(engine, texts) == expected
        assert ahead > 20  # most of the passes
        # The blocks of what was generated are found, though tokens came after their slots.
        (first,) = engine.generate([texts[0] + expected[0]])
        assert first.num_cached_tokens == (len(texts[0]) + 20 - 1) // 8 * 8
        engine.manager.check_integrity()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_models_through_the_modules_of_transformers(name: str, device: str) -> None:
    model = tiny_model(name, device)
    texts = prompts()
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, fused=False, **SMALL) as engine:
        assert greedy(engine, texts) == expected


@pytest.mark.parametrize("layout", ["vllm", "NHD", "HND"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layouts(name: str, layout: str, device: str) -> None:
    model = tiny_model(name, device)
    texts = prompts((9, 30))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, layout=layout, **SMALL) as engine:
        assert greedy(engine, texts) == expected


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_8_bit_caches(name: str, cache_dtype: str, device: str) -> None:
    """The engine's own comparison of logits bounds the error; text may differ."""
    model = tiny_model(name, device, initializer_range=0.1)
    scale = {"fp8": 0.05, "fp8_e5m2": 0.001, "int8": 0.05}[cache_dtype]
    with Engine(model, cache_dtype=cache_dtype, k_scale=scale, v_scale=scale, **SMALL) as engine:
        assert engine.cache.shape.stored_dtype.itemsize == 1
        assert [len(tokens) for tokens in greedy(engine, prompts((9, 30)))] == [20, 20]


def test_16_bits(dtype: torch.dtype, device: str) -> None:
    """Token for token is a claim about float32; here the comparison of logits is the test."""
    for name in ("llama", "gemma3", "bloom"):
        with Engine(tiny_model(name, device, initializer_range=0.05).to(dtype), **SMALL) as engine:
            assert len(greedy(engine, prompts((9,)))[0]) == 20


def test_all_of_it_runs_through_the_ops(device: str) -> None:
    model = tiny_model(device=device)
    with Engine(model, cuda_graphs=False, **SMALL) as engine, OpCounter() as counter:
        greedy(engine, prompts((3, 9)), max_tokens=4)
    passes, layers = 4, 2
    assert counter.ours("rms_norm") == passes
    assert counter.ours("fused_add_rms_norm") == passes * 2 * layers
    assert counter.ours("silu_and_mul") == passes * layers
    assert counter.ours("rope_and_cache") == counter.ours("paged_attention") == layers
    assert counter.ours("fused_decode_attention") == (passes - 1) * layers
    assert not counter.torch_attention()


COMPILED = {"llama": True, "llama, modules": False, "gpt_neox": False, "bloom": False}
if "ENGINE_COMPILE" not in os.environ:
    COMPILED = {"llama": True}


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile(name: str, device: str) -> None:
    """Traced without a break by a backend that needs no compiler."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(name.split(",")[0], device, num_hidden_layers=1)
    (text,) = prompts((9,))
    expected = by_transformers(model, text, 4)
    options = SMALL | {"fused": COMPILED[name], "compile": "aot_eager", "check": False}
    with Engine(model, **options) as engine:
        assert greedy(engine, [text], max_tokens=4) == [expected]
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


def test_cuda_graphs() -> None:
    if not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        pytest.skip("needs a GPU and the CUDA library")
    for name in ("llama", "gemma2", "gpt_neox", "bloom"):
        model = tiny_model(name, "cuda")
        texts = prompts()
        expected = [by_transformers(model, text) for text in texts]
        with Engine(model, **SMALL) as engine:
            assert greedy(engine, texts) == expected
            captured = set(engine._packed._graphs)  # 3 sequences run as 4
            assert captured <= {1, 2, 4} and 4 in captured
            engine.reset()
            engine.warm_up()
            assert set(engine._packed._graphs) == {1, 2, 4}
            assert greedy(engine, texts) == expected  # all replayed


class _Replayed:
    """Stands for a CUDA graph: the same call on the same buffers, into the same logits."""

    def __init__(self, packed: PackedModel, size: int) -> None:
        self.packed, self.step, self.size = packed, packed._single_step(size), size
        self.logits = packed._forward(self.step, size).clone()

    def replay(self) -> None:
        self.logits.copy_(self.packed._forward(self.step, self.size))


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "gpt_oss"])
def test_padded_passes(name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA graphs need, without a GPU: passes padded to a few sizes, over buffers that stay
    where they are. The CPU's ops refuse bad lengths and slots, those of padding too."""

    def capture(packed: PackedModel, size: int) -> tuple[_Replayed, Tensor]:
        graph = _Replayed(packed, size)
        return graph, graph.logits

    monkeypatch.setattr(PackedModel, "_capture", capture)
    model = tiny_model(name)
    texts = prompts((5, 19, 33, 8, 70, 3, 12, 4, 9, 1, 2))
    expected = [by_transformers(model, text) for text in texts]
    sizes = SMALL | {"max_batch_size": 11}
    with Engine(model, cuda_graphs=True, overlap=overlap, **sizes) as engine:
        assert greedy(engine, texts) == expected
        assert set(engine._packed._graphs) <= {1, 2, 4, 8, 11}
        assert 8 in engine._packed._graphs or 11 in engine._packed._graphs
        engine.reset()
        engine._packed._graphs.clear()
        engine.warm_up()
        assert set(engine._packed._graphs) == {1, 2, 4, 8, 11}
        assert greedy(engine, texts) == expected


def test_a_model_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(packed: PackedModel, size: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(PackedModel, "_capture", capture)
    model = tiny_model()
    texts = prompts((5, 19))
    expected = [by_transformers(model, text) for text in texts]
    with (
        Engine(model, cuda_graphs=True, **SMALL) as engine,
        pytest.warns(UserWarning, match="llama runs without CUDA graphs: operation not permitted"),
    ):
        assert greedy(engine, texts) == expected


# --- memory


def test_prefixes_are_found(overlap: bool, device: str) -> None:
    model = tiny_model("gemma2", device)
    common, *ends = prompts((40, 5, 6, 7))
    texts = [common + end for end in ends]
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        assert greedy(engine, texts[:1]) == expected[:1]
        outputs = engine.generate(texts, SamplingParams(max_tokens=20))
        assert [output.completions[0].tokens for output in outputs] == expected
        assert outputs[0].num_cached_tokens == 40
        assert outputs[1].num_cached_tokens == outputs[2].num_cached_tokens == 40
        assert engine.statistics().scheduler.num_cached_tokens == 120
    with Engine(model, prefix_caching=False, overlap=overlap, **SMALL) as engine:
        assert greedy(engine, texts + texts) == expected + expected
        assert engine.statistics().scheduler.num_cached_tokens == 0


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_preemption(name: str, host_bytes: int, overlap: bool, device: str) -> None:
    model = tiny_model(name, device)
    texts = prompts((3, 2, 4, 5) if name == "mistral-window" else (30, 28, 31, 29))
    expected = [by_transformers(model, text, 40) for text in texts]
    # With windows alone, sequences grow only up to their window: from short prompts.
    num_blocks = 8 if name == "mistral-window" else 22
    small = SMALL | {"num_blocks": num_blocks, "max_batch_tokens": 40, "max_length": 80}
    with Engine(
        model, host_bytes=host_bytes, prefix_caching=False, overlap=overlap, **small
    ) as engine:
        assert greedy(engine, texts, max_tokens=40) == expected
        statistics = engine.statistics().scheduler
        assert (statistics.num_swapped > 0) is (host_bytes > 0)
        assert (statistics.num_recomputed > 0) is (host_bytes == 0)
        engine.manager.check_integrity()


def test_windows_give_blocks_back() -> None:
    model = tiny_model("mistral-window")
    with Engine(model, **SMALL) as engine:
        greedy(engine, prompts((100,)), max_tokens=100)
        assert engine.statistics().cache.peak_used_blocks <= 6  # not 25
    model = tiny_model("gemma3")  # a full and a sliding layer share the memory of one
    with Engine(model, **SMALL) as engine:
        assert len(set(map(id, engine.cache.key_caches))) == 1
        greedy(engine, prompts((100,)), max_tokens=100)
        assert engine.statistics().cache.peak_used_blocks <= 25 + 6


# --- sampling


def test_parallel_sampling_shares_the_prompt(overlap: bool, device: str) -> None:
    model = tiny_model(device=device)
    (text,) = prompts((65,))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=4)
    with Engine(model, overlap=overlap, **SMALL) as engine:
        request = engine.add_request(text, params)
        while engine.statistics().num_running < 4:
            engine.step()
        assert engine.statistics().cache.used_blocks <= 9 + 4  # not 4 * 9
        while engine.has_unfinished:
            engine.step()
        (output,) = engine.generate([text], params)
        assert output.request_id != request
        texts = [tuple(one.tokens) for one in output.completions]
        assert [one.index for one in output.completions] == [0, 1, 2, 3]
        assert len(set(texts)) == 4
        # The seed's tokens do not depend on what else is in the batch.
        others = [SamplingParams(max_tokens=9, temperature=2.0)] * 3
        again = engine.generate([*prompts((4, 20, 9)), text], [*others, params])[-1]
        assert [tuple(one.tokens) for one in again.completions] == texts


def test_repetition_penalty(overlap: bool, device: str) -> None:
    model = tiny_model(device=device)
    texts = prompts((9, 30))
    expected = [by_transformers(model, text, repetition_penalty=1.8) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        assert greedy(engine, texts, repetition_penalty=1.8) == expected
        assert greedy(engine, texts) != expected


# --- the end of a sequence


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
    with Engine(toy, tokenizer, max_length=256) as engine:
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
    with Engine(toy, tokenizer, max_length=256) as engine:
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
    with Engine(toy, tokenizer, max_length=128, overlap=overlap) as engine:
        expected = [one.completions[0].tokens for one in engine.generate(texts, params)]
        ids = [engine.add_request(text, params) for text in texts]
        add_text = engine._add_text

        def failing(sequence: Sequence, *arguments: Any) -> Any:
            if sequence.request.id == ids[1] and sequence.num_output == 5:
                raise KeyError("an unknown piece")
            return add_text(sequence, *arguments)

        monkeypatch.setattr(engine, "_add_text", failing)
        got: dict[int, list[int]] = {request: [] for request in ids}
        failures = 0
        while engine.has_unfinished:
            try:
                for output in engine.step():
                    got[output.request_id].append(output.token)
            except KeyError:
                failures += 1
        assert failures == 1
        assert got[ids[0]] == expected[0] and got[ids[2]] == expected[2]
        assert len(got[ids[1]]) == 4
        assert engine.manager.num_sequences == 0


@pytest.mark.parametrize("failing", ["schedule", "schedule_ahead", "_take"])
def test_failures_around_a_pass(
    failing: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    texts = prompts((5, 19, 9))
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        owner = engine if failing == "_take" else engine.scheduler
        call = getattr(owner, failing)
        calls = 0

        def fails(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (2, 6):
                raise MemoryError("full")
            return call(*arguments)

        monkeypatch.setattr(owner, failing, fails)
        ids = [engine.add_request(text, SamplingParams(max_tokens=20)) for text in texts]
        got: dict[int, list[int]] = {request: [] for request in ids}
        while engine.has_unfinished:
            try:
                for output in engine.step():
                    got[output.request_id].append(output.token)
            except MemoryError:
                pass
        assert list(got.values()) == expected


def test_abort() -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        ids = [engine.add_request(text, SamplingParams(n=2)) for text in prompts()]
        for _ in range(4):
            engine.step()
        for request in ids:
            if request in engine._requests:
                engine.abort(request)
        assert not engine.has_unfinished and engine.manager.num_sequences == 0
        with pytest.raises(KeyError):
            engine.abort(12345)


# --- faults


def test_a_pass_that_fails_is_run_again(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, device: str
) -> None:
    model = tiny_model(device=device)
    texts = prompts()
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        run = engine._packed.run
        calls = 0

        def failing(*arguments: object) -> Tensor:
            nonlocal calls
            calls += 1
            logits = run(*arguments)
            if calls % 5 == 3:
                raise MemoryError("the device is full")
            return logits

        monkeypatch.setattr(engine._packed, "run", failing)
        ids = [engine.add_request(text, SamplingParams(max_tokens=20)) for text in texts]
        got: dict[int, list[int]] = {request: [] for request in ids}
        failures = 0
        while engine.has_unfinished:
            try:
                for output in engine.step():
                    got[output.request_id].append(output.token)
            except MemoryError:
                failures += 1
        assert failures > 3
        assert list(got.values()) == expected
        engine.manager.check_integrity()


@pytest.mark.parametrize("failing", ["swap_out", "swap_in"])
def test_a_swap_that_fails(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's blocks were never written: what was swapped out is computed again."""
    model = tiny_model()
    texts = prompts((30, 28, 31, 29))
    expected = [by_transformers(model, text, 40) for text in texts]
    small = SMALL | {"num_blocks": 22, "max_batch_tokens": 40}
    with Engine(model, host_bytes=1 << 20, prefix_caching=False, max_length=80, **small) as engine:
        copy = getattr(engine.cache, failing)
        failures = 0

        def fails_once(pairs: Tensor) -> None:
            nonlocal failures
            failures += 1
            if failures == 1:
                raise MemoryError("the device is full")
            copy(pairs)

        monkeypatch.setattr(engine.cache, failing, fails_once)
        for cache in (*engine.cache._host_keys, *engine.cache._host_values):
            cache.fill_(float("nan"))
        ids = [engine.add_request(text, SamplingParams(max_tokens=40)) for text in texts]
        got: dict[int, list[int]] = {request: [] for request in ids}
        while engine.has_unfinished:
            try:
                for output in engine.step():
                    got[output.request_id].append(output.token)
            except MemoryError:
                pass
        assert failures
        assert list(got.values()) == expected
        engine.manager.check_integrity()


def test_requests_that_cannot_be_served() -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        for prompt, params, message in (
            ([], {}, "prompt: expected at least one token"),
            ([1, VOCABULARY], {}, f"prompt: expected tokens from 0 to 127, got {VOCABULARY}"),
            ([1, -1], {}, "prompt: expected tokens from 0 to 127, got -1"),
            ("text", {}, "prompt: expected token ids .there is no tokenizer., got text"),
            ([1], {"stop": ["a"]}, "stop: expected a tokenizer with the engine, got none"),
            ([1], {"n": 9}, "n: expected at most 4"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.add_request(prompt, SamplingParams(**params))
        with pytest.raises(ValueError, match=r"params: expected 2 .from prompts., got 1"):
            engine.generate([[1], [2]], [SamplingParams()])
        with pytest.raises(ValueError):
            engine.generate([[1], [VOCABULARY]])
        assert not engine.has_unfinished  # the first of the two was taken back
        engine.add_request([1])
        for method in (engine.reset, engine.warm_up):
            with pytest.raises(RuntimeError, match="1 sequences are unfinished"):
                method()


def test_a_second_engine_on_a_model_is_refused() -> None:
    model = tiny_model()
    (text,) = prompts((9,))
    expected = by_transformers(model, text)
    with Engine(model, **SMALL) as engine:
        with pytest.raises(ValueError, match="another engine has it"):
            Engine(model, **SMALL)
        assert greedy(engine, [text]) == [expected]
    forgotten = Engine(model, **SMALL)
    del forgotten
    gc.collect()
    with Engine(model, **SMALL) as engine:
        assert greedy(engine, [text]) == [expected]


def test_weights_are_separated_layer_by_layer() -> None:
    """One joined weight at a time is there beside the separated ones, and no cache."""
    model = tiny_model()
    engine = Engine(model, **SMALL)
    joined = [ref(layer.gate_up) for layer in engine._packed._llama._layers]
    alive = []
    for at, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate_proj
        assert joined[at]().data_ptr() == gate.weight.data_ptr()
    pop = engine._packed._llama._layers

    class Layers(list):
        def pop(self, *arguments: Any) -> Any:
            assert engine.cache.is_freed
            alive.append(sum(one() is not None for one in joined))
            return super().pop(*arguments)

    engine._packed._llama._layers = Layers(pop)
    del pop
    engine.close()
    assert alive == [2, 1]
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert len(storages) == len(list(model.parameters()))


def test_closed_engine_is_refused() -> None:
    model = tiny_model()
    with Engine(model, **SMALL) as engine:
        pass
    engine.close()  # again: nothing
    engine.add_request([1])
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("falcon", {"num_attention_heads": 6}, "model type: falcon computes attention"),
        ("llama4_text", {"num_local_experts": 2}, "chunked_attention"),
        ("mamba", {"state_size": 4}, "linear_attention"),
        ("rwkv", {"attention_hidden_size": 384}, "rwkv has no attention heads"),
    ],
)
def test_models_that_are_refused(family: str, config: dict[str, object], message: str) -> None:
    settings = {"num_hidden_layers": 2, "hidden_size": 384, "vocab_size": 64} | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    with pytest.raises(NotImplementedError, match=message):
        Engine(model, num_blocks=16)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "dynamic"), ("llama", "longrope"), ("phi3", "longrope"), ("gemma3", "dynamic")],
)
def test_rotary_embeddings_that_change_with_the_length_are_refused(family: str, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
        rope |= {"original_max_position_embeddings": 64}
    if family == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
        rope["sliding_attention"]["rope_theta"] = 10_000.0
    model = tiny_model(family, hidden_size=128, rope_parameters=rope)
    with pytest.raises(NotImplementedError, match=f"rope_type: model.rotary_emb .* got {kind}"):
        Engine(model, **SMALL)
    assert model.config._attn_implementation != "vllm_kernels"


def test_a_model_that_ignores_positions_is_refused() -> None:
    """Right alone, wrong in a packed row: only the comparison of logits can tell."""
    model = tiny_model("gpt_neox")
    rotary = model.gpt_neox.rotary_emb.forward

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(x, torch.arange(position_ids.shape[1])[None])

    model.gpt_neox.rotary_emb.forward = forward
    with pytest.raises(NotImplementedError, match="model type: gpt_neox: its logits differ"):
        Engine(model, **SMALL)
    assert model.config._attn_implementation == "eager"  # the model is as it was


def test_sizes_that_do_not_fit() -> None:
    for sizes, message in (
        ({"num_blocks": 1}, "at least 2 blocks of 16,384 bytes, got 1"),
        ({"num_blocks": None, "cache_bytes": 100}, "at least 2 blocks of 16,384 bytes, got 0"),
        ({"num_blocks": 2, "block_size": 4}, "room for 7 and 5 tokens, got 2 blocks"),
        ({"max_length": 7}, "max_length: expected at least 8, got 7"),
        ({"max_batch_size": 8, "max_batch_tokens": 4}, "max_batch_tokens: expected at least 8"),
    ):
        model = tiny_model()
        with pytest.raises(ValueError, match=message):
            Engine(model, **({"num_blocks": 16} | sizes))
        assert model.config._attn_implementation == "sdpa"


def test_training_models_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one in eval mode"):
        Engine(tiny_model().train())
