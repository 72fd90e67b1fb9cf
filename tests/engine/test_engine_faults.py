"""What fails is run again, and what cannot be served is refused by name."""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts, replayed, served_with_failures
from tiny_models import SERVED, VOCABULARY, generate_ours, left_padded, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
)

from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.layer_groups import StepInputs
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.engine.sampling.pending_tokens import PendingTokens
from vllm_kernels.integrations.transformers import PagedCache, use_paged_attention


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
        got, failed = served_with_failures(engine, texts, 20)
        assert failed > 3 and got == expected
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
        for cache in engine.cache._host_pool:
            cache.fill_(float("nan"))
        got, failed = served_with_failures(engine, texts, 40)
        assert failed == 1 and got == expected
        engine.manager.check_integrity()


@pytest.mark.parametrize("at_the_end", [False, True])
def test_no_memory_for_a_graph(at_the_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is not taken for a model that cannot be captured."""
    full = True

    def capture(packed: ModelRunner, step: StepInputs) -> tuple[Any, Tensor, Any]:
        if full and at_the_end:
            try:
                raise torch.OutOfMemoryError("full")
            finally:
                raise RuntimeError("capture was broken off")
        if full:
            raise torch.OutOfMemoryError("full")
        return replayed(packed, step)

    monkeypatch.setattr(ModelRunner, "_capture", capture)
    model = tiny_model()
    (text,) = prompts((5,))
    expected = by_transformers(model, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Engine(model, cuda_graphs=True, check=False, **SMALL) as engine:
            request = engine.add_request(text)
            engine.step()
            with pytest.raises(torch.OutOfMemoryError, match="CUDA graph of 1 sequences"):
                engine.step()
            engine.abort(request)
            with pytest.warns(RuntimeWarning, match="CUDA graph of 1 sequences"):
                assert greedy(engine, [text]) == [expected]  # by passes like those of prompts
            assert not engine._packed._graphs
            full = False
            assert greedy(engine, [text]) == [expected]
            assert engine._packed._graphs


def test_a_failed_pass_draws_again_what_its_seed_says(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, top_k=20)
    (text,) = prompts((9,))
    with Engine(tiny_model(), overlap=overlap, **SMALL) as engine:
        expected = engine.generate([text], params)[0].completions[0].tokens
        take = engine._open.take
        calls = 0

        def fails(pending: PendingTokens) -> None:
            nonlocal calls
            calls += 1
            if calls % 4 == 2:
                raise MemoryError("after the draw")
            take(pending)

        monkeypatch.setattr(engine._open, "take", fails)
        request = engine._requests[engine.add_request(text, params)]
        while engine.has_unfinished:
            with suppress(MemoryError):
                engine.step()
        assert calls > 14 and request.sequences[0].output == expected


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
        with pytest.raises(TypeError, match="salt: expected text, bytes or None, got 3"):
            engine.add_request([1], salt=3)
        engine.add_request([1])
        for method in (engine.reset, engine.warm_up):
            with pytest.raises(RuntimeError, match=r"expected no unfinished sequences, got 1$"):
                method()


def test_what_is_no_prompt_is_refused() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    encoding = BatchEncoding({"input_ids": [[2, 3]], "attention_mask": [[1, 1]]})
    no_list = "Engine: prompts: expected a list of prompts"
    no_prompt = "Engine: prompt: expected text or a list of token ids, got "
    with Engine(tiny_model(), **SMALL) as engine:
        for prompts, message in (
            (encoding, rf'{no_list}, got .*: give its \["input_ids"\]'),
            ([2, 3, 4], rf"{no_list}, such as \[\[2, 3, 4\]\], got token ids, \[2, 3, 4\]"),
            (torch.tensor([2, 3]), rf"{no_list}, such as"),
            (None, f"{no_list}, got None"),
            (b"text", f"{no_list}, got b'text': decode"),
            (chat, rf"{no_prompt}\{{'content': 'Hi', .*apply_chat_template"),
            ([[1], chat], rf"{no_prompt}\[.*apply_chat_template"),
            ([[1], b"text"], f"{no_prompt}b'text': decode"),
            ([[1], None], f"{no_prompt}None"),
            ([[1], [2.5]], rf"{no_prompt}\[2.5\]"),
            ([[1], [3, True]], rf"{no_prompt}\[3, True\]"),
            ([[1], np.array([True])], no_prompt),
            ([[1], torch.tensor([True])], no_prompt),
            ([[1], encoding], rf'{no_prompt}.*: give its \["input_ids"\]'),
        ):
            with pytest.raises(TypeError, match=message):
                engine.generate(prompts)
        for params in ({"max_tokens": 3}, {}):
            with pytest.raises(TypeError, match=r"params: expected SamplingParams, got {.*\*\*"):
                engine.generate([[1]], params)
        with pytest.raises(TypeError, match="apply_chat_template"):
            engine.add_request(chat)
        assert not engine.has_unfinished
        expected = greedy(engine, [[2, 3]], max_tokens=2)
        assert greedy(engine, torch.tensor([[2, 3]]), max_tokens=2) == expected


def test_a_lone_surrogate_is_refused() -> None:
    """UTF-8 has no code for it: tokenizers fail with errors of their own."""
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    with Engine(tiny_model(vocab_size=len(tokenizer)), tokenizer, **SMALL) as engine:
        message = r"Engine: prompt: expected text without lone surrogates, got 'a\\ud800' with "
        with pytest.raises(ValueError, match=message + r"'\\ud800' at 1"):
            engine.add_request("a\ud800")
        assert not engine.has_unfinished


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
    for call in (engine.step, lambda: engine.add_request([1]), lambda: engine.generate([[1]])):
        with pytest.raises(RuntimeError, match="it was closed"):
            call()
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("falcon", {"num_attention_heads": 6}, "model type: falcon computes attention"),
        ("llama4_text", {"num_local_experts": 2}, "chunked_attention"),
        ("mamba", {"state_size": 4}, "linear_attention"),
        ("rwkv", {"attention_hidden_size": 384}, "rwkv has no attention heads"),
        ("doge", {"keep_window_size": 8}, "attention_mask: expected one of padding"),
        ("codegen", {"n_layer": 2, "n_embd": 384, "n_head": 4}, "codegen computes attention"),
        (  # what its config says of heads is not what it computes
            "gpt2",
            {"n_embd": 384, "n_head": 6, "num_key_value_heads": 2},
            "GPT2Attention 0: key: expected 2 heads of size 64 .* got 6 of size 64",
        ),
    ],
)
def test_models_that_are_refused(family: str, config: dict[str, object], message: str) -> None:
    settings = {"num_hidden_layers": 2, "hidden_size": 384, "vocab_size": 64} | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    with pytest.raises(NotImplementedError, match=message):
        Engine(model, num_blocks=16)


def test_layers_with_heads_of_different_sizes_are_refused() -> None:
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, hidden_size=64, head_dim=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(NotImplementedError, match="gemma4_text: head_dim: expected the same"):
        Engine(model, num_blocks=16)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="a language-model head, got LlamaModel"):
        Engine(tiny_model().model, **SMALL)


def test_attention_weights_are_refused() -> None:
    model = tiny_model("gpt_neox")
    settings = {"max_new_tokens": 2, "output_attentions": True, "return_dict_in_generate": True}
    with pytest.raises(NotImplementedError, match="output_attentions: not served"):
        generate_ours(model, left_padded((5,)), PagedCache(model, 16), **settings)


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
        ({"max_length": 0}, "max_length: expected at least 8, got 0"),
        ({"num_blocks": 3, "block_size": 2}, "cache: expected room for at least 8 tokens, got 3"),
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1, got 0"),
        ({"max_length": 257}, "max_length: .* 16 blocks of 16 tokens, got 257, which needs 17 blo"),
        ({"max_length": 10**6}, "max_length: expected a sequence that fits into 16 blocks"),
        ({"host_bytes": -1}, "host_bytes: expected at least 0, got -1"),
        ({"max_batch_size": 8, "max_batch_tokens": 4}, "max_batch_tokens: expected at least 8"),
    ):
        model = tiny_model()
        with pytest.raises(ValueError, match=message):
            Engine(model, **({"num_blocks": 16} | sizes))
        assert model.config._attn_implementation == "sdpa"
    for name in ("max_length", "host_bytes", "num_blocks", "max_batch_size"):
        with pytest.raises(TypeError, match=f"Engine: {name}: expected an integer, got '1G'"):
            Engine(tiny_model(), **{name: "1G"})


def test_what_is_no_model_is_refused() -> None:
    config = tiny_model().config
    for call, name in (
        (Engine, "Engine"),
        (use_paged_attention, "use_paged_attention"),
        (lambda model: PagedCache(model, 8), "PagedCache"),
    ):
        message = f"{name}: model: expected a model of transformers, got "
        with pytest.raises(TypeError, match=f"{message}'meta.*AutoModelForCausalLM.from_pre"):
            call("meta-llama/Llama")
        with pytest.raises(TypeError, match=f"{message}LlamaConfig$"):
            call(config)


def test_scales_that_do_not_fit() -> None:
    """The 8-bit cache is named, not the model."""
    scales = {"k_scale": 30.0, "v_scale": 30.0, "num_blocks": 16}
    with pytest.raises(ValueError, match=r"cache_dtype: int8: .* k_scale and v_scale .* / 127"):
        Engine(tiny_model(), cache_dtype="int8", **scales)
    with pytest.raises(ValueError, match=r"k_scale: expected 1.0 .only 8-bit caches"):
        Engine(tiny_model(), **scales)


def test_4_bits_that_do_not_suit_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_kernels.engine.self_check._TOLERANCE_OF_4_BIT_CACHES", 1e-3)
    with pytest.raises(ValueError, match="cache_dtype: int4_per_token: 4 bits do not suit this m"):
        Engine(tiny_model(head_dim=64), cache_dtype="int4_per_token", num_blocks=16)


@pytest.mark.parametrize("family", SERVED)
def test_more_tokens_than_the_model_has_positions(family: str) -> None:
    """Counted by families whose positions have an end: not with ALiBi, nor as stretched."""
    positions = {"bloom": None, "bloom-6-heads": None, "mpt": None, "gpt_oss": 32 * 4096}
    bound = positions.get(family, 1024)
    sizes = {"num_blocks": 1060, "block_size": 128, "check": False, "fused": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (None, 1 << 17 if bound is None else bound):
            Engine(tiny_model(family), max_length=length, **sizes).close()
    if bound:
        message = (
            rf"max_length: expected at most {bound} .*max_position_embeddings.*got {bound + 9}"
        )
        with pytest.warns(UserWarning, match=message) as caught:
            Engine(tiny_model(family), max_length=bound + 9, **sizes).close()
        assert len(caught) == 1 and caught[0].filename == __file__


def test_training_models_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one in eval mode"):
        Engine(tiny_model().train())
