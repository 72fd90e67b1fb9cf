"""PagedCache's own methods: crop, rows that are repeated and selected, and what does not fit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from tiny_models import GREEDY, generate_ours, left_padded, poisoned_cache, tiny_model

from vllm_kernels.integrations.transformers import PagedCache, use_paged_attention
from vllm_kernels.kv_cache import OutOfBlocks


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
