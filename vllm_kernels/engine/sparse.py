"""The options of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from ..errors import InvalidArgument, InvalidType
from ..hf.attention_interface import AttentionOptions

__all__ = ["PageSelection"]


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

    Raises:
        TypeError: An argument is no integer.
        ValueError: An argument is out of range.

    Example:
        >>> from vllm_kernels.integrations.transformers import PageSelection
        >>> PageSelection(budget=1024)  # Engine(model, tokenizer, sparse=PageSelection(1024))
        PageSelection(budget=1024, sink_pages=1, recent_pages=4, dense_layers=2)
    """

    budget: int = 2048
    sink_pages: int = 1
    recent_pages: int = 4
    dense_layers: int = 2

    def __post_init__(self) -> None:
        minimums = {"budget": 1, "sink_pages": 0, "recent_pages": 1, "dense_layers": 0}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise InvalidType(f"PageSelection: {name}: expected an integer, got {value!r}")
            if value < minimum:
                raise InvalidArgument(
                    f"PageSelection: {name}: expected at least {minimum}, got {value}"
                )

    def serves(self, layer: int, options: AttentionOptions) -> bool:
        """Whether a layer selects pages: positions are lost, which windows and ALiBi need."""
        has_positions = options.sliding_window or options.alibi_slopes is not None
        return layer >= self.dense_layers and not has_positions

    def refuse_block_size(self, block_size: int) -> None:
        """Raises ValueError if the pages that are always kept do not fit the budget."""
        kept = (self.sink_pages + self.recent_pages) * block_size
        if self.budget < kept:
            raise InvalidArgument(
                f"Engine: sparse: budget: expected at least {kept} tokens, for sink_pages and "
                f"recent_pages of {block_size}, got {self.budget}"
            )
