"""What model.generate over a paged cache refuses by name."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from tiny_models import GREEDY, generate_ours, left_padded, poisoned_cache, tiny_model
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from vllm_kernels.errors import InvalidArgument
from vllm_kernels.integrations.transformers import (
    NAME,
    Engine,
    PagedCache,
    stop_paged_attention,
    use_paged_attention,
)


def test_other_caches_and_other_attention_are_refused() -> None:
    model = tiny_model()
    inputs = left_padded((5, 9))
    with (
        poisoned_cache(model) as cache,
        pytest.raises(RuntimeError, match="attention is 'sdpa'"),
    ):
        model.generate(**inputs, past_key_values=cache, **GREEDY)
    use_paged_attention(model)
    for settings in ({}, {"use_cache": False}):
        with pytest.raises(NotImplementedError, match=r"PagedCache, .*past_key_values=.*stop_pa"):
            model.generate(**inputs, **settings, **GREEDY)
    stop_paged_attention(model)
    with (
        Engine(model, num_blocks=16),
        pytest.raises(NotImplementedError, match=r"PagedCache, .*: an Engine has the model"),
    ):
        model.generate(**inputs, **GREEDY)


@pytest.mark.parametrize("name", ["position_bias", "news"])
def test_unserved_arguments_are_refused(name: str) -> None:
    """Also those that no model passes yet: an ignored argument is silently wrong text."""
    model = tiny_model()
    attention = AttentionInterface()[NAME]
    heads = torch.randn(1, 4, 3, 32)
    with poisoned_cache(model) as cache:
        use_paged_attention(model)
        key, value = cache.update(heads[:, :2], heads[:, :2], 0)
        with pytest.raises(NotImplementedError, match=name):
            attention(None, heads, key, value, None, scaling=1.0, **{name: torch.ones(4)})
        with pytest.raises(NotImplementedError, match="dropout"):
            attention(None, heads, key, value, None, scaling=1.0, dropout=0.1)
        with pytest.raises(NotImplementedError, match="sliding_window: 4 of the layer, 0 of its"):
            attention(None, heads, key, value, None, scaling=1.0, sliding_window=4)
        assert cache.get_seq_length() == 0
        attention(None, heads, key, value, None, scaling=1.0, **{name: None})
        assert cache.get_seq_length() == 3


@torch.no_grad()
def test_window_that_the_layer_does_not_know_is_refused() -> None:
    """A model whose mask has a window that its attention function is not told of."""
    model = tiny_model("mistral-window")
    use_paged_attention(model)
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config.sliding_window = None
    with (
        PagedCache(model, 16) as cache,
        pytest.raises(NotImplementedError, match="sliding_window: 0 of the layer, 8 of its"),
    ):
        model(**left_padded((5,)), past_key_values=cache)


@torch.no_grad()
def test_masks_beside_the_window_are_refused() -> None:
    """Gemma 3 as an encoder: its window looks both ways."""
    model = tiny_model("gemma3", use_bidirectional_attention=True)
    use_paged_attention(model)
    with PagedCache(model, 16) as cache, pytest.raises(NotImplementedError):
        model(**left_padded((5,)), past_key_values=cache)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama4_text", {"num_local_experts": 2}, "layer types: .* got chunked_attention"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("llama", {"head_dim": 24}, "head size: expected a multiple of 8 from 32 to 256, got 24"),
    ],
)
def test_models_that_the_cache_cannot_hold(
    family: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        PagedCache(tiny_model(family, **config), 16)


def test_attention_of_its_own_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "falcon", num_hidden_layers=1, hidden_size=128, num_attention_heads=4, vocab_size=128
        )
    )
    with pytest.raises(NotImplementedError, match="model type: falcon computes attention"):
        use_paged_attention(model)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_attention_is_given_back(name: str) -> None:
    model = tiny_model(name)
    inputs = left_padded((5, 9))
    expected = model.generate(**inputs, **GREEDY)
    before = model.config._attn_implementation
    use_paged_attention(model)
    use_paged_attention(model)  # again: nothing
    stop_paged_attention(model)
    assert model.config._attn_implementation == before
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)


def test_dtypes_and_block_sizes_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(NotImplementedError, match=r"block_size: expected a power of two.*, got 24"):
        PagedCache(model, 16, block_size=24)
    cache = PagedCache(model, 16)
    with pytest.raises(NotImplementedError, match=r"query: expected torch.float32"):
        generate_ours(model.to(torch.bfloat16), left_padded((5,)), cache, **GREEDY)
    with pytest.raises(NotImplementedError, match="dtype: expected float32"):
        PagedCache(model.to(torch.float64), 16)


def test_errors_of_a_cache_have_its_name() -> None:
    model = tiny_model()
    with pytest.raises(InvalidArgument, match=r"^PagedCache: num_blocks: expected 1 to .* got 0$"):
        PagedCache(model, 0, 64)
    with pytest.raises(InvalidArgument, match=r"^PagedCache: layout: .* got 'nhd'$"):
        PagedCache(model, 16, layout="nhd")


def test_training_and_bidirectional_attention_are_refused() -> None:
    model = tiny_model(attention_dropout=0.5)
    use_paged_attention(model)
    inputs = left_padded((5,))
    with PagedCache(model, 16) as cache:
        with pytest.raises(NotImplementedError, match="inference only"):
            model(**inputs, past_key_values=cache)
        with torch.no_grad():
            with pytest.raises(NotImplementedError, match=r"dropout: expected 0, got 0\.5"):
                model.train()(**inputs, past_key_values=cache)
            model.eval().config.is_causal = False
            with pytest.raises(NotImplementedError, match="plain causal"):
                model(**inputs, past_key_values=cache)
        assert cache.get_seq_length() == 0


def test_attention_weights_are_refused() -> None:
    model = tiny_model()
    with (
        PagedCache(model, 16) as cache,
        pytest.raises(NotImplementedError, match="output_attentions: not served"),
    ):
        generate_ours(
            model, left_padded((5,)), cache, output_attentions=True,
            return_dict_in_generate=True, **GREEDY,
        )  # fmt: skip
