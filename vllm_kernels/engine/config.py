"""Engine options, their checks, and the sizes that follow from the options and the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from reprlib import repr as short_repr
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .._types import CacheDType, Layout
from ..errors import InvalidArgument, InvalidType
from ..hf.attention_interface import AttentionOptions
from ..kv_cache import KVCacheManager
from ..kv_cache.tensors import KVShape, free_memory
from .plan import blocks_at_most, num_usable_blocks
from .sparse import PageSelection, SparQ, Sparse
from .speculative.options import DraftModel, PromptLookup

__all__ = ["EngineConfig"]

_MIN_LENGTH = 8
# Integer options and their minimum. None: KVCache checks the size.
_SIZES = {
    "num_blocks": None,
    "cache_bytes": None,
    "max_batch_tokens": 1,
    "max_length": _MIN_LENGTH,
    "host_bytes": 0,
    "max_batch_size": 1,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineConfig:
    """Options of :class:`~vllm_kernels.engine.engine.Engine`. Its docstring explains each one.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: A size is too small.
    """

    block_size: int = 16
    num_blocks: int | None = None
    cache_bytes: int | None = None
    host_bytes: int = 0
    layout: Layout = "vllm"
    cache_dtype: CacheDType = "auto"
    k_scale: Tensor | float = 1.0
    v_scale: Tensor | float = 1.0
    max_batch_size: int = 64
    max_batch_tokens: int | None = None
    max_length: int | None = None
    prefix_caching: bool = True
    cuda_graphs: bool | None = None
    cascade: bool = True
    overlap: bool | None = None
    compile: bool | str = False
    fused: bool = True
    check: bool = True
    speculative: PromptLookup | DraftModel | None = None
    sparse: Sparse | None = None

    def __post_init__(self) -> None:
        for name, minimum in _SIZES.items():
            size = getattr(self, name)
            if size is None and getattr(EngineConfig, name) is None:  # None is the default
                continue
            if not isinstance(size, Integral):
                raise InvalidType(f"Engine: {name}: expected an integer, got {short_repr(size)}")
            if minimum is not None and size < minimum:
                raise InvalidArgument(f"Engine: {name}: expected at least {minimum}, got {size}")

        for name in ("layout", "cache_dtype"):
            word = getattr(self, name)
            if not isinstance(word, str):
                raise InvalidType(f"Engine: {name}: expected a str, got {short_repr(word)}")
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            if scale is None or isinstance(scale, str):
                raise InvalidType(
                    f"Engine: {name}: expected a number or a tensor, got {short_repr(scale)}"
                )

        if not isinstance(self.speculative, PromptLookup | DraftModel | None):
            raise InvalidType(
                "Engine: speculative: expected PromptLookup, DraftModel or None, got "
                f"{short_repr(self.speculative)}"
            )
        if not isinstance(self.sparse, PageSelection | SparQ | None):
            raise InvalidType(
                "Engine: sparse: expected PageSelection, SparQ or None, got "
                f"{short_repr(self.sparse)}"
            )
        if self.sparse is not None and self.speculative is not None:
            raise InvalidArgument(
                "Engine: sparse: expected None with speculative, whose passes are dense, got "
                f"{self.sparse}"
            )
        if isinstance(self.sparse, SparQ) or (self.sparse and self.sparse.per_kv_head):
            for name in ("k_scale", "v_scale"):
                if torch.as_tensor(getattr(self, name)).ndim > 1:
                    raise InvalidArgument(
                        f"Engine: sparse: expected one {name} a layer, got one a head, with "
                        f"{self.sparse}"
                    )
        if self.speculative is not None and self.overlap:
            raise InvalidArgument(
                "Engine: overlap: expected None or False with speculative, which needs the last "
                "tokens, got True"
            )

    @property
    def batch_tokens(self) -> int:
        """The maximum number of tokens per pass."""
        tokens = self.max_batch_tokens
        return max(2048, self.max_batch_size) if tokens is None else tokens

    @property
    def max_rows(self) -> int:
        """The maximum number of tokens that a pass draws."""
        return self.max_batch_size * (1 + getattr(self.speculative, "num_tokens", 0))

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> EngineConfig:
        """Builds a config from the ``locals()`` of a function with these parameters."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def cache_blocks(self, model: PreTrainedModel, shape: KVShape, groups: int) -> int:
        """Returns the number of cache blocks.

        Args:
            model: The model to serve.
            shape: Shape of one block over all cache tensors.
            groups: Number of layer groups. Each group has its own block tables.

        Raises:
            ValueError: The cache would have fewer than 2 blocks.
        """
        num_blocks, cache_bytes = self.num_blocks, self.cache_bytes
        if num_blocks is None:
            if cache_bytes is None:
                tokens = self.max_batch_size * self.wanted_length(model)
                cache_bytes = _default_bytes(model.device, shape, tokens, groups)
            num_blocks = cache_bytes // shape.block_bytes
        if num_blocks < 2:
            raise InvalidArgument(
                f"Engine: cache: expected at least 2 blocks of {shape.block_bytes:,} bytes, "
                f"got {num_blocks}"
            )
        return num_blocks

    def limits(
        self, model: PreTrainedModel, manager: KVCacheManager, layers: list[AttentionOptions]
    ) -> dict[str, int]:
        """Returns max_batch_size, max_batch_tokens and max_length, by these names.

        Warns if max_length exceeds the model's positions. ALiBi models need no positions.

        Raises:
            ValueError: The cache holds fewer than 8 tokens, or fewer than a given max_length.
        """
        wanted = self.wanted_length(model)
        size, tokens = self.max_batch_size, self.batch_tokens
        length = min(wanted, manager.num_blocks * self.block_size)
        if length < _MIN_LENGTH:
            raise InvalidArgument(
                f"Engine: cache: expected room for at least {_MIN_LENGTH} tokens, got "
                f"{manager.num_blocks} blocks of {self.block_size}"
            )
        if self.max_length is not None:
            length = wanted
            needed, there = blocks_at_most(wanted, manager, tokens), num_usable_blocks(manager)
            if needed > there:
                raise InvalidArgument(
                    f"Engine: max_length: expected a sequence that fits into {there} blocks of "
                    f"{self.block_size} tokens, got {wanted}, which needs {needed} blocks: give "
                    "more num_blocks or cache_bytes"
                )
        positions = _positions(model, scaled=True)
        if 0 < positions < length and all(layer.alibi_slopes is None for layer in layers):
            warnings.warn(
                f"Engine: max_length: expected at most {positions} (the model's "
                f"max_position_embeddings), got {wanted}: later tokens may be wrong, or fail",
                stacklevel=4,
            )
        return {"max_batch_size": size, "max_batch_tokens": tokens, "max_length": length}

    def wanted_length(self, model: PreTrainedModel) -> int:
        """Returns the wanted max_length in tokens. The cache may hold less."""
        return (_positions(model) or 4096) if self.max_length is None else self.max_length


def _positions(model: PreTrainedModel, scaled: bool = False) -> int:
    """Returns the model's max_position_embeddings, or 0 if its config has none.

    Args:
        model: The model to serve.
        scaled: Count positions after rotary scaling (linear, yarn). Some configs store the
            number before scaling and some the number after it.
    """
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or 0
    if positions <= 0 or not scaled:
        return max(positions, 0)
    rope = getattr(config, "rope_parameters", None) or {}
    before = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(before * (rope.get("factor") or 1)))


def _default_bytes(device: torch.device, shape: KVShape, tokens: int, groups: int) -> int:
    """Returns the default cache size in bytes."""
    free = free_memory(device)
    if device.type == "cuda":
        return int(0.9 * free)
    wanted = (tokens // shape.block_size + 1) * groups * shape.block_bytes
    return min(wanted, free // 4)
