"""Attention over blocks in models of transformers, registered there as "vllm_kernels".

A cache (:class:`~vllm_kernels.integrations.transformers.PagedCache`, or that of an engine) returns
the new keys from ``update`` with itself attached. Attention finds it there, checks all arguments,
and calls the cache to store and attend. Unsupported arguments are refused by name; nothing falls
back to torch's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from reprlib import repr as short_repr
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from .._types import CacheDType, Layout
from ..errors import Error, InvalidType, Unsupported
from ..kv_cache.tensors import KVShape
from .attention_overrides import bind_own_attention, unbind_own_attention
from .tensor_parallel import heads_of_rank

__all__ = ["ENGINES", "NAME", "AttentionOptions", "LayerCall", "PagedLayer", "kv_shape",
           "refuse_no_model", "stop_paged_attention", "use_paged_attention"]  # fmt: skip

NAME = "vllm_kernels"
"""Of the attention function and of the mask function in transformers' registries."""

ENGINES: WeakKeyDictionary[PreTrainedModel, ref[Any]] = WeakKeyDictionary()
"""The engine that a model belongs to, until it is closed or forgotten."""

_HANDLE = "vllm_kernels_layer"  # attribute by which a key tensor carries its cache to attention
_WINDOW = "vllm_kernels_window"  # attribute of a mask: its window
_BEFORE = "vllm_kernels_before"  # attribute of a model: the attention that it had
_HARMLESS = {  # keyword arguments of attention that do not change its result
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass(frozen=True)
class AttentionOptions:
    """Arguments of a layer for :func:`vllm_kernels.paged_attention`, with the same names."""

    scale: float
    sliding_window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None  # [num_heads], float32
    alibi_slopes: Tensor | None = None  # [num_heads], float32

    @property
    def can_cascade(self) -> bool:
        """Whether shared blocks look the same to all of these sequences.

        Then :meth:`~vllm_kernels.kv_cache.tensors.KVCache.attend_cascade` serves them.
        """
        return not self.sliding_window and self.sinks is None and self.alibi_slopes is None

    def arguments(self) -> dict[str, Any]:
        """All of it, by name. (torch.compile does not trace ``vars``.)"""
        return {
            "scale": self.scale,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
        }


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer for the pages of a cache in one pass."""

    layer: int
    query: Tensor  # [batch, heads, columns, head_size]
    key: Tensor  # [batch, kv_heads, columns, head_size], of the new columns only, as value
    value: Tensor
    mask: Tensor | None  # [batch, all columns], False for padding
    options: AttentionOptions


class Pages(Protocol):
    """The interface of a cache's batch, which stores and attends."""

    @property
    def length(self) -> int: ...
    @property
    def shape(self) -> KVShape: ...

    def forward(self, call: LayerCall) -> Tensor:
        """Stores the new keys and values of a layer, then attends.

        Returns:
            [batch, columns, heads, head_size].
        """
        ...


class PagedLayer(CacheLayerMixin):
    """One layer of a cache of blocks, in the form that transformers' attention modules and masks
    expect."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, pages: Pages, config: Any, index: int) -> None:
        super().__init__()
        self.pages = pages
        self.config = config
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Passes the new keys and values on to attention, which gets the padding mask as well."""
        if self.index == 0 and self.config._attn_implementation != NAME:
            raise Error(
                f"PagedCache: the model's attention is {self.config._attn_implementation!r}, which "
                "cannot read blocks: call use_paged_attention(model)"
            )
        setattr(key_states, _HANDLE, self)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.pages.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.pages.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


def refuse_no_model(what: str, model: object) -> None:
    """Raises TypeError unless it is a model of transformers, or a wrapper of one."""
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return
    path = isinstance(model, str | PathLike)
    got = short_repr(model) if path else type(model).__name__
    hint = ": load it with AutoModelForCausalLM.from_pretrained" if path else ""
    raise InvalidType(f"{what}: model: expected a model of transformers, got {got}{hint}")


def use_paged_attention(model: PreTrainedModel) -> None:
    """Makes ``model`` attend through a cache of blocks; :func:`stop_paged_attention` undoes it.

    Args:
        model: a causal model of transformers, changed in place.

    Raises:
        NotImplementedError: a model whose attention is its own and not known here.
        TypeError: it is no model.

    Example:
        >>> from pathlib import Path
        >>> from transformers import AutoModelForCausalLM
        >>> from vllm_kernels.integrations.transformers import stop_paged_attention
        >>> from vllm_kernels.integrations.transformers import use_paged_attention
        >>> folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        >>> use_paged_attention(model)  # then generate with a PagedCache
        >>> stop_paged_attention(model)
    """
    refuse_no_model("use_paged_attention", model)
    before = model.config._attn_implementation
    if before == NAME:
        return
    if not bind_own_attention(model, NAME):
        model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise Unsupported(
            f"use_paged_attention: model type: {model.config.model_type} computes attention in a "
            "way of its own, which is not served"
        )
    setattr(model, _BEFORE, before)


def stop_paged_attention(model: PreTrainedModel) -> None:
    """Gives ``model`` the attention back that it had before :func:`use_paged_attention`.

    Args:
        model: changed in place; one that was not given to use_paged_attention stays as it is.

    Raises:
        TypeError: it is no model.

    Example:
        >>> from pathlib import Path
        >>> from transformers import AutoModelForCausalLM
        >>> from vllm_kernels.integrations.transformers import stop_paged_attention
        >>> folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        >>> stop_paged_attention(model)  # nothing to undo
    """
    refuse_no_model("stop_paged_attention", model)
    if model.config._attn_implementation != NAME:
        return
    before = getattr(model, _BEFORE, "eager")
    if not unbind_own_attention(model, before):
        model.set_attn_implementation(before)


def kv_shape(
    model: PreTrainedModel,
    block_size: int,
    layout: Layout = "vllm",
    cache_dtype: CacheDType = "auto",
) -> KVShape:
    """The shape of a block for ``model``, of this rank's heads if several share it.

    Raises:
        NotImplementedError: layers of another kind than full or sliding-window attention, an
            encoder-decoder, or a head size or dtype that the kernels do not serve.
    """
    config = model.config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or ())
    others = layer_types - {"full_attention", "sliding_attention"}
    if others:
        raise Unsupported(
            "PagedCache: layer types: expected full_attention and sliding_attention, got "
            f"{', '.join(sorted(others))}"
        )
    if config.is_encoder_decoder:
        raise Unsupported("PagedCache: encoder-decoder models are not served")
    heads, kv_heads, head_size = (
        _of_all_layers(config, name)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if not heads:
        raise Unsupported(f"PagedCache: {config.model_type} has no attention heads")
    if not kv_heads:
        kv_heads = 1 if getattr(config, "multi_query", False) else heads
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=heads_of_rank(model, "num_key_value_heads", kv_heads),
        head_size=head_size or config.hidden_size // heads,
        dtype=model.dtype,
        block_size=block_size,
        layout=layout,
        cache_dtype=cache_dtype,
    )


def _of_all_layers(config: Any, name: str) -> int | None:
    """An attribute of a config, None if it has none; it must be the same for all layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' refusal to give one value for layers that differ
        raise Unsupported(
            f"PagedCache: {config.model_type}: {name}: expected the same in all layers"
        ) from None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention: stores the new keys and values, then attends over the blocks.

    Args:
        module: the attention layer.
        query: [batch, heads, columns, head_size].
        key, value: [batch, kv_heads, columns, head_size], of the new columns only.
        attention_mask: the result of :func:`_mask`: [batch, all columns] or None.
        scaling: of the logits; None: head_size ** -0.5.
        sliding_window: tokens visible to a token, itself included; None: all.
        softcap: bound on the logits; None: none.
        s_aux: [heads], attention sinks.
        alibi_slopes: [heads].

    Returns:
        [batch, columns, heads, head_size], and None for the attention weights.
    """
    layer: PagedLayer | None = getattr(key, _HANDLE, None)
    if layer is None:
        raise Unsupported(
            "vllm_kernels attention: past_key_values: expected a PagedCache, got another cache or "
            f"none: {_without_cache(module)}"
        )
    _refuse_unserved(module, query, attention_mask, dropout, kwargs)
    _refuse_other_shapes(module, layer, query, key, value)
    window = sliding_window or 0
    masked = getattr(attention_mask, _WINDOW, 0)
    if window != masked:  # the model and its mask disagree
        raise Unsupported(
            f"vllm_kernels attention: sliding_window: {window} of the layer, {masked} of its mask"
        )
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=window,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.detach().float(),
        alibi_slopes=alibi_slopes,
    )
    call = LayerCall(layer.index, query, key, value, attention_mask, options)
    return layer.pages.forward(call), None


def _refuse_other_shapes(
    module: nn.Module, layer: PagedLayer, query: Tensor, key: Tensor, value: Tensor
) -> None:
    """Raises NotImplementedError for a dtype or heads that are not those of the cache."""
    shape = layer.pages.shape
    if query.dtype != shape.dtype:
        raise Unsupported(
            f"vllm_kernels attention: query: expected {shape.dtype} (from PagedCache), "
            f"got {query.dtype}"
        )
    for name, heads in (("key", key), ("value", value)):
        if (heads.shape[1], heads.shape[3]) != (shape.num_kv_heads, shape.head_size):
            raise Unsupported(
                f"vllm_kernels attention: {type(module).__name__} {layer.index}: {name}: expected "
                f"{shape.num_kv_heads} heads of size {shape.head_size} (from the model's config), "
                f"got {heads.shape[1]} of size {heads.shape[3]}"
            )


def _without_cache(module: nn.Module) -> str:
    """A hint for a call of the attention layer ``module`` without blocks."""
    for model, engine in ENGINES.items():
        if engine() is not None and any(part is module for part in model.modules()):
            return "an Engine has the model: ask that one to generate, or close() it"
    return (
        "call generate(..., past_key_values=PagedCache(model, num_blocks)), or "
        "stop_paged_attention(model) for its own attention"
    )


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    local_size: int | None = None,
    config: Any = None,
    device: torch.device | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The registered mask function: lets the padding through to attention, bool [batch, columns],
    and the window as an attribute of it.

    Without it transformers would drop the mask, and padding would be attended to. If more
    than padding and a window is masked, it returns a mask that attention refuses. It does not
    raise: models also make masks that no layer uses.
    """
    window = 0
    if mask_function is not causal_mask_function:
        if local_size is None or not _is_sliding_window(mask_function):
            return torch.empty(0)
        window = local_size
    if attention_mask is None:
        if not window and getattr(config, "model_type", "") != "mpt":
            return None
        # There must be a tensor: to carry the window, and MPT converts its mask.
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if window:
        attention_mask = attention_mask.view_as(attention_mask)  # the other layers' is without
        setattr(attention_mask, _WINDOW, window)
    return attention_mask


_WINDOW_FUNCTION = sliding_window_causal_mask_function(2)


def _is_sliding_window(mask_function: Callable[..., Any]) -> bool:
    """Whether it is the plain causal window's, and and no other mask is combined with it."""
    parts = _parts(mask_function)
    expected = _parts(_WINDOW_FUNCTION)
    return (
        len(parts) == len(expected) == 2
        and getattr(parts[0], "__code__", 0) is getattr(expected[0], "__code__", 1)
        and parts[1] is expected[1]
    )


def _parts(mask_function: Callable[..., Any]) -> tuple[Any, ...]:
    """The functions that a conjunction of masks consists of."""
    if getattr(mask_function, "__code__", 0) is not getattr(_WINDOW_FUNCTION, "__code__", 1):
        return ()
    (cell,) = mask_function.__closure__ or (None,)
    return getattr(cell, "cell_contents", ())


def _refuse_unserved(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    arguments: dict[str, Any],
) -> None:
    """Raises NotImplementedError for arguments that change the result and are not supported."""
    if torch.is_grad_enabled() and query.requires_grad:
        raise Unsupported("vllm_kernels attention: inference only: use torch.no_grad()")
    if dropout > 0:
        raise Unsupported(f"vllm_kernels attention: dropout: expected 0, got {dropout}")
    if not getattr(module, "is_causal", True):
        raise Unsupported("vllm_kernels attention: is_causal: expected True, got False")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(
            "vllm_kernels attention: attention_mask: expected one of padding, [batch, columns], "
            "over plain causal attention or its sliding window; got a custom mask or packed "
            "sequences"
        )
    for name, argument in arguments.items():
        # Every unknown argument: a position bias would be passed here too.
        if name not in _HARMLESS and argument is not None and argument is not False:
            if name == "is_causal" and argument is True:
                continue
            raise Unsupported(f"vllm_kernels attention: {name}: not served")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
