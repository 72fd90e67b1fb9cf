"""Small random models of several families, and how to run them both ways."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vllm_kernels.integrations.llama_patch import FAMILIES
from vllm_kernels.integrations.transformers import PagedCache, patched_layers, use_paged_attention

PAD = 0
VOCABULARY = 128


def tiny_model(family: str = "llama", device: str = "cpu", **config: object) -> PreTrainedModel:
    """Two layers, 4 heads over 2 key/value heads of size 32, random weights, float32."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        # Large weights: a random model with the usual ones has no preference for any token.
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa" if family in FAMILIES else "eager",
    }
    if family == "mistral":
        settings["sliding_window"] = None
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(settings | config)))
    return model.to(device).eval()


def left_padded(lengths: tuple[int, ...], device: str = "cpu") -> dict[str, Tensor]:
    """Random prompts of these lengths."""
    columns = max(lengths)
    mask = torch.stack([torch.arange(columns) >= columns - length for length in lengths]).long()
    ids = torch.randint(1, VOCABULARY, mask.shape) * mask + PAD * (1 - mask)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def poisoned_cache(
    model: PreTrainedModel, num_blocks: int = 128, block_size: int = 8
) -> PagedCache:
    """A cache that is NaN wherever nothing was written."""
    cache = PagedCache(model, num_blocks, block_size)
    for tensor in cache._batch.key_caches + cache._batch.value_caches:
        tensor.fill_(float("nan"))
    return cache


def generate_ours(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: PagedCache, **settings: object
) -> Tensor:
    """``model.generate`` with all kernels in; the model is as before afterwards."""
    use_paged_attention(model)
    try:
        with patched_layers(model), torch.no_grad():
            return model.generate(**inputs, past_key_values=cache, **settings)
    finally:
        model.set_attn_implementation("sdpa")
