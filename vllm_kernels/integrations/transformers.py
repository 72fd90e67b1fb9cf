"""Paged attention for Hugging Face transformers: ``model.generate`` over a paged cache.

    use_paged_attention(model)
    with PagedCache(model, num_blocks=256) as cache, patched_layers(model), torch.no_grad():
        model.generate(**inputs, past_key_values=cache)

Attention is registered under the name "vllm_kernels"; the cache holds keys and values in blocks
that a :class:`~vllm_kernels.kv_cache.KVCacheManager` deals out, so that padding takes no memory and
beams share what they have in common. Serves models of full causal attention (Llama, Mistral without
its window, Qwen2, Qwen3, and others built alike); what cannot be served is refused by name, and
nothing falls back to torch's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from vllm_kernels.integrations.llama_patch import patched_layers
from vllm_kernels.integrations.paged_batch import PagedBatch
from vllm_kernels.kv_cache import Statistics

__all__ = ["NAME", "PagedCache", "patched_layers", "use_paged_attention"]

NAME = "vllm_kernels"
"""Of the attention function and of the mask function in transformers' registries."""

_HANDLE = "vllm_kernels_layer"  # attribute by which a key tensor carries its cache to attention
_HARMLESS = {  # keyword arguments of attention that do not change its result
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "use_cache",
}


class PagedCache(Cache):
    """A key/value cache in blocks, for ``generate(..., past_key_values=cache)`` and ``model(...)``.

    Usable for several turns over the same batch; ``reset()`` it before an unrelated batch. It is a
    context manager, and gives its memory back at the end. ``generate`` never frees a user's cache.

    The keys and values of padding are not stored: which columns are padding comes with the
    attention mask of each pass. Logits at padding mean nothing.

    Args:
        model: whose shapes, dtype and device it takes.
        num_blocks: blocks in all, for every sequence of the batch. Beams and returned sequences are
            sequences of their own; see :meth:`blocks_needed`.
        block_size: 8, 16 or 32 tokens.

    Raises:
        NotImplementedError: a model with layers other than full attention, or with a head size or
            dtype that the kernels do not serve.
    """

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int = 16) -> None:
        config = model.config.get_text_config(decoder=True)
        _refuse_other_layers(config)
        heads = config.num_attention_heads
        self._batch = PagedBatch(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )
        layers = range(config.num_hidden_layers)
        super().__init__(layers=[_PagedLayer(self._batch, config, index) for index in layers])

    @staticmethod
    def blocks_needed(num_sequences: int, num_tokens: int, block_size: int = 16) -> int:
        """Blocks that surely suffice for ``num_sequences`` (times beams) of ``num_tokens`` each."""
        return num_sequences * -(-num_tokens // block_size)

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.free()

    def statistics(self) -> Statistics:
        """How full the pool is at this moment."""
        return self._batch.manager.statistics()

    def free(self) -> None:
        """Gives the memory back. The cache cannot be used afterwards."""
        self._batch.free()

    # transformers' Cache. Blocks are common to all layers, so these act once.

    def reset(self) -> None:
        """Forgets every sequence and keeps the memory."""
        self._batch.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns; transformers 5 passes numbers <= 0."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"PagedCache.crop: expected minus the columns to remove, got {tokens_to_remove}"
            )
        self._batch.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from what row ``beam_idx[i]`` holds, sharing its blocks."""
        self._batch.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, one after the other, sharing blocks."""
        rows = torch.arange(len(self._batch))
        self._batch.select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``."""
        self._batch.select(indices)


class _PagedLayer(CacheLayerMixin):
    """One layer of a PagedCache, as transformers' attention modules and masks see it."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: PagedBatch, config: Any, index: int) -> None:
        super().__init__()
        self.batch = batch
        self.config = config
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands the new keys and values on to attention, which is the first to know the padding."""
        if self.index == 0 and self.config._attn_implementation != NAME:
            raise RuntimeError(
                f"PagedCache: the model's attention is {self.config._attn_implementation!r}, which "
                "cannot read blocks: call use_paged_attention(model)"
            )
        setattr(key_states, _HANDLE, self)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.batch.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.batch.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


def use_paged_attention(model: PreTrainedModel) -> None:
    """Makes ``model`` attend through :class:`PagedCache`; ``set_attn_implementation`` undoes it."""
    model.set_attn_implementation(NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention: stores the new keys and values, then attends over the blocks.

    Args:
        module: the attention layer.
        query: [batch, heads, columns, head_size].
        key, value: [batch, kv_heads, columns, head_size], of the new columns only.
        attention_mask: what :func:`_mask` returned: [batch, all columns] or None.
        scaling: of the logits; None: head_size ** -0.5.

    Returns:
        [batch, columns, heads, head_size], and None for the attention weights.
    """
    layer: _PagedLayer | None = getattr(key, _HANDLE, None)
    if layer is None:
        raise NotImplementedError(
            "vllm_kernels attention: past_key_values: expected a PagedCache, got another cache or "
            "none"
        )
    _refuse_unserved(module, query, attention_mask, dropout, kwargs)
    batch = layer.batch
    if query.dtype != batch.dtype:
        raise NotImplementedError(
            f"vllm_kernels attention: query: expected {batch.dtype} (from PagedCache), "
            f"got {query.dtype}"
        )
    if layer.index == 0:
        batch.begin(query.shape[0], query.shape[2], attention_mask)
    batch.write(layer.index, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return batch.attend(layer.index, query, scale), None


def _mask(
    *args: Any, mask_function: Callable[..., Any], attention_mask: Tensor | None, **kwargs: Any
) -> Tensor | None:
    """The registered mask function: lets the padding through to attention, bool [batch, columns].

    Without it transformers would drop the mask, and padding would be attended to. Where more than
    padding is masked it returns what attention refuses: models make masks that no layer may use.
    """
    if mask_function is not causal_mask_function:
        return torch.empty(0)
    return attention_mask


def _refuse_unserved(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    arguments: dict[str, Any],
) -> None:
    """Raises NotImplementedError for what would change the result and is not computed here."""
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError("vllm_kernels attention: inference only: use torch.no_grad()")
    if dropout > 0:
        raise NotImplementedError(f"vllm_kernels attention: dropout: expected 0, got {dropout}")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("vllm_kernels attention: is_causal: expected True, got False")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(
            "vllm_kernels attention: attention_mask: expected one of padding, [batch, columns], "
            "over plain causal attention; got a custom mask, a window or packed sequences"
        )
    for name, argument in arguments.items():
        # All that is not known to be harmless: a model's attention sinks would come this way too.
        if name not in _HARMLESS and argument is not None and argument is not False:
            if name == "is_causal" and argument is True:
                continue
            raise NotImplementedError(f"vllm_kernels attention: {name}: not served")


def _refuse_other_layers(config: Any) -> None:
    """Raises NotImplementedError for layers that see less, or something else, than all that came
    before. Where a config has no list of its layers, all are alike."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise NotImplementedError(
            "PagedCache: layer types: expected full_attention, got "
            f"{', '.join(sorted(set(layer_types)))}"
        )
    if layer_types is None and window is not None:
        raise NotImplementedError(f"PagedCache: sliding_window: expected None, got {window}")
    if config.is_encoder_decoder:
        raise NotImplementedError("PagedCache: encoder-decoder models are not served")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
