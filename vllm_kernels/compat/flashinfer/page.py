"""FlashInfer's writers of a paged cache with a table in CSR form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._types import KVCacheDType
from ...ops import reshape_and_cache_flash
from .._checks import check_tensors, wrong
from ._common import KvLayout, PagedKvCache, check_layout, split_cache

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

_NAMES: dict[torch.dtype, KVCacheDType] = {
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The tokens of each sequence of a table in CSR form.

    Args:
        kv_indptr: [batch_size + 1]. kv_last_page_len: [batch_size].

    Returns:
        [batch_size]. A sequence without pages has kv_last_page_len tokens, as in FlashInfer.

    Raises:
        RuntimeError: for tensors that torch cannot add, in its words.

    Example:
        >>> from vllm_kernels.compat.flashinfer import get_seq_lens
        >>> get_seq_lens(torch.tensor([0, 2, 3]), torch.tensor([4, 7]), 16)
        tensor([20,  7])

    Source: flashinfer.get_seq_lens.
    """
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int
) -> tuple[Tensor, Tensor]:
    """The sequence and the position of each new token, which are a sequence's last ones.

    Args:
        append_indptr: int32 or int64 [batch_size + 1], where each sequence's new tokens start.
        seq_lens: int32 or int64 [batch_size], with the new tokens.
        nnz: the number of new tokens, or more.

    Returns:
        Two int32 tensors [nnz] on the device of append_indptr. Tokens of no sequence have -1 in
        both; FlashInfer leaves them unset. Nothing waits for the GPU.

    Raises:
        InvalidArgument: for fewer sequences in seq_lens than in append_indptr.

    Example:
        >>> from vllm_kernels.compat.flashinfer import get_batch_indices_positions
        >>> get_batch_indices_positions(torch.tensor([0, 1, 3]), torch.tensor([5, 5]), 3)
        (tensor([0, 1, 1], dtype=torch.int32), tensor([4, 3, 4], dtype=torch.int32))

    Source: flashinfer.get_batch_indices_positions.
    """
    batch = len(append_indptr) - 1
    if len(seq_lens) < batch:
        raise wrong("get_batch_indices_positions", "seq_lens", f"shape [{batch}]", seq_lens)
    tokens = torch.arange(nnz, dtype=append_indptr.dtype, device=append_indptr.device)
    rows = torch.searchsorted(append_indptr, tokens, right=True) - 1
    # One row more: that of the tokens before the first sequence (-1) and after the last one.
    lens = seq_lens[:batch].to(tokens.device, non_blocking=tokens.is_cuda)
    shifts = pad(lens - append_indptr[1:], (0, 1))
    positions = shifts[rows] + tokens
    unowned = (rows < 0) | (rows == batch)
    return rows.int().masked_fill_(unowned, -1), positions.int().masked_fill_(unowned, -1)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedKvCache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: KvLayout = "NHD",
) -> None:
    """Writes new tokens into their pages, which the table has already.

    A token is left out if it has no place in the table: its sequence is not one of batch_size, or
    its position is negative or past the sequence's pages. Nothing waits for the GPU.

    Args:
        append_key, append_value: [tokens, num_kv_heads, head_dim].
        batch_indices, positions: int32 or int64 [tokens], the sequence of each token and its
            position there.
        paged_kv_cache: [pages, 2, ...] or (keys, values), written; see kv_layout. An fp8 cache
            stores the rounded values.
        kv_indices, kv_indptr: the pages of the table in CSR form, int32 or int64.
        kv_last_page_len: ignored.
        kv_layout: "NHD" or "HND".

    Raises:
        InvalidArgument: for tensors that do not fit, by name.
        InvalidIndex: for a page of kv_indices outside the cache, on a CPU. Page -1 may be skipped.

    Example:
        >>> from vllm_kernels.compat.flashinfer import append_paged_kv_cache
        >>> ints = lambda *x: torch.tensor(x, dtype=torch.int32)
        >>> cache, token = torch.zeros(8, 2, 16, 1, 64), torch.ones(1, 1, 64)
        >>> append_paged_kv_cache(
        ...     token, token, ints(0), ints(19), cache, ints(3, 5), ints(0, 2), ints(4))
        >>> cache[5, :, 3].sum().item()  # position 19: the fourth token of the second page
        128.0

    Source: flashinfer.append_paged_kv_cache.
    """
    name = "append_paged_kv_cache"
    check_layout(name, kv_layout)
    check_tensors(
        name, append_key=append_key, append_value=append_value, batch_indices=batch_indices,
        positions=positions, kv_indices=kv_indices, kv_indptr=kv_indptr,
    )  # fmt: skip
    keys, values = split_cache(name, paged_kv_cache)
    if kv_layout == "HND":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    page = keys.shape[1]
    batch = len(kv_indptr) - 1
    if batch < 1 or not len(kv_indices):
        return  # no place for any token
    row = batch_indices.long().clamp(0, batch - 1)
    places = kv_indptr[row] + positions // page
    inside = places.clamp(0, len(kv_indices) - 1)
    fits = (row == batch_indices) & (positions >= 0)
    fits &= (places == inside) & (places < kv_indptr[row + 1])
    slots = torch.where(fits, kv_indices[inside].long() * page + positions % page, -1)
    one = torch.ones(1, device=append_key.device)
    stored = _NAMES.get(keys.dtype, "auto")
    reshape_and_cache_flash(append_key, append_value, keys, values, slots, stored, one, one)
