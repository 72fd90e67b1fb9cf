"""Paged attention for Hugging Face transformers.

``model.generate`` over a paged cache::

    use_paged_attention(model)
    with PagedCache(model, num_blocks=256) as cache, patched_layers(model), torch.no_grad():
        model.generate(**inputs, past_key_values=cache)

Many requests at once, by continuous batching::

    with Engine(model, tokenizer) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=64))

The cache holds keys and values in blocks that a
:class:`~vllm_kernels.kv_cache.KVCacheManager` deals out, so that padding takes no memory and beams
share what they have in common. Serves decoder models of full and sliding-window attention with
softcap, sinks or ALiBi (Llama, Mistral, Qwen, Gemma 2 and 3, GPT-NeoX, GPT-J, BLOOM, MPT, GPT-OSS
and others built alike); what cannot be served is refused by name, and nothing falls back to torch's
attention.
"""

from __future__ import annotations

from ..engine.async_engine import AsyncEngine
from ..engine.engine import Engine
from ..engine.outputs import Completion, RequestOutput, TokenOutput
from ..engine.request import FinishReason
from ..engine.sampling.logprobs import Logprob, TopLogprobs
from ..engine.sampling.params import LogitsMask, LogitsProcessor, SamplingParams
from ..engine.sparse import PageSelection, SparQ
from ..engine.speculative.options import DraftModel, PromptLookup
from ..hf.attention_interface import NAME, stop_paged_attention, use_paged_attention
from ..hf.llama_patch import patched_layers
from ..hf.paged_cache import PagedCache

__all__ = [
    "NAME",
    "AsyncEngine",
    "Completion",
    "DraftModel",
    "Engine",
    "FinishReason",
    "LogitsMask",
    "LogitsProcessor",
    "Logprob",
    "PageSelection",
    "PagedCache",
    "PromptLookup",
    "RequestOutput",
    "SamplingParams",
    "SparQ",
    "TokenOutput",
    "TopLogprobs",
    "patched_layers",
    "stop_paged_attention",
    "use_paged_attention",
]
