"""FlashInfer's merges of attention over disjoint sets of keys. Log-sum-exps are in base 2."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InvalidArgument
from ...ops import combine_attn_partials
from .._checks import check_tensors
from ._common import LN2

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys together.

    Args:
        v_a, v_b: [seq_len, num_heads, head_dim].
        s_a, s_b: float32 [seq_len, num_heads], log-sum-exp in base 2.

    Returns:
        The merged v and s, of the same shapes.

    Raises:
        InvalidArgument: for tensors that do not fit each other, by name.

    Example:
        >>> from vllm_kernels.compat.flashinfer import merge_state
        >>> zeros, ones, s = torch.zeros(1, 1, 8), torch.ones(1, 1, 8), torch.zeros(1, 1)
        >>> v, s = merge_state(zeros, s, ones, s)
        >>> v[0, 0, 0].item(), s.item()
        (0.5, 1.0)

    Source: flashinfer.merge_state.
    """
    check_tensors("merge_state", v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    for name, x, like in (("v_b", v_b, v_a), ("s_b", s_b, s_a)):
        if x.shape != like.shape:
            raise InvalidArgument(
                f"merge_state: {name}: expected shape {list(like.shape)}, got {list(x.shape)}"
            )
    return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """:func:`merge_state` into v and s.

    Args:
        v, v_other: [seq_len, num_heads, head_dim]; v is written.
        s, s_other: float32 [seq_len, num_heads]; s is written.
        mask: bool [seq_len]: the tokens to merge; None: all.

    Raises:
        InvalidArgument: for tensors that do not fit each other, by name.

    Example:
        >>> from vllm_kernels.compat.flashinfer import merge_state_in_place
        >>> v, s = torch.zeros(1, 1, 8), torch.zeros(1, 1)
        >>> merge_state_in_place(v, s, torch.ones(1, 1, 8), torch.zeros(1, 1))
        >>> v[0, 0, 0].item()
        0.5

    Source: flashinfer.merge_state_in_place.
    """
    merged, sums = merge_state(v, s, v_other, s_other)
    if mask is not None:
        chosen = mask.bool()[:, None]
        merged, sums = torch.where(chosen[..., None], merged, v), torch.where(chosen, sums, s)
    v.copy_(merged)
    s.copy_(sums)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over any number of disjoint sets of keys together.

    Args:
        v: [seq_len, num_states, num_heads, head_dim].
        s: float32 [seq_len, num_states, num_heads], log-sum-exp in base 2.

    Returns:
        v [seq_len, num_heads, head_dim] and s [seq_len, num_heads].

    Raises:
        InvalidArgument: for tensors that do not fit each other, by name.

    Example:
        >>> from vllm_kernels.compat.flashinfer import merge_states
        >>> v, s = merge_states(torch.ones(2, 4, 1, 8), torch.zeros(2, 4, 1))
        >>> s[0].item()
        2.0

    Source: flashinfer.merge_states.
    """
    check_tensors("merge_states", v=v, s=s)
    if v.dim() != 4 or s.shape != v.shape[:3]:
        raise InvalidArgument(
            f"merge_states: s: expected the shape of v without its last dimension of 4, got "
            f"{list(s.shape)} with v {list(v.shape)}"
        )
    out = v.new_empty(v.shape[0], *v.shape[2:])
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=v.device)
    parts = (s.float() * LN2).transpose(0, 1).contiguous()
    combine_attn_partials(out, v.transpose(0, 1), parts, lse)
    return out, lse.div_(LN2)
