"""The norm, rotary and activation kernels in Llama-like models of transformers, for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import vllm_kernels

from ..errors import Unsupported

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Model types that are served, and how the names of their classes begin."""

_ROTARY = "apply_rotary_pos_emb"
_TABLE = "vllm_kernels_table"  # attribute by which the layers of one pass share a rotary table


@contextmanager
def patched_layers(model: PreTrainedModel) -> Iterator[None]:
    """While open, ``model`` computes RMSNorm, rotary embedding and SwiGLU with rms_norm,
    rotary_embedding and silu_and_mul.

    Norms and MLPs are patched on this model alone. transformers holds the rotary embedding as one
    function for all models of a class, so that one is replaced for all of them while it is open.

    Args:
        model: of a type in FAMILIES, not patched already.

    Raises:
        NotImplementedError: a model type that is not in FAMILIES, or an activation but SiLU.

    Example:
        >>> from pathlib import Path
        >>> from transformers import AutoModelForCausalLM
        >>> from vllm_kernels.integrations.transformers import patched_layers
        >>> folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        >>> with patched_layers(model), torch.no_grad():
        ...     model(torch.tensor([[1, 2, 3]])).logits.shape[:2]
        torch.Size([1, 3])
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise Unsupported(
            f"patched_layers: model type: expected one of {', '.join(FAMILIES)}, "
            f"got {config.model_type}"
        )
    if config.hidden_act != "silu":
        raise Unsupported(f"patched_layers: hidden_act: expected silu, got {config.hidden_act}")
    modeling = sys.modules[type(model).__module__]
    family = FAMILIES[config.model_type]
    forwards = {
        getattr(modeling, f"{family}RMSNorm"): _rms_norm,
        getattr(modeling, f"{family}MLP"): _swiglu,
    }
    patched: list[nn.Module] = []
    rotary = getattr(modeling, _ROTARY)
    try:
        setattr(modeling, _ROTARY, _rotary_embedding)
        for module in model.modules():
            forward = forwards.get(type(module))
            if forward is None:
                continue
            if "forward" in vars(module):
                raise Unsupported("patched_layers: the model's layers are patched already")
            module.forward = MethodType(forward, module)
            patched.append(module)
        yield
    finally:
        setattr(modeling, _ROTARY, rotary)
        for module in patched:
            del module.forward


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """In place of an RMSNorm's forward."""
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    vllm_kernels.rms_norm(out, hidden_states, self.weight, self.variance_epsilon)
    return out


def _swiglu(self: Any, hidden_states: Tensor) -> Tensor:
    """In place of an MLP's forward. The op takes gate and up in one tensor, hence the cat."""
    gate_up = torch.cat([self.gate_proj(hidden_states), self.up_proj(hidden_states)], -1)
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    vllm_kernels.silu_and_mul(out, gate_up)
    return self.down_proj(out)


def _rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """In place of apply_rotary_pos_emb: rotates query and key, and does so in place.

    Args:
        query: [batch, heads, columns, head_size], a transposed view of [batch, columns, ...].
        key: [batch, kv_heads, columns, head_size], likewise.
        cos, sin: [batch or 1, columns, head_size], both halves equal.
    """
    if unsqueeze_dim != 1:
        raise Unsupported(f"rotary: unsqueeze_dim: expected 1, got {unsqueeze_dim}")
    batch, _, columns, head_size = query.shape
    query = query.transpose(1, 2).contiguous()
    key = key.transpose(1, 2).contiguous()
    table = getattr(cos, _TABLE, None)  # every layer of a pass is given the same cos
    if table is None:
        half = cos.shape[-1] // 2
        halves = torch.cat([cos[..., :half], sin[..., :half]], -1)
        rows = halves.expand(batch, columns, -1).flatten(0, 1).contiguous()
        table = torch.arange(len(rows), device=rows.device), rows  # each token has a row
        setattr(cos, _TABLE, table)
    positions, cos_sin_cache = table
    vllm_kernels.rotary_embedding(
        positions, query.view(len(positions), -1), key.view(len(positions), -1), head_size,
        cos_sin_cache, True,
    )  # fmt: skip
    return query.transpose(1, 2), key.transpose(1, 2)
