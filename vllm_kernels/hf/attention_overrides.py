"""BLOOM, MPT and GPT-J, which do not ask transformers for an attention function.

Their attention modules get another ``forward``, which computes queries, keys and values as the
model's own does and goes through the registered attention from there: with ALiBi slopes for BLOOM
(Le Scao et al. 2022, arXiv:2211.05100) and MPT, over keys rotated in GPT-J's interleaved way for
GPT-J.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from ..errors import Unsupported

_SLOPES = "vllm_kernels_slopes"  # attribute of an attention module: [heads], float32

_MODULES = {
    "bloom": "BloomAttention",
    "mpt": "MptAttention",
    "gptj": "GPTJAttention",
}
"""By model type, the class of the attention modules."""

_BIASES = {"build_alibi_tensor", "build_mpt_alibi_tensor"}
"""Methods that make a bias, which is not used here and which no CUDA graph can contain."""


def _no_bias(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(0)


def bind_own_attention(model: PreTrainedModel, name: str) -> bool:
    """Lets the attention modules of ``model`` call the registered attention ``name``. False, and
    nothing done, for a model type that is none of these."""
    kind = model.config.model_type
    if kind not in _MODULES:
        return False
    forward = _FORWARDS[kind]
    modules = _attention_modules(model)
    slopes = _SLOPES_OF[kind](model) if kind in _SLOPES_OF else None

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return AttentionInterface()[name](*args, **kwargs)[0]

    for build in _BIASES & set(dir(model.base_model)):
        setattr(model.base_model, build, _no_bias)
    for module in modules:
        module.register_buffer(_SLOPES, slopes, persistent=False)
        module.forward = MethodType(_bound(forward, attention), module)
    model.config._attn_implementation = name  # chooses the mask function
    return True


def unbind_own_attention(model: PreTrainedModel, before: str) -> bool:
    """Undoes :func:`bind_own_attention`; False for a model type that is none of these."""
    if model.config.model_type not in _MODULES:
        return False
    for build in _BIASES & set(vars(model.base_model)):
        delattr(model.base_model, build)
    for module in _attention_modules(model):
        del module.forward
        delattr(module, _SLOPES)
    model.config._attn_implementation = before
    return True


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    modeling = sys.modules[type(model).__module__]
    wanted = getattr(modeling, _MODULES[model.config.model_type])
    return [module for module in model.modules() if isinstance(module, wanted)]


def _bound(forward: Callable[..., Any], attention: Callable[..., Tensor]) -> Callable[..., Any]:
    def bound(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if kwargs.pop("output_attentions", None):
            raise Unsupported("vllm_kernels attention: output_attentions: not served")
        return forward(self, attention, *args, **kwargs), None

    return bound


def _update(cache: Cache | None, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return (key, value) if cache is None else cache.update(key, value, layer)


# BLOOM.


def _bloom_slopes(model: Any) -> Tensor:
    """The slopes out of the bias of the second of two tokens."""
    ones = torch.ones(1, 2, dtype=torch.int64, device=model.device)
    alibi = model.base_model.build_alibi_tensor(ones, model.config.n_head, torch.float32)
    return alibi[:, 0, 1].contiguous()


def _bloom_forward(
    self: Any,
    attention: Callable[..., Tensor],
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Cache | None = None,
    use_cache: bool = False,
) -> Tensor:
    """Replaces BloomAttention's; uses the slopes instead of the bias ``alibi``."""
    if self.pretraining_tp > 1 and self.slow_but_exact:
        raise Unsupported("vllm_kernels attention: slow_but_exact: not served")
    batch, columns, _ = hidden_states.shape
    qkv = self.query_key_value(hidden_states)
    query, key, value = qkv.view(batch, columns, self.num_heads, 3, self.head_dim).unbind(3)
    key, value = _update(layer_past, key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
    out = attention(
        self, query.transpose(1, 2), key, value, attention_mask,
        scaling=self.inv_norm_factor,
        dropout=self.attention_dropout.p if self.training else 0.0,
        alibi_slopes=getattr(self, _SLOPES),
    )  # fmt: skip
    out = self.dense(out.flatten(2))
    return residual + nn.functional.dropout(out, self.hidden_dropout, self.training)


# MPT.


def _mpt_slopes(model: Any) -> Tensor:
    """The slopes out of the biases of two tokens. transformers' MPT always has ALiBi, with
    alibi_bias_max 8 whatever the config says."""
    heads = model.config.n_heads
    alibi = model.base_model.build_mpt_alibi_tensor(heads, 2, device=model.device)
    return (alibi[:, 0, 1] - alibi[:, 0, 0]).float().contiguous()


def _mpt_forward(
    self: Any,
    attention: Callable[..., Tensor],
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Cache | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Replaces MptAttention's; uses the slopes instead of ``position_bias``."""
    batch, columns, _ = hidden_states.shape
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = qkv.view(batch, columns, 3, self.n_heads, self.head_dim).unbind(2)
    key, value = _update(
        past_key_values, key.transpose(1, 2), value.transpose(1, 2), self.layer_idx
    )
    out = attention(
        self, query.transpose(1, 2), key, value, attention_mask,
        scaling=self.softmax_scale,
        dropout=self.attn_dropout_p if self.training else 0.0,
        alibi_slopes=getattr(self, _SLOPES),
    )  # fmt: skip
    return self.out_proj(out.flatten(2))


# GPT-J.


def _gptj_forward(
    self: Any,
    attention: Callable[..., Tensor],
    hidden_states: Tensor,
    layer_past: Cache | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = False,
) -> Tensor:
    """Replaces GPTJAttention's; its rotary embedding rotates pairs of adjacent elements."""
    batch, columns, _ = hidden_states.shape
    heads = (batch, columns, self.num_attention_heads, self.head_dim)
    query = self.q_proj(hidden_states).view(heads)
    key = self.k_proj(hidden_states).view(heads)
    value = self.v_proj(hidden_states).view(heads)
    sin, cos = self.embed_positions[position_ids].to(hidden_states.dtype).chunk(2, -1)
    rotated = self.rotary_dim or self.head_dim
    query, key = (_rotate_pairs(x, sin, cos, rotated) for x in (query, key))
    key, value = _update(layer_past, key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
    out = attention(
        self, query.transpose(1, 2), key, value, attention_mask,
        scaling=self.head_dim**-0.5,
        dropout=self.attn_dropout.p if self.training else 0.0,
    )  # fmt: skip
    return self.resid_dropout(self.out_proj(out.flatten(2)))


def _rotate_pairs(heads: Tensor, sin: Tensor, cos: Tensor, rotated: int) -> Tensor:
    """Rotates the pairs (2i, 2i + 1) of the first ``rotated`` elements.

    Args:
        heads: [batch, columns, heads, head_size].
        sin, cos: [batch, columns, rotated / 2].
    """
    even, odd = heads[..., :rotated].unflatten(-1, (-1, 2)).unbind(-1)
    sin, cos = sin[:, :, None], cos[:, :, None]
    result = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([result, heads[..., rotated:]], -1)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "bloom": _bloom_forward,
    "mpt": _mpt_forward,
    "gptj": _gptj_forward,
}
_SLOPES_OF = {"bloom": _bloom_slopes, "mpt": _mpt_slopes}
