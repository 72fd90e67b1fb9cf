"""Continuous batching gives what transformers gives for each request alone."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, check_equal, greedy, prompts, replayed
from tiny_models import SERVED, tiny_model

import vllm_kernels
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.layer_groups import StepInputs
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.engine.op_counter import OpCounter
from vllm_kernels.engine.request import SamplingParams

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
    size, tokens = sizes
    options = {"num_blocks": 40, "max_batch_size": size, "max_batch_tokens": tokens}
    check_equal(tiny_model(name, device), prompts((5, 19)), 6, **options)


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
    check_equal(tiny_model(name, device), prompts(), fused=False)


@pytest.mark.parametrize("layout", ["vllm", "NHD", "HND"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_layouts(name: str, layout: str, device: str) -> None:
    check_equal(tiny_model(name, device), prompts((9, 30)), layout=layout)


@pytest.mark.parametrize(
    "cache_dtype", ["fp8", "fp8_e5m2", "int8", "int8_per_token", "int4_per_token"]
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_8_bit_caches(name: str, cache_dtype: str, device: str) -> None:
    """The engine's own comparison of logits bounds the error; text may differ."""
    model = tiny_model(name, device, initializer_range=0.1, head_dim=64)
    scale = {"fp8": 0.05, "fp8_e5m2": 0.001, "int8": 0.05}.get(cache_dtype, 1.0)
    with Engine(model, cache_dtype=cache_dtype, k_scale=scale, v_scale=scale, **SMALL) as engine:
        assert engine.cache.shape.stored_dtype.itemsize == 1
        assert [len(tokens) for tokens in greedy(engine, prompts((9, 30)))] == [20, 20]


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("cache_dtype", ["int8_per_token", "int4_per_token"])
def test_scales_of_tokens_travel_with_their_blocks(
    cache_dtype: str, host_bytes: int, device: str
) -> None:
    """Sequences that are swapped, or computed again, give the text of a large cache."""
    model = tiny_model("llama", device, initializer_range=0.1, head_dim=64)
    texts = prompts((30, 28, 31, 29))
    options = SMALL | {"cache_dtype": cache_dtype, "max_batch_tokens": 40, "max_length": 80}
    with Engine(model, **options) as engine:
        want = greedy(engine, texts, max_tokens=40)
    options |= {"num_blocks": 22, "prefix_caching": False}
    with Engine(model, host_bytes=host_bytes, **options) as engine:
        assert greedy(engine, texts, max_tokens=40) == want
        assert (engine.statistics().scheduler.num_swapped > 0) is (host_bytes > 0)


@pytest.mark.parametrize("cache_dtype", ["int8_per_token", "int4_per_token"])
def test_scales_of_tokens_of_shared_blocks(cache_dtype: str, device: str) -> None:
    """Prefixes that several requests share, and completions that fork."""
    model = tiny_model("llama", device, initializer_range=0.1, head_dim=64)
    first = prompts((40,))[0]
    texts = [first, [*first[:30], 3, 4, 5], first[:21]]
    options = SMALL | {"cache_dtype": cache_dtype}
    with Engine(model, prefix_caching=False, **options) as engine:
        want = [greedy(engine, [text])[0] for text in texts]
    with Engine(model, **options) as engine:
        assert [greedy(engine, [text])[0] for text in texts] == want
        assert engine.statistics().scheduler.num_cached_tokens > 0
        params = SamplingParams(max_tokens=20, n=3, temperature=0.0)
        forks = engine.generate([first], params)[0].completions
        assert [completion.tokens for completion in forks] == [want[0]] * 3


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
            captured = {size for size, *_ in engine._packed._graphs}  # 3 sequences run as 4
            assert captured <= {1, 2, 4} and 4 in captured
            engine.reset()
            engine.warm_up()
            assert {size for size, *_ in engine._packed._graphs} == {1, 2, 4}
            assert greedy(engine, texts) == expected  # all replayed


@pytest.mark.parametrize(
    "dtype, experts", [(torch.bfloat16, "grouped_mm"), (torch.float32, "batched_mm")]
)
def test_cuda_graphs_of_experts(dtype: torch.dtype, experts: str) -> None:
    """GPT-OSS. (torch's grouped_mm of float32 reads its offsets on the CPU.)"""
    if not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        pytest.skip("needs a GPU and the CUDA library")
    model = tiny_model("gpt_oss", "cuda", initializer_range=0.05).to(dtype)
    model.set_experts_implementation(experts)
    with Engine(model, **SMALL) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [len(tokens) for tokens in greedy(engine, prompts((9, 30)))] == [20, 20]
        assert engine._packed._graphs


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "gpt_oss"])
def test_padded_passes(name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA graphs need, without a GPU: passes padded to a few sizes, over buffers that stay
    where they are. The CPU's ops refuse bad lengths and slots, those of padding too."""
    monkeypatch.setattr(ModelRunner, "_capture", replayed)
    model = tiny_model(name)
    texts = prompts((5, 19, 33, 8, 70, 3, 12, 4, 9, 1, 2))
    expected = [by_transformers(model, text) for text in texts]
    sizes = SMALL | {"max_batch_size": 11}
    with Engine(model, cuda_graphs=True, overlap=overlap, **sizes) as engine:
        assert greedy(engine, texts) == expected
        sizes = {size for size, *_ in engine._packed._graphs}
        assert sizes <= {1, 2, 4, 8, 11} and sizes & {8, 11}
        engine.reset()
        engine._packed._graphs.clear()
        engine.warm_up()
        assert {size for size, *_ in engine._packed._graphs} == {1, 2, 4, 8, 11}
        assert greedy(engine, texts) == expected


def test_a_model_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(packed: ModelRunner, step: StepInputs) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(ModelRunner, "_capture", capture)
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


def test_prefixes_of_prompts_that_come_together(overlap: bool, device: str) -> None:
    """All but the first wait for a pass, or as many as the common part takes, and find it."""
    model = tiny_model("llama", device)
    (common,) = prompts((40,))
    texts = [common + end for end in prompts((5, 9, 3))]
    expected = [by_transformers(model, text) for text in texts]
    for max_batch_tokens in (24, 200):
        options = SMALL | {"max_batch_tokens": max_batch_tokens}
        with Engine(model, overlap=overlap, **options) as engine:
            outputs = engine.generate(texts, SamplingParams(max_tokens=20))
            assert [output.completions[0].tokens for output in outputs] == expected
            assert [output.num_cached_tokens for output in outputs] == [0, 40, 40]
        with Engine(model, overlap=overlap, prefix_caching=False, **options) as engine:
            assert greedy(engine, texts) == expected
            assert engine.statistics().scheduler.num_cached_tokens == 0


def test_prefixes_of_other_salts_are_not_found() -> None:
    (text,) = prompts((40,))
    model = tiny_model()
    expected = [by_transformers(model, text)]
    with Engine(model, **SMALL) as engine:
        found = {}
        for salt in (None, "a", b"a", "b", None):
            (output,) = engine.generate([text], SamplingParams(max_tokens=20), salt=salt)
            assert [output.completions[0].tokens] == expected
            found.setdefault(salt, []).append(output.num_cached_tokens)
        assert found == {None: [0, 32], "a": [0], b"a": [32], "b": [0]}
        for _ in engine.stream(text, salt="c"):
            pass
        engine.add_request(text, salt="c")
        while engine.has_unfinished:
            engine.step()
        assert engine.statistics().scheduler.num_cached_tokens == 3 * 32


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
        assert statistics.num_prompt_tokens == sum(map(len, texts))  # each once
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
