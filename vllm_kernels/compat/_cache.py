"""The KV cache of flash_attn_with_kvcache: its pages, and the tokens that a call appends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._types import KVCacheDType
from ..errors import InvalidArgument
from ..ops import reshape_and_cache_flash, rotary_embedding
from ._checks import check_page_ids, check_pages, wrong
from ._options import Options
from ._rows import int32, int32_table, rows_contiguous, token_seqs


@dataclass
class Pages:
    key: Tensor  # [blocks, page, Hk, D]
    value: Tensor
    table: Tensor  # [batch, width] int32


def pages_of(
    function: str,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    batch: int,
    table_name: str,
) -> tuple[Pages, Pages]:
    """As it is written, and as it is read.

    A cache [batch_cache, length, Hk, D] is written as pages of ``length`` tokens, and read, from
    the padding on, as pages of as many tokens as the kernels have and its strides let.
    """
    if block_table is not None:
        for name, value in (
            ("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad),
        ):  # fmt: skip
            if value is not None:
                raise InvalidArgument(f"{function}: {name}: expected None with a block table")
        check_pages(function, k_cache, "k_cache", block_table, table_name, batch)
        pages = Pages(k_cache, v_cache, int32_table(block_table))
        return pages, pages
    rows, length = k_cache.shape[:2]
    if cache_batch_idx is None and rows < batch:
        want = f"{batch} rows or more, one for each sequence of q"
        raise wrong(function, "k_cache", want, k_cache)
    if length == 0:
        raise wrong(function, "k_cache", "rows of at least one token", k_cache)
    row = _row_tokens(function, k_cache, v_cache)
    page = 1 if cache_leftpad is not None else 256
    while length % page or row % page:  # torch.compile traces it, and no gcd
        page //= 2
    blocks = ((rows - 1) * row + length) // page if rows else 0
    views = [
        cache.as_strided(
            (blocks, page, *cache.shape[2:]), (page * cache.stride(1), *cache.stride()[1:])
        )
        for cache in (k_cache, v_cache)
    ]  # fmt: skip
    device = k_cache.device
    index = cache_batch_idx
    if index is None:
        index = torch.arange(batch, dtype=torch.int32, device=device)
    first = index.int() * (row // page)
    if cache_leftpad is not None:
        first = first + cache_leftpad.int()
    columns = torch.arange(length // page, dtype=torch.int32, device=device)
    target = Pages(k_cache, v_cache, index.int()[:, None])
    return target, Pages(views[0], views[1], first[:, None] + columns)


def _row_tokens(function: str, k_cache: Tensor, v_cache: Tensor) -> int:
    """Tokens from one row of both caches [rows, length, Hk, D] to the next."""
    rows, length = k_cache.shape[:2]
    steps = []
    for cache in (k_cache, v_cache):
        row, token = cache.stride()[:2]
        if rows > 1 and row % token != 0:
            raise InvalidArgument(
                f"{function}: expected caches whose rows are whole numbers of tokens apart, got "
                f"strides {list(cache.stride())}"
            )
        steps.append(row // token if rows > 1 else length)
    if steps[0] != steps[1]:
        raise InvalidArgument(f"{function}: expected k_cache and v_cache with like strides")
    return steps[0]


def lengths_of(
    cache_seqlens: int | Tensor | None, length: int, batch: int, device: torch.device
) -> Tensor:
    """[batch] int32."""
    if cache_seqlens is None:
        cache_seqlens = length
    if isinstance(cache_seqlens, int):
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    return int32(cache_seqlens)


@dataclass
class NewTokens:
    """Tokens that a call puts behind what the cache holds."""

    key: Tensor  # [tokens, Hk, D]
    value: Tensor
    counts: Tensor  # [batch] int32
    seqs: Tensor | None = None  # [tokens] int64, the sequence of each; None: one a sequence
    index: Tensor | None = None  # [tokens] int64, its number among the sequence's new ones

    def positions(self, lengths: Tensor) -> Tensor:
        """[tokens], behind lengths [batch]."""
        if self.seqs is None or self.index is None:
            return lengths
        return lengths[self.seqs] + self.index


def new_tokens(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> NewTokens:
    """k, v [batch, tokens, Hk, D], or with cu_seqlens [tokens, Hk, D]."""
    device = k.device
    if cu_seqlens is None:
        batch, count = k.shape[:2]
        counts = torch.full((batch,), count, dtype=torch.int32, device=device)
        key, value = k.flatten(0, 1), v.flatten(0, 1)
        if count == 1:
            return NewTokens(key, value, counts)
        seqs = torch.arange(batch, dtype=torch.int64, device=device).repeat_interleave(
            count, output_size=batch * count
        )
        index = torch.arange(count, dtype=torch.int64, device=device).repeat(batch)
        return NewTokens(key, value, counts, seqs, index)
    starts = int32(cu_seqlens)
    seqs = token_seqs(starts, k.shape[0])
    tokens = torch.arange(k.shape[0], dtype=torch.int64, device=device)
    return NewTokens(k, v, starts.diff(), seqs, tokens - starts[seqs])


def _slots(new: NewTokens, pages: Pages, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens go, -1: nowhere; and which sequences are no paddings (see append())."""
    page, width = pages.key.shape[1], pages.table.shape[1]
    ends = lengths if new.seqs is None else lengths.add(new.counts < 1, alpha=-1)
    ends = ends.clamp_min(0) // page
    first = pages.table.gather(1, ends.clamp_max(width - 1)[:, None])[:, 0]
    real = (lengths >= 0) & (first >= 0) & (ends < width)
    position = new.positions(lengths)
    if new.seqs is None or new.index is None:
        block, good = first.long(), real
    else:
        column = position // page
        block = pages.table[new.seqs, column.clamp(0, width - 1)].long()
        good = real[new.seqs] & (block >= 0) & (column < width)
        good &= new.index < new.counts[new.seqs]
    return torch.where(good, block * page + position % page, -1), real


def append(
    new: NewTokens,
    pages: Pages,
    lengths: Tensor,
    options: Options,
    table_name: str,
    longest: int,
) -> Tensor:
    """Writes the tokens to their pages; the sequences' lengths with them, 0 where a row is padded.

    ``longest``: query tokens of a sequence, at most.

    A row is padded where its length is negative or its table has no page for the first new token,
    or where none is new for the last one: behind that the table may end.
    """
    lengths = lengths.long()
    slots, real = _slots(new, pages, lengths)
    total = torch.where(real, lengths + new.counts, 0)
    left = options.sides()[0]
    check_page_ids(
        options.function, table_name, pages.table, total,
        longest + left if left >= 0 else None, pages.key.shape[1], pages.key.shape[0],
    )  # fmt: skip
    key, value = rows_contiguous(new.key), rows_contiguous(new.value)
    key_cache, value_cache, stored = pages.key, pages.value, pages.key.dtype
    if key.dtype == stored and stored.itemsize == 1:  # nothing to divide: pairs of bytes
        key, value, key_cache, value_cache = (
            x.view(torch.bfloat16) for x in (key, value, key_cache, value_cache)
        )
        stored = torch.bfloat16
    name: dict[torch.dtype, KVCacheDType] = {
        torch.float8_e4m3fn: "fp8_e4m3",
        torch.float8_e5m2: "fp8_e5m2",
        torch.int8: "int8",
    }
    one = torch.ones(1, dtype=torch.float32, device=key.device)
    scales = [one, one]
    if stored in name:
        heads = pages.key.shape[2]
        scales = [
            (one if scale is None else scale.float().reshape(-1)[:heads]).expand(heads).contiguous()
            for scale in (options.k_descale, options.v_descale)
        ]
    kind = name.get(stored, "auto")
    reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, scales[0], scales[1])
    return total.int()


def rotated(rows: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """A copy of rows [tokens, heads, D], turned by table [positions, rotary_dim], cosines then
    sines. Positions past the table are those of rows that are left out."""
    rows = rows.clone(memory_format=torch.contiguous_format)
    rotary_embedding(
        positions.clamp(0, table.shape[0] - 1), rows.flatten(1), None, rows.shape[-1],
        table.to(rows.dtype), not interleaved,
    )  # fmt: skip
    return rows
