"""The options of sparse attention: what decoding sequences attend to.

Prompts, layers with a sliding window or ALiBi, and the first layers are dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

import vllm_kernels

from ..errors import Error, InvalidArgument, InvalidType, Unsupported
from ..hf.attention_interface import AttentionOptions
from ..kv_cache.tensors import KVCache, KVShape
from ..ops._refusals import renamed
from .refusals import check_integers

__all__ = ["PageSelection", "SparQ", "Sparse"]


@dataclass(frozen=True)
class PageSelection:
    """Decoding sequences attend to the pages that may matter most to their token.

    Prompts, layers with a sliding window or ALiBi, and the first layers are dense. See
    :func:`vllm_kernels.select_pages`, and Quest (Tang et al. 2024, arXiv:2406.10774).

    Args:
        budget: Number of tokens of a sequence that a token attends to, rounded down to whole
            blocks.
        sink_pages: Number of first blocks that are always kept.
        recent_pages: Number of last blocks that are always kept, >= 1.
        dense_layers: Number of first layers that attend to all tokens.
        per_kv_head: Whether each KV head has pages of its own. Layers with sinks are dense then,
            and an 8-bit cache has one k_scale and one v_scale a layer.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of range.

    Example:
        >>> from vllm_kernels.integrations.transformers import PageSelection
        >>> PageSelection(budget=512)  # Engine(model, tokenizer, sparse=PageSelection(512))
        PageSelection(budget=512, sink_pages=1, recent_pages=4, dense_layers=2, per_kv_head=False)
    """

    budget: int = 2048
    sink_pages: int = 1
    recent_pages: int = 4
    dense_layers: int = 2
    per_kv_head: bool = False

    def __post_init__(self) -> None:
        check_integers(self, budget=1, sink_pages=0, recent_pages=1, dense_layers=0)
        if not isinstance(self.per_kv_head, bool):
            raise InvalidType(
                f"PageSelection: per_kv_head: expected a bool, got {self.per_kv_head!r}"
            )

    def serves(self, layer: int, options: AttentionOptions) -> bool:
        """Whether a layer is sparse: positions are lost, which windows and ALiBi need."""
        has_positions = options.sliding_window or options.alibi_slopes is not None
        is_served = options.sinks is None or not self.per_kv_head
        return layer >= self.dense_layers and is_served and not has_positions

    def refuse(self, shape: KVShape, num_heads: int) -> None:
        """Raises ValueError if the pages that are always kept do not fit the budget."""
        _refuse_token_scales(self, shape)
        kept = (self.sink_pages + self.recent_pages) * shape.block_size
        if self.budget < kept:
            raise InvalidArgument(
                f"Engine: sparse: budget: expected at least {kept} tokens, for sink_pages and "
                f"recent_pages of {shape.block_size}, got {self.budget}"
            )

    def attend(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        tables: Tensor,
        lens: Tensor,
        options: AttentionOptions,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of one token per sequence."""
        kept, kept_lens = cache.select_pages(
            layer, query, tables, lens, self.budget, sink_pages=self.sink_pages,
            recent_pages=self.recent_pages, per_kv_head=self.per_kv_head,
        )  # fmt: skip
        return cache.attend(layer, query, kept, kept_lens, out=out, **options.arguments())


@dataclass(frozen=True)
class SparQ:
    """Decoding sequences attend to the tokens with the best approximate scores.

    Prompts, layers with a sliding window, ALiBi, softcap or sinks, and the first layers are dense.
    See :func:`vllm_kernels.sparq_attention` (Ribar et al. 2024, arXiv:2312.04985).

    Args:
        r: Number of components of a key that the scores read.
        k: Number of tokens that a token attends to, rounded down to whole blocks.
        window: Number of newest tokens that are always kept. None means k // 4.
        sink_tokens: Number of first tokens that are always kept.
        select: "pages", or "tokens" for layouts "NHD" and "HND".
        dense_layers: Number of first layers that attend to all tokens.

    Raises:
        TypeError: A number is no integer.
        ValueError: An argument is out of range.

    Example:
        >>> from vllm_kernels.integrations.transformers import SparQ
        >>> SparQ(k=512)  # Engine(model, tokenizer, sparse=SparQ(k=512))
        SparQ(r=32, k=512, window=None, sink_tokens=0, select='pages', dense_layers=2)
    """

    r: int = 32
    k: int = 1024
    window: int | None = None
    sink_tokens: int = 0
    select: Literal["pages", "tokens"] = "pages"
    dense_layers: int = 2

    def __post_init__(self) -> None:
        check_integers(self, r=1, k=1, sink_tokens=0, dense_layers=0)
        if self.window is not None:
            check_integers(self, window=0)

    def serves(self, layer: int, options: AttentionOptions) -> bool:
        """Whether a layer is sparse: the op knows neither positions nor other scores."""
        return layer >= self.dense_layers and options.can_cascade and not options.softcap

    def refuse(self, shape: KVShape, num_heads: int) -> None:
        """Raises ValueError if the op refuses these numbers for the cache."""
        _refuse_token_scales(self, shape)
        query = torch.empty(1, num_heads, shape.head_size, dtype=shape.dtype, device="meta")
        key, value = (
            torch.empty(size, dtype=shape.stored_dtype, device="meta")
            for size in shape.cache_shapes(1)
        )
        table = torch.empty(1, 1 << 20, dtype=torch.int32, device="meta")
        try:
            vllm_kernels.sparq_attention(
                query, key, value, table, table[:, 0].contiguous(), r=self.r, k=self.k,
                window=self.window, sink_tokens=self.sink_tokens, select=self.select,
                layout=shape.layout,
            )  # fmt: skip
        except Error as error:
            raise renamed(error, "Engine: sparse", {}) from None

    def attend(
        self,
        cache: KVCache,
        layer: int,
        query: Tensor,
        tables: Tensor,
        lens: Tensor,
        options: AttentionOptions,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of one token per sequence."""
        return cache.attend_sparq(
            layer, query, tables, lens, r=self.r, k=self.k, window=self.window,
            sink_tokens=self.sink_tokens, select=self.select, scale=options.scale, out=out,
        )  # fmt: skip


def _refuse_token_scales(sparse: Sparse, shape: KVShape) -> None:
    if shape.has_token_scales:
        raise Unsupported(
            f"Engine: sparse: expected None with cache_dtype={shape.cache_dtype!r}, got {sparse}"
        )


Sparse: TypeAlias = PageSelection | SparQ
