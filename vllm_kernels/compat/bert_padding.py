"""``flash_attn.bert_padding``: padded batches to packed tokens and back, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import check_tensors

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """rows [n, ...], indices [m] -> [m, ...].

    Raises:
        IndexError: for an index outside of rows.
        InvalidType: for what is no tensor.

    Example:
        >>> index_first_axis(torch.tensor([5, 6, 7]), torch.tensor([2, 0]))
        tensor([7, 5])
    """
    check_tensors("index_first_axis", rows=rows, indices=indices)
    return rows[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """values [m, ...] at indices [m] of zeros [first_axis_dim, ...].

    Raises:
        IndexError: for an index outside of the result.
        InvalidType: for what is no tensor.

    Example:
        >>> index_put_first_axis(torch.tensor([7, 5]), torch.tensor([2, 0]), 3)
        tensor([5, 0, 7])
    """
    check_tensors("index_put_first_axis", values=values, indices=indices)
    out = values.new_zeros(first_axis_dim, *values.shape[1:])
    out[indices] = values
    return out


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """hidden_states [B, S, ...], attention_mask [B, S] (1: a token) -> packed tokens [T, ...].

    Returns (tokens, indices [T] into B * S, cu_seqlens [B + 1] int32, longest sequence, tokens a
    sequence [B] int32 without those of unused_mask, which are kept among the packed ones).

    Raises:
        RuntimeError: for masks of another shape than above.
        InvalidType: for what is no tensor.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> tokens, indices, starts, longest, used = unpad_input(torch.arange(6).view(2, 3), mask)
        >>> tokens, starts, longest
        (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32), 2)
    """
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    check_tensors("unpad_input", hidden_states=hidden_states, **masks)
    all_masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    lens = all_masks.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(all_masks.flatten(), as_tuple=False).flatten()
    starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lens.max()) if lens.numel() else 0
    return hidden_states.flatten(0, 1)[indices], indices, starts, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens [T, ...] -> [batch, seqlen, ...], zeros between.

    Raises:
        IndexError: for an index outside of the result.
        InvalidType: for what is no tensor.

    Example:
        >>> pad_input(torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3]), 2, 3)
        tensor([[7, 8, 0],
                [9, 0, 0]])
    """
    check_tensors("pad_input", hidden_states=hidden_states, indices=indices)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )
