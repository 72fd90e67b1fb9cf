"""model.generate over a paged cache gives what transformers gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from tiny_models import GREEDY, SERVED, generate_ours, left_padded, poisoned_cache, tiny_model
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

from vllm_kernels.engine.op_counter import OpCounter
from vllm_kernels.integrations.transformers import PagedCache, patched_layers, use_paged_attention

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
