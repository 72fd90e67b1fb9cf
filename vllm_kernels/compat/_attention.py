"""What the spellings of FlashAttention's functions have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..errors import Error, InvalidArgument
from ..ops import paged_attention, varlen_attention
from ..ops._common import empty_out, inference_only
from ..ops._refusals import renamed
from ._cache import NewTokens, append, lengths_of, new_tokens, pages_of, rotated
from ._checks import (
    check_alike,
    check_given_integers,
    check_integers,
    check_lengths,
    check_new,
    check_pages,
    check_places,
    check_rotary,
    check_rows,
    check_shapes,
    check_tensors,
    sequences,
    size_step,
    wrong,
)
from ._options import Options, floats, row_of
from ._rows import int32, int32_table, rows_contiguous, token_seqs

_SCORES = {
    "query": "q", "query_start_loc": "cu_seqlens_q", "max_query_len": "max_seqlen_q",
    "scale": "softmax_scale", "sinks": "s_aux", "q_scale": "q_descale", "k_scale": "k_descale",
    "v_scale": "v_descale",
}  # fmt: skip
"""What FlashAttention calls arguments of our ops."""
_RAGGED = _SCORES | {"key": "k", "value": "v", "key_start_loc": "cu_seqlens_k"}
_PAGES = _SCORES | {"key_cache": "k", "value_cache": "v", "block_tables": "block_table"}


def _query_and_scale(
    query: Tensor, keys: Tensor, values: Tensor, descale: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What the ops take for a query [tokens, heads, head_size]: itself, or bfloat16 for an 8-bit
    one with other keys or with descales of its own for each sequence.

    starts: of the sequences in query; None: they have one token each.
    """
    if query.dtype.itemsize != 1:
        return query, None
    if descale is not None and descale.dim() < 2:
        descale = descale.reshape(1, -1)
    whole = descale is None or descale.shape[0] == 1 or descale.stride(0) == 0
    if whole and len(query) and query.dtype == keys.dtype == values.dtype == torch.float8_e4m3fn:
        return query, None if descale is None else floats(row_of(descale))
    rows = query.float()
    if descale is not None:
        per_token = descale[:1] if whole else descale
        if not whole and starts is not None:
            per_token = descale[token_seqs(starts, len(query))]
        group = query.shape[1] // descale.shape[1]
        rows = rows * per_token.float().repeat_interleave(group, dim=1)[..., None]
    return rows.bfloat16(), None


def _contiguous_heads(query: Tensor) -> Tensor:
    heads = query.shape[1] == 1 or query.stride(1) == query.shape[2]
    return query if query.stride(2) == 1 and heads else query.contiguous()


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    options: Options,
    seqused_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """q [T, H, D], k [Tk, Hk, D], v [Tk, Hk, Dv] -> (out [T, H, Dv], lse [H, T]); with a
    block_table [B, width] k and v are pages [blocks, page, Hk, D]."""
    name = options.function
    check_tensors(name, q=q, k=k, v=v)
    check_integers(name, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_given_integers(name, seqused_k=seqused_k, block_table=block_table)
    if max_seqlen_q is None:
        raise _no_longest(name, "max_seqlen_q")
    pages = "" if block_table is None else "num_blocks, page_size"
    check_shapes(name, q, k, v, 3, pages)
    batch = sequences(name, cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    cu_seqlens_q, cu_seqlens_k = int32(cu_seqlens_q), int32(cu_seqlens_k)
    if block_table is not None:
        check_pages(name, k, "k", block_table, "block_table", batch)
        table, lens = int32_table(block_table), cu_seqlens_k.diff()
        words = _PAGES | {"seq_lens": "cu_seqlens_k.diff()"}
        out, lse = paged(q, k, v, table, lens, cu_seqlens_q, max_seqlen_q, options, words)
    elif seqused_k is None:
        out, lse = ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options)
    else:
        if max_seqlen_k is None:
            raise _no_longest(name, "max_seqlen_k")
        check_rows(name, batch, seqused_k=seqused_k)
        # Of each sequence's keys only the first: pages of one token.
        first = cu_seqlens_k[:-1, None]
        table = first + torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
        value_size = v.shape[-1]
        options = replace(options, scale=options.score_scale(q))  # before it is padded
        q, k, v = (rows_contiguous(rows) for rows in _of_one_size(q, k, v))
        words = _PAGES | {"seq_lens": "seqused_k", "block_tables": "max_seqlen_k"}
        out, lse = paged(
            q, k[:, None], v[:, None], table, int32(seqused_k), cu_seqlens_q, max_seqlen_q, options,
            words,
        )  # fmt: skip
        out = _first(out, value_size)
    return out, _by_head(lse)


def _no_longest(function: str, name: str) -> InvalidArgument:
    return InvalidArgument(f"{function}: {name}: expected the longest sequence's tokens, got None")


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    options: Options,
) -> tuple[Tensor, Tensor | None]:
    """:func:`varlen` of shapes that were checked, and int32 starts, but lse [T, H]."""
    longest = None
    # A compiled function would have a version for each length.
    if type(max_seqlen_k) is int and max_seqlen_k > 0 and not is_compiling():
        longest = min(max_seqlen_k, k.shape[0])
    inference_only(options.function, q, k, v)
    options.check(cu_seqlens_q.numel() - 1, q.shape[1], k.shape[1])
    q, q_scale = _query_and_scale(q, k, v, options.q_descale, cu_seqlens_q)
    scale = options.score_scale(q)  # before it is padded
    value_size = v.shape[-1]
    q, k, v = _of_one_size(q, k, v)
    q, k, v = _contiguous_heads(q), rows_contiguous(k), rows_contiguous(v)
    calls = list(options.rows(cu_seqlens_q.numel() - 1))
    shared = None if len(calls) == 1 else empty_out(q).zero_()
    results = []
    sinks, window = floats(options.sinks), options.sides()
    starts_q, starts_k = cu_seqlens_q, cu_seqlens_k
    for rows, mine in calls:
        if rows is not None:
            ends = slice(rows.start, rows.stop + 1)
            starts_q, starts_k = cu_seqlens_q[ends], cu_seqlens_k[ends]
        k_scale, v_scale = _scales(k, mine)
        try:
            result = varlen_attention(
                q, k, v, starts_q, starts_k, scale=scale, causal=False, window=window,
                alibi_slopes=mine["alibi_slopes"], softcap=options.softcap, sinks=sinks,
                k_scale=k_scale, v_scale=v_scale, max_query_len=int(max_seqlen_q),
                max_key_len=longest, out=shared, return_lse=options.returns_lse,
                q_scale=q_scale,
            )  # fmt: skip
        except Error as error:
            raise renamed(error, options.function, _RAGGED) from None
        results.append(result)
    out, lse = _of_all(results, shared, cu_seqlens_q)
    return _first(out, value_size), lse


def _of_all(
    results: list[Tensor | tuple[Tensor, Tensor]], shared: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """out and lse of one call, or of several that share `out`."""
    outs = [result[0] if isinstance(result, tuple) else result for result in results]
    lses = [result[1] for result in results if isinstance(result, tuple)]
    return outs[0] if shared is None else shared, _whole(lses, starts) if lses else None


def _of_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """With a head size that the kernels have, one for K and V: zeros change no product."""
    step = size_step(k)
    padded = max(32, -(-max(q.shape[-1], v.shape[-1]) // step) * step)
    if q.shape[-1] == v.shape[-1] == padded:  # as k has q's
        return q, k, v
    return tuple(_padded(rows, padded) for rows in (q, k, v))


def _padded(rows: Tensor, head_size: int) -> Tensor:
    missing = head_size - rows.shape[-1]
    if missing == 0:
        return rows
    if rows.dtype.itemsize == 1:  # torch pads no float8
        return torch.nn.functional.pad(rows.view(torch.uint8), (0, missing)).view(rows.dtype)
    return torch.nn.functional.pad(rows, (0, missing))


def _first(rows: Tensor, head_size: int) -> Tensor:
    """Without the padding."""
    return rows if rows.shape[-1] == head_size else rows[..., :head_size]


def _whole(lses: list[Tensor], starts: Tensor | None) -> Tensor:
    """[T, H] of all calls. Without starts a call has its own sequences' rows, else all rows, of
    which those of its sequence count."""
    if len(lses) == 1:
        return lses[0]
    if starts is None:
        return torch.cat(lses)
    seqs, whole = token_seqs(starts, len(lses[0]))[:, None], lses[0]
    for seq, lse in enumerate(lses):
        whole = torch.where(seqs == seq, lse, whole)
    return whole


def _by_head(lse: Tensor | None) -> Tensor | None:
    """[T, H] -> [H, T]."""
    return None if lse is None else lse.t().contiguous()


def _by_batch(
    out: Tensor, lse: Tensor | None, batch: int, length: int
) -> tuple[Tensor, Tensor | None]:
    """out [B * S, H, D], lse [B * S, H] -> [B, S, H, D], [B, H, S]."""
    out = out.view(batch, length, *out.shape[1:])
    if lse is not None:
        lse = lse.view(batch, length, lse.shape[1]).transpose(1, 2).contiguous()
    return out, lse


def _scales(keys: Tensor, given: dict[str, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """Of keys [.., Hk, D] and values, for 8-bit ones: as many elements of both."""
    if keys.dtype.itemsize != 1:
        return None, None
    key, value = given["k_scale"], given["v_scale"]
    if key is not None and value is not None and key.numel() != value.numel():
        key, value = (scale.expand(keys.shape[-2]).contiguous() for scale in (key, value))
    return key, value


def paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    options: Options,
    words: Mapping[str, str],
) -> tuple[Tensor, Tensor | None]:
    """q [T, H, D], pages [blocks, page, Hk, D] -> (out [T, H, D], lse [T, H]). words: what the
    caller calls the arguments of :func:`paged_attention`."""
    inference_only(options.function, q, k_cache, v_cache)
    batch = seq_lens.numel()
    options.check(batch, q.shape[1], k_cache.shape[2])
    q, q_scale = _query_and_scale(q, k_cache, v_cache, options.q_descale, cu_seqlens_q)
    q = _contiguous_heads(q)
    calls = list(options.rows(batch))
    shared = None if len(calls) == 1 else empty_out(q).zero_()
    results = []
    sinks = floats(options.sinks)
    left, right = options.sides()
    for rows, mine in calls:
        query, out = q, shared
        tables, lens, starts = table, seq_lens, cu_seqlens_q
        if rows is not None:
            tables, lens = table[rows], seq_lens[rows]
            if cu_seqlens_q is not None:
                starts = cu_seqlens_q[rows.start : rows.stop + 1]
            elif shared is not None:
                query, out = q[rows], shared[rows]
        if right == 0 and starts is not None and q.device.type == "cpu":
            tables, lens, starts = _apart_from_negative(tables, lens, starts)
        k_scale, v_scale = _scales(k_cache, mine)
        try:
            result = paged_attention(
                query, k_cache, v_cache, tables, lens, scale=options.score_scale(q),
                query_start_loc=starts, max_query_len=int(max_seqlen_q),
                alibi_slopes=mine["alibi_slopes"], sliding_window=left + 1, softcap=options.softcap,
                sinks=sinks, k_scale=k_scale, v_scale=v_scale, layout="NHD", out=out,
                return_lse=options.returns_lse, causal=False, window_right=right, q_scale=q_scale,
            )  # fmt: skip
        except Error as error:
            raise renamed(error, options.function, words) from None
        results.append(result)
    return _of_all(results, shared, cu_seqlens_q)


def _apart_from_negative(tables: Tensor, lens: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    """block_tables, seq_lens and query_start_loc in which query tokens of negative positions belong
    to sequences of length 0. FlashAttention gives them 0, and a CPU op refuses them."""
    first, excess = starts[:-1], (starts.diff() - lens).clamp_min(0)
    if not is_compiling() and not excess.any():
        return tables, lens, starts
    starts = torch.cat([torch.stack([first, first + excess], 1).flatten(), starts[-1:]])
    lens = torch.stack([torch.zeros_like(lens), lens], 1).flatten()
    return tables.repeat_interleave(2, 0), lens, starts


def _even_starts(batch: int, length: int, device: torch.device) -> Tensor:
    """[batch + 1] int32, of sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def _check_new_given(
    name: str, k: Tensor | None, v: Tensor | None, cache_seqlens: int | Tensor | None
) -> None:
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise InvalidArgument(f"{name}: {missing}: expected k and v together, got None")
    if k is not None:
        check_tensors(name, k=k, v=v)
        if cache_seqlens is None:
            raise InvalidArgument(
                f"{name}: cache_seqlens: expected what the cache holds before k and v, got None"
            )


def _query_starts(
    name: str,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    starts_new: Tensor | None,
    max_len: int | None,
) -> tuple[int, Tensor | None, int]:
    """Sequences, their starts (None: one token each), and a bound on their lengths."""
    if cu_seqlens_q is not None:
        batch = sequences(name, cu_seqlens_q, cu_seqlens_k_new=starts_new)
        return batch, int32(cu_seqlens_q), max_len or q.shape[0]
    batch, length = q.shape[:2]
    return batch, None if length == 1 else _even_starts(batch, length, q.device), length


def _rotate(
    new: NewTokens,
    tokens: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    rotary: list[Tensor],
    interleaved: bool,
    options: Options,
) -> Tensor:
    """Rotates the new keys, and returns the rotated query tokens [T, H, D]. lengths: before."""
    before, table = lengths.long().clamp_min(0), torch.cat(rotary, dim=-1)
    new.key = rotated(new.key, new.positions(before), table, interleaved)
    position = before
    if starts is not None:
        seqs = token_seqs(starts, tokens.shape[0])
        position = before[seqs]
        if options.causal or options.sides() != (-1, -1):
            index = torch.arange(tokens.shape[0], dtype=torch.int64, device=tokens.device)
            position = position + index - starts[seqs]
    return rotated(tokens, position, table, interleaved)


def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary: tuple[Tensor | None, Tensor | None],
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    options: Options,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    table_name: str = "block_table",
) -> tuple[Tensor, Tensor | None]:
    """q [B, S, H, D] -> (out like q, lse [B, H, S]); with cu_seqlens_q q [T, H, D], lse [H, T]."""
    name = options.function
    check_tensors(name, q=q, k_cache=k_cache, v_cache=v_cache)
    _check_new_given(name, k, v, cache_seqlens)
    if isinstance(cache_seqlens, Integral):
        cache_seqlens = int(cache_seqlens)
        if cache_seqlens < 0:
            raise InvalidArgument(
                f"{name}: cache_seqlens: expected a length >= 0, got {cache_seqlens}"
            )
    check_given_integers(
        name, cache_seqlens=None if isinstance(cache_seqlens, int) else cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        **{table_name: block_table}, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
    )  # fmt: skip
    packed = cu_seqlens_q is not None
    lead = "batch_cache, seqlen_cache" if block_table is None else "num_blocks, page_size"
    check_shapes(name, q, k_cache, v_cache, 3 if packed else 4, lead, ("k_cache", "v_cache"))
    tokens = q if packed else q.flatten(0, 1)
    starts_new = cu_seqlens_k_new if packed and k is not None else None
    batch, starts, longest = _query_starts(name, q, cu_seqlens_q, starts_new, max_seqlen_q)
    check_rows(
        name, batch, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )  # fmt: skip
    target, pages = pages_of(
        name, k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad, batch, table_name
    )
    if k is not None and v is not None:
        check_new(name, k, v, batch, starts_new is not None, k_cache, options)
        if block_table is not None and block_table.shape[1] == 0:
            raise wrong(name, table_name, "pages for k and v", block_table)
        # What the attention would refuse, before a token is written.
        inference_only(name, q, k_cache, v_cache, k, v)
        check_alike(
            name, q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            alibi_slopes=options.alibi_slopes, s_aux=options.sinks, **{table_name: block_table},
        )  # fmt: skip
        options.check(batch, tokens.shape[1], k_cache.shape[2])
    capacity = pages.table.shape[1] * pages.key.shape[1]
    tables = check_rotary(name, rotary, k, q.shape[-1], capacity)
    check_places(name, cache_batch_idx, cache_leftpad, k_cache)
    lengths = lengths_of(cache_seqlens, capacity, batch, q.device)
    new = None if k is None or v is None else new_tokens(k, v, starts_new)
    check_lengths(name, lengths, None if new is None else new.counts, pages.table, capacity)
    if new is not None:
        if tables:
            tokens = _rotate(new, tokens, starts, lengths, tables, rotary_interleaved, options)
        lengths = append(new, target, lengths, options, table_name, longest)
    else:
        lengths = lengths.clamp_min(0)
    if cache_leftpad is not None:
        lengths = (lengths - cache_leftpad).clamp_min(0).int()
    words = _SCORES | {
        "key_cache": "k_cache", "value_cache": "v_cache", "seq_lens": "cache_seqlens",
        "block_tables": table_name,
    }  # fmt: skip
    out, lse = paged(
        tokens, pages.key, pages.value, pages.table, lengths, starts, longest, options, words
    )
    return (out, _by_head(lse)) if packed else _by_batch(out, lse, batch, longest)


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor | None]:
    """q [B, S, H, D], k, v [B, Sk, Hk, D] -> (out [B, S, H, Dv], lse [B, H, S])."""
    check_tensors(options.function, q=q, k=k, v=v)
    check_shapes(options.function, q, k, v, rank=4)
    (batch, length), keys = q.shape[:2], k.shape[1]
    starts = [_even_starts(batch, count, q.device) for count in (length, keys)]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = ragged(rows[0], rows[1], rows[2], starts[0], starts[1], length, keys, options)
    return _by_batch(out, lse, batch, length)
