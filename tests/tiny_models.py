"""Small random models of several families, and how to run them both ways."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vllm_kernels.hf.llama_patch import FAMILIES
from vllm_kernels.integrations.transformers import (
    PagedCache,
    patched_layers,
    stop_paged_attention,
    use_paged_attention,
)

PAD = 0
VOCABULARY = 128
GREEDY = {"do_sample": False, "max_new_tokens": 20}

WINDOW = 8
CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
        },
    ),
    "gpt_neox": ("gpt_neox", {"hidden_size": 128, "num_key_value_heads": 4}),
    "gptj": ("gptj", {"hidden_size": 128, "rotary_dim": 16, "num_key_value_heads": 4}),
    "bloom": ("bloom", {"hidden_size": 128, "num_key_value_heads": 4}),
    "bloom-6-heads": (
        "bloom",
        {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6},
    ),
    "mpt": (
        "mpt",
        {"hidden_size": 128, "num_key_value_heads": 4, "max_seq_len": 1024, "use_cache": True},
    ),
    "gpt_bigcode": ("gpt_bigcode", {"hidden_size": 128, "num_key_value_heads": None}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
"""By name: a family of transformers and what its tiny model has beside the common settings."""

SERVED = tuple(CONFIGS)


def tiny_model(name: str = "llama", device: str = "cpu", **config: object) -> PreTrainedModel:
    """Two layers, 4 heads over 2 key/value heads of size 32, random weights, float32."""
    family, settings = CONFIGS.get(name, (name, {}))
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
    } | settings
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
    for tensor in cache._batch.cache.key_caches + cache._batch.cache.value_caches:
        tensor.fill_(float("nan"))
    return cache


def generate_ours(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: PagedCache, **settings: object
) -> Tensor:
    """``model.generate`` with all kernels in; the model is as before afterwards."""
    use_paged_attention(model)
    patch = patched_layers(model) if model.config.model_type in FAMILIES else nullcontext()
    try:
        with patch, torch.no_grad():
            return model.generate(**inputs, past_key_values=cache, **settings)
    finally:
        stop_paged_attention(model)
