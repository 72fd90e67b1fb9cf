"""The paged key/value cache that ``model.generate`` and ``model(...)`` take."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from .._types import CacheDType, Layout
from ..errors import Error, InvalidArgument
from ..kv_cache import Statistics
from ..ops._refusals import renamed
from .attention_interface import PagedLayer, kv_shape, refuse_no_model
from .paged_batch import PagedBatch


class PagedCache(Cache):
    """A key/value cache in blocks, for ``generate(..., past_key_values=cache)`` and ``model(...)``.

    Usable for several ``generate`` calls over the same batch; ``reset()`` it before an unrelated
    batch. It is a context manager, and gives its memory back at the end. ``generate`` never frees a
    user's cache.

    The keys and values of padding are not stored: the attention
    mask of each pass marks the padding. Logits at padding mean nothing.

    Args:
        model: whose shapes, dtype and device it takes.
        num_blocks: blocks in all, for every sequence of the batch. Beams and returned sequences are
            sequences of their own; see :meth:`blocks_needed`.
        block_size: tokens of a block, a power of two from 1 to 256.
        layout: "vllm", "NHD" or "HND".
        cache_dtype: "auto" (the model's), or one of fewer bits: "fp8", "fp8_e5m2", "int8",
            "int8_per_token", "int4_per_token".

    Raises:
        NotImplementedError: a model with layers other than full or sliding-window attention, or
            with a head size or dtype that the kernels do not serve.
        TypeError: a model that is none.

    Example:
        >>> from pathlib import Path
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from vllm_kernels.integrations.transformers import PagedCache
        >>> from vllm_kernels.integrations.transformers import stop_paged_attention
        >>> from vllm_kernels.integrations.transformers import use_paged_attention
        >>> folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        >>> tokenizer = AutoTokenizer.from_pretrained(folder)
        >>> inputs = tokenizer(["The for statement"], return_tensors="pt")
        >>> use_paged_attention(model)
        >>> with torch.no_grad(), PagedCache(model, num_blocks=8) as cache:
        ...     tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
        >>> stop_paged_attention(model)
        >>> tokens.shape[1] - inputs["input_ids"].shape[1]
        8
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        block_size: int = 16,
        *,
        layout: Layout = "vllm",
        cache_dtype: CacheDType = "auto",
    ) -> None:
        refuse_no_model("PagedCache", model)
        try:
            shape = kv_shape(model, block_size, layout, cache_dtype)
            self._batch = PagedBatch(shape, num_blocks, model.device)
        except Error as error:
            raise renamed(error, "PagedCache", {}) from None
        config = model.config.get_text_config(decoder=True)
        layers = range(shape.num_layers)
        super().__init__(layers=[PagedLayer(self._batch, config, index) for index in layers])

    @staticmethod
    def blocks_needed(num_sequences: int, num_tokens: int, block_size: int = 16) -> int:
        """Blocks that surely suffice for ``num_sequences`` (times beams) of ``num_tokens`` each."""
        for name, size, minimum in (
            ("num_sequences", num_sequences, 0),
            ("num_tokens", num_tokens, 0),
            ("block_size", block_size, 1),
        ):
            if size < minimum:
                raise InvalidArgument(
                    f"PagedCache.blocks_needed: {name}: expected at least {minimum}, got {size}"
                )
        return num_sequences * -(-num_tokens // block_size)

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.free()

    def statistics(self) -> Statistics:
        """How full the pool is at this moment."""
        return self._batch.manager.statistics()

    def free(self) -> None:
        """Gives the memory back. The cache cannot be used afterwards."""
        self._batch.free()

    # transformers' Cache. Blocks are common to all layers, so these act once.

    def reset(self) -> None:
        """Forgets every sequence and keeps the memory: before an unrelated batch."""
        self._batch.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns; transformers 5 passes numbers <= 0."""
        if tokens_to_remove > 0:
            raise InvalidArgument(
                f"PagedCache.crop: expected minus the columns to remove, got {tokens_to_remove}"
            )
        self._batch.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues row ``beam_idx[i]`` and shares its blocks."""
        self._batch.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, one after the other, sharing blocks."""
        rows = torch.arange(len(self._batch))
        self._batch.select(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``."""
        self._batch.select(indices)
