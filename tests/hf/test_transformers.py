"""model.generate over a paged cache gives what transformers gives, and refuses what it cannot."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from tiny_models import SERVED, generate_ours, left_padded, poisoned_cache, tiny_model
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)

from vllm_kernels.engine.op_counter import OpCounter
from vllm_kernels.errors import InvalidArgument
from vllm_kernels.integrations.transformers import (
    NAME,
    Engine,
    PagedCache,
    patched_layers,
    stop_paged_attention,
    use_paged_attention,
)
from vllm_kernels.kv_cache import OutOfBlocks

GREEDY = {"do_sample": False, "max_new_tokens": 20}


# --- equal to transformers


@pytest.mark.parametrize("name", SERVED)
def test_greedy_with_left_padding(name: str, device: str) -> None:
    model = tiny_model(name, device)
    inputs = left_padded((5, 19, 33), device)
    expected = model.generate(**inputs, **GREEDY)
    with poisoned_cache(model) as cache:
        assert torch.equal(generate_ours(model, inputs, cache, **GREEDY), expected)
        # 19 of the 20 new tokens were fed back; of the padding nothing is stored.
        assert cache.statistics().num_tokens == 5 + 19 + 33 + 3 * 19
        assert cache.statistics().waste_slots < 3 * 8


def test_beams_share_and_copy(device: str) -> None:
    model = tiny_model(device=device)
    inputs = left_padded((5, 19, 33), device)
    settings = GREEDY | {"num_beams": 3, "num_return_sequences": 2}
    expected = model.generate(**inputs, **settings)
    with poisoned_cache(model) as cache, OpCounter() as counter:
        assert torch.equal(generate_ours(model, inputs, cache, **settings), expected)
        statistics = cache.statistics()
        assert statistics.num_copies > 0 and counter.ours("copy_blocks") > 0
        assert statistics.shared_blocks > 0
        cache._batch.manager.check_integrity()
        cache.reset()
        assert cache.statistics().used_blocks == 0
    assert not counter.torch_attention()


def test_all_of_it_runs_through_the_ops(device: str) -> None:
    model = tiny_model(device=device)
    with poisoned_cache(model) as cache, OpCounter() as counter:
        generate_ours(model, left_padded((3, 9), device), cache, do_sample=False, max_new_tokens=4)
    passes, layers = 4, 2
    assert counter.ours("rms_norm") == passes * (2 * layers + 1)
    for op in ("rotary_embedding", "silu_and_mul", "reshape_and_cache", "paged_attention"):
        assert counter.ours(op) == passes * layers, op
    assert not counter.torch_attention()


def test_counter_sees_torch_attention() -> None:
    for implementation in ("sdpa", "eager"):
        model = tiny_model(attn_implementation=implementation)
        with OpCounter() as counter, torch.no_grad():
            model(**left_padded((3, 9)))
        assert counter.torch_attention(), implementation


def test_long_sequence(device: str) -> None:
    model = tiny_model(device=device)
    inputs = left_padded((600,), device)
    settings = {"do_sample": False, "max_new_tokens": 3}
    expected = model.generate(**inputs, **settings)
    with poisoned_cache(model) as cache, OpCounter() as counter:
        assert torch.equal(generate_ours(model, inputs, cache, **settings), expected)
    assert counter.ours("paged_attention") == 3 * 2


def test_sampling_under_one_seed(device: str) -> None:
    model = tiny_model(device=device)
    inputs = left_padded((5, 19), device)
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12}
    torch.manual_seed(1)
    expected = model.generate(**inputs, **settings)
    torch.manual_seed(1)
    with poisoned_cache(model) as cache:
        assert torch.equal(generate_ours(model, inputs, cache, **settings), expected)


def test_logits_processors(device: str) -> None:
    """transformers' own, and one of the caller."""
    model = tiny_model(device=device)
    inputs = left_padded((5, 19), device)
    settings = GREEDY | {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7], [8, 9]],
        "min_new_tokens": 10,
        "logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor([1, 2, 3])]),
    }
    expected = model.generate(**inputs, **settings)
    with poisoned_cache(model) as cache:
        assert torch.equal(generate_ours(model, inputs, cache, **settings), expected)


def test_prompt_lookup_crops(device: str) -> None:
    model = tiny_model(device=device)
    inputs = left_padded((12,), device)
    inputs["input_ids"] = inputs["input_ids"][:, :6].repeat(1, 2)  # something to look up
    settings = GREEDY | {"prompt_lookup_num_tokens": 3}
    expected = model.generate(**inputs, **settings)
    with poisoned_cache(model) as cache:
        assert torch.equal(generate_ours(model, inputs, cache, **settings), expected)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "bloom"])
def test_assisted_decoding(name: str, device: str) -> None:
    """A small model drafts, with a cache of transformers' own; what is rejected is cropped."""
    model = tiny_model(name, device)
    assistant = tiny_model(device=device, num_hidden_layers=1)
    inputs = left_padded((12,), device)
    expected = model.generate(**inputs, **GREEDY)
    with poisoned_cache(model) as cache:
        ours = generate_ours(model, inputs, cache, assistant_model=assistant, **GREEDY)
        assert cache.statistics().num_tokens == 12 + 19
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gpt_oss", "gptj", "bloom", "mpt"])
def test_beams_of_other_attention(name: str, device: str) -> None:
    model = tiny_model(name, device)
    inputs = left_padded((5, 19), device)
    settings = {"do_sample": False, "max_new_tokens": 10, "num_beams": 3}
    expected = model.generate(**inputs, **settings)
    with poisoned_cache(model) as cache:
        assert torch.equal(generate_ours(model, inputs, cache, **settings), expected)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int4_per_token"])
def test_layouts_and_cache_types(layout: str, cache_dtype: str, device: str) -> None:
    model = tiny_model(device=device, head_dim=64)
    inputs = left_padded((5, 19), device)
    expected = model.generate(**inputs, **GREEDY)
    with PagedCache(model, 64, 16, layout=layout, cache_dtype=cache_dtype) as cache:
        ours = generate_ours(model, inputs, cache, **GREEDY)
        assert cache._batch.cache.shape.stored_dtype.itemsize == (4 if cache_dtype == "auto" else 1)
    if cache_dtype == "auto":
        assert torch.equal(ours, expected)
    else:
        assert ours.shape == expected.shape


def test_prefill_in_chunks(device: str) -> None:
    model = tiny_model(device=device)
    inputs = left_padded((30, 30), device)
    expected = model.generate(**inputs, **GREEDY)
    with poisoned_cache(model) as cache:
        ours = generate_ours(model, inputs, cache, prefill_chunk_size=8, **GREEDY)
    assert torch.equal(ours, expected)


def test_two_turns(device: str) -> None:
    """The second turn brings new prompts, padded in the middle of the rows."""
    model = tiny_model(device=device)
    first = left_padded((5, 19), device)
    second = left_padded((7, 4), device)
    with poisoned_cache(model) as cache:
        answer = generate_ours(model, first, cache, **GREEDY)
        stored = cache.statistics().num_tokens
        ones = torch.ones(2, answer.shape[1] - first["input_ids"].shape[1], device=device).long()
        inputs = {
            "input_ids": torch.cat([answer, second["input_ids"]], 1),
            "attention_mask": torch.cat(
                [first["attention_mask"], ones, second["attention_mask"]], 1
            ),
        }
        expected = model.generate(**inputs, **GREEDY)
        assert torch.equal(generate_ours(model, inputs, cache, **GREEDY), expected)
        # The last token of turn one, the new prompts, and 19 fed back.
        assert cache.statistics().num_tokens == stored + 2 + 7 + 4 + 2 * 19


def test_reset_makes_room_for_another_batch(device: str) -> None:
    model = tiny_model(device=device)
    with poisoned_cache(model, num_blocks=20) as cache:
        for lengths in ((5, 19, 33), (40,)):
            inputs = left_padded(lengths, device)
            expected = model.generate(**inputs, **GREEDY)
            assert torch.equal(generate_ours(model, inputs, cache, **GREEDY), expected)
            cache.reset()


def test_scaling_of_the_model_is_used(device: str) -> None:
    model = tiny_model(device=device)
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5
    inputs = left_padded((5, 19), device)
    expected = model.generate(**inputs, **GREEDY)
    with poisoned_cache(model) as cache:
        assert torch.equal(generate_ours(model, inputs, cache, **GREEDY), expected)


def test_logits_in_16_bits(dtype: torch.dtype, device: str) -> None:
    """Token for token is a claim about float32; for 16 bits the logits are close."""
    model = tiny_model(device=device, initializer_range=0.05).to(dtype)
    inputs = left_padded((20, 20), device)
    with torch.no_grad():
        exact = model.float()(**inputs).logits
        model.to(dtype)
        use_paged_attention(model)
        with poisoned_cache(model) as cache, patched_layers(model):
            ours = model(**inputs, past_key_values=cache).logits
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(ours.float(), exact, atol=tolerance, rtol=tolerance)


# --- the cache's own methods


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """As generate derives them."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def test_crop_takes_negative_numbers(device: str) -> None:
    model = tiny_model(device=device)
    ids = left_padded((14,), device)["input_ids"]
    expected = model(ids).logits
    use_paged_attention(model)
    with poisoned_cache(model) as cache:
        wrong = torch.cat([ids[:, :10], ids[:, :5]], 1)
        model(wrong, past_key_values=cache)
        cache.crop(0)
        assert cache.get_seq_length() == 15
        cache.crop(-5)
        assert cache.get_seq_length() == cache.statistics().num_tokens == 10
        logits = model(ids[:, 10:], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected[:, 10:])
        with pytest.raises(ValueError, match="minus the columns"):
            cache.crop(3)
        cache.crop(-100)
        assert cache.get_seq_length() == 0


@torch.no_grad()
def test_rows_are_repeated_and_selected(device: str) -> None:
    model = tiny_model(device=device)
    inputs = left_padded((5, 9), device)
    use_paged_attention(model)
    with poisoned_cache(model) as cache:
        positions = positions_of(inputs["attention_mask"])
        model(**inputs, position_ids=positions, past_key_values=cache)
        used = cache.statistics().used_blocks
        cache.batch_repeat_interleave(2)
        assert cache.statistics().num_sequences == 4
        assert cache.statistics().used_blocks == used  # shared
        cache.batch_select_indices(torch.tensor([3, 0]))
        assert cache.statistics().num_sequences == 2
        token = torch.tensor([[7], [8]], device=device)
        ids = torch.cat([inputs["input_ids"].flip(0), token], 1)
        mask = torch.cat([inputs["attention_mask"].flip(0), torch.ones_like(token)], 1)
        positions = positions_of(mask)
        ours = model(
            token, attention_mask=mask, position_ids=positions[:, -1:], past_key_values=cache
        ).logits
    model.set_attn_implementation("sdpa")
    expected = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1:]
    torch.testing.assert_close(ours, expected)


def test_pool_too_small_for_the_beams() -> None:
    """Beams are sequences too: the error says how many blocks there are, and nothing is lost."""
    model = tiny_model()
    inputs = left_padded((19, 33))
    blocks = PagedCache.blocks_needed(2, 33 + 20, 8)
    with poisoned_cache(model, num_blocks=blocks) as cache:
        expected = model.generate(**inputs, **GREEDY)
        assert torch.equal(generate_ours(model, inputs, cache, **GREEDY), expected)
        cache.reset()
        with pytest.raises(OutOfBlocks, match=f"than {blocks} .PagedCache.blocks_needed") as caught:
            generate_ours(model, inputs, cache, num_beams=4, **GREEDY)
        assert caught.value.needed > caught.value.free
        cache._batch.manager.check_integrity()
        cache.reset()
        assert cache.statistics().free_blocks == blocks
    for sizes in ((-1, 8), (1, -8), (1, 8, 0)):
        with pytest.raises(ValueError, match=r"blocks_needed: \w+: expected at least [01], got"):
            PagedCache.blocks_needed(*sizes)


def test_freed_cache_is_refused() -> None:
    model = tiny_model()
    with poisoned_cache(model) as cache:
        pass
    assert cache._batch.cache.is_freed
    with pytest.raises(RuntimeError, match="freed"):
        generate_ours(model, left_padded((5,)), cache, **GREEDY)


def test_another_batch_size_is_refused() -> None:
    model = tiny_model()
    with poisoned_cache(model) as cache:
        generate_ours(model, left_padded((5, 5)), cache, **GREEDY)
        with pytest.raises(ValueError, match="holds 2 sequences, got a batch of 3"):
            generate_ours(model, left_padded((50, 50, 50)), cache, **GREEDY)


@torch.no_grad()
def test_masks_that_do_not_fit_the_cache_are_refused() -> None:
    model = tiny_model()
    inputs = left_padded((5, 9))
    token = torch.ones(2, 1, dtype=torch.long)
    use_paged_attention(model)
    with poisoned_cache(model) as cache:
        model(**inputs, past_key_values=cache)
        with pytest.raises(ValueError, match="padding was stored before"):
            model(token, past_key_values=cache)
        with pytest.raises(ValueError, match="differs from the one"):
            model(token, attention_mask=torch.ones(2, 10), past_key_values=cache)
        with pytest.raises(ValueError, match=r"expected shape \[2, 10\].*got \[2, 12\]: reset"):
            model(token, attention_mask=torch.ones(2, 12), past_key_values=cache)
        with pytest.raises(NotImplementedError, match="got a custom mask"):
            model(token, attention_mask=torch.ones(2, 1, 1, 10), past_key_values=cache)
        assert cache.get_seq_length() == 9


# --- refused by name


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


# --- the patch


def test_patch_is_undone() -> None:
    model = tiny_model()
    modeling = sys.modules[type(model).__module__]
    rotary = modeling.apply_rotary_pos_emb
    with pytest.raises(KeyError), patched_layers(model):
        assert modeling.apply_rotary_pos_emb is not rotary
        assert "forward" in vars(model.model.norm)
        with pytest.raises(NotImplementedError, match="patched already"), patched_layers(model):
            pass
        assert "forward" in vars(model.model.norm)
        raise KeyError
    assert modeling.apply_rotary_pos_emb is rotary
    assert not any("forward" in vars(module) for module in model.modules())


def test_patch_refuses_what_it_does_not_know() -> None:
    with pytest.raises(NotImplementedError, match="model type: expected one of llama"):
        patched_layers(tiny_model("gemma2")).__enter__()
    with pytest.raises(NotImplementedError, match="hidden_act: expected silu, got gelu"):
        patched_layers(tiny_model(hidden_act="gelu")).__enter__()


def test_patched_logits(device: str) -> None:
    """Without a cache of ours: norm, rotary and activation alone."""
    model = tiny_model("qwen3", device)
    inputs = left_padded((5, 19), device)
    with torch.no_grad():
        expected = model(**inputs).logits
        with patched_layers(model):
            ours = model(**inputs).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_no_private_name_of_transformers_is_imported() -> None:
    package = Path(__file__).parents[2] / "vllm_kernels"
    rooms = [package / name for name in ("engine", "hf", "integrations")]
    for file in (file for room in rooms for file in room.glob("*.py")):
        for line in file.read_text().splitlines():
            if "transformers" in line and "import" in line:
                assert " _" not in line, line
