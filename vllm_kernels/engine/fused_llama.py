"""Forward pass of Llama-like models over packed tokens.

torch computes the matrix products and this library's ops do the rest. The q, k and v projections
are one product, and so are gate and up. So a layer has four products, two fused add and RMS norms,
one activation, and rotary embedding with cache write and attention. A decode pass does the last
three in one op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn.functional import linear
from transformers import PreTrainedModel

import vllm_kernels

from ..errors import Unsupported
from ..hf.attention_interface import AttentionOptions
from ..hf.llama_patch import FAMILIES
from ..hf.tensor_parallel import group_of_model, local_tensor
from .layer_groups import PackedPages

__all__ = ["FusedLlama", "can_be_packed", "refuse_changing_rotary"]

_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles depend only on the position."""


def refuse_changing_rotary(model: PreTrainedModel) -> None:
    """Raises NotImplementedError if rotary frequencies depend on the longest position of a pass.

    In a packed row, another sequence may have that position.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind is not None and kind not in _FIXED_ROTARY:
                raise Unsupported(
                    f"Engine: rope_type: {name} expected one of {', '.join(_FIXED_ROTARY)}, got "
                    f"{kind}"
                )


def can_be_packed(model: PreTrainedModel) -> bool:
    """Whether :class:`FusedLlama` serves ``model``.

    It needs a known family, plain linear layers and a fixed rotary embedding.
    """
    config = model.config
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return False
    if getattr(model.model.rotary_emb, "rope_type", None) not in _FIXED_ROTARY:
        return False
    return all(
        type(projection) is nn.Linear
        for layer in model.model.layers
        for group in _projections(layer)
        for projection in group
    )


class FusedLlama:
    """Forward pass of a Llama-like model over one row of packed tokens.

    While it exists, the model's projections are views of joined weights, which saves memory.
    :meth:`close` separates them.

    Args:
        model: A model for which :func:`can_be_packed` is true.
        pages: Cache writes and attention.
        windows: Attention window of each layer in tokens. 0 means full attention.
        max_length: Maximum number of tokens per sequence.
    """

    def __init__(
        self, model: PreTrainedModel, pages: PackedPages, windows: Sequence[int], max_length: int
    ) -> None:
        decoder = model.model
        config = model.config
        self._model = model
        self._pages = pages
        self._kv_heads = pages.shape.num_kv_heads
        self._head_size = pages.shape.head_size
        self._epsilon = config.rms_norm_eps
        self._layers = [_Layer.of(layer, window) for layer, window in zip(decoder.layers, windows)]
        self._group = group_of_model(model)
        if self._group is not None and self._group.rank() > 0:  # rank 0 adds them to the sum
            for layer in self._layers:
                layer.out_bias = layer.down_bias = None
        self._cos_sin = self._rotary_table(max_length)

    def __call__(self, input_ids: Tensor, positions: Tensor, last: Tensor | None = None) -> Tensor:
        """Computes logits.

        Args:
            input_ids: int64 [num_tokens].
            positions: int64 [num_tokens].
            last: Rows that need logits, int64 [n]. None means all.

        Returns:
            Logits [n, vocabulary].
        """
        decoder = self._model.model
        residual = decoder.embed_tokens(input_ids)  # [num_tokens, hidden]
        x = torch.empty_like(residual)
        for index, layer in enumerate(self._layers):
            if index == 0:
                vllm_kernels.rms_norm(x, residual, layer.input_norm, self._epsilon)
            else:
                vllm_kernels.fused_add_rms_norm(x, residual, layer.input_norm, self._epsilon)
            x = self._attention(index, layer, x, positions)
            vllm_kernels.fused_add_rms_norm(x, residual, layer.mlp_norm, self._epsilon)
            x = self._mlp(layer, x)
        vllm_kernels.fused_add_rms_norm(x, residual, decoder.norm.weight, self._epsilon)
        return self._model.lm_head(x if last is None else x[last])

    def close(self) -> None:
        """Separates the joined weights, layer by layer. It needs memory for one layer."""
        for layer in self._model.model.layers:
            if not self._layers:
                return
            self._layers.pop(0)  # the last view of a joined weight frees it
            for group in _projections(layer):
                if len(group) > 1:
                    for weight in (x for projection in group for x in projection.parameters()):
                        local_tensor(weight).data = local_tensor(weight).data.clone()

    # Inner workings.

    def _attention(self, index: int, layer: _Layer, x: Tensor, positions: Tensor) -> Tensor:
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        pages, step = self._pages, self._pages.step
        assert step is not None
        group = pages.groups.group_of_layer[index]
        slots = step.slot_mappings[group]
        norms = {"q_weight": layer.q_norm, "k_weight": layer.k_norm, "epsilon": self._epsilon}
        plain = not pages.is_sparse(index, layer.options)
        if plain and step.starts is None and pages.cascade(index, layer.options) is None:
            out = pages.cache.decode(
                index, qkv, positions, self._cos_sin, slots, step.block_tables[group],
                step.seq_lens, scale=layer.options.scale,
                sliding_window=layer.options.sliding_window, **norms,
            )  # fmt: skip
        else:
            kv = self._kv_heads
            heads = qkv.view(len(x), -1, self._head_size)
            query, key, value = heads.split([heads.shape[1] - 2 * kv, kv, kv], 1)
            pages.cache.rope_and_write(
                index, positions, query, key, value, self._cos_sin, slots, **norms
            )
            out = pages.attend(index, query, layer.options)
        return self._sum(linear(out.flatten(1), layer.out, layer.out_bias))

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate_up = linear(x, layer.gate_up, layer.gate_up_bias)
        activated = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
        vllm_kernels.silu_and_mul(activated, gate_up)
        return self._sum(linear(activated, layer.down, layer.down_bias))

    def _sum(self, x: Tensor) -> Tensor:
        """Adds the parts of all ranks, in place."""
        if self._group is not None:
            all_reduce(x, group=self._group)
        return x

    @torch.inference_mode()
    def _rotary_table(self, max_length: int) -> Tensor:
        """Returns [max_length, rotated] with the model's cosines, then its sines."""
        positions = torch.arange(max_length, device=self._model.device)[None]
        like = torch.empty(0, dtype=self._pages.shape.dtype, device=self._model.device)
        cos, sin = self._model.model.rotary_emb(like, positions)
        half = cos.shape[-1] // 2
        return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).contiguous()


class _Norm(Protocol):
    weight: Tensor


class _Attention(Protocol):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    scaling: float


class _Mlp(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class _DecoderLayer(Protocol):
    """A decoder layer of the families. Qwen 3 also has ``self_attn.q_norm`` and ``k_norm``."""

    input_layernorm: _Norm
    post_attention_layernorm: _Norm
    self_attn: _Attention
    mlp: _Mlp


@dataclass
class _Layer:
    """Weights of one layer. Linear weights are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    options: AttentionOptions

    @classmethod
    def of(cls, layer: _DecoderLayer, window: int) -> _Layer:
        qkv, gate_up, (out,), (down,) = _projections(layer)
        attention = layer.self_attn
        return cls(
            layer.input_layernorm.weight.data,
            *_joined(qkv),
            _weight(getattr(attention, "q_norm", None)),
            _weight(getattr(attention, "k_norm", None)),
            *_data(out),
            layer.post_attention_layernorm.weight.data,
            *_joined(gate_up),
            *_data(down),
            AttentionOptions(scale=attention.scaling, sliding_window=window),
        )


def _weight(norm: _Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight.data


def _projections(layer: _DecoderLayer) -> list[list[nn.Linear]]:
    """Returns the linear layers of a decoder layer, grouped by input."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [mlp.gate_proj, mlp.up_proj],
        [attention.o_proj],
        [mlp.down_proj],
    ]


def _data(projection: nn.Linear) -> tuple[Tensor, Tensor | None]:
    bias = projection.bias
    weight = local_tensor(projection.weight).data
    return weight, None if bias is None else local_tensor(bias).data


def _joined(projections: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Joins weights and biases. The projections' own become views of the result."""
    joined: list[Tensor | None] = []
    for name in ("weight", "bias"):
        if getattr(projections[0], name) is None:
            joined.append(None)
            continue
        parts = [local_tensor(getattr(projection, name)) for projection in projections]
        whole = torch.cat([part.data for part in parts])
        for part, joined_slice in zip(parts, whole.split([len(part) for part in parts])):
            part.data = joined_slice
        joined.append(whole)
    weight, bias = joined
    assert weight is not None
    return weight, bias
