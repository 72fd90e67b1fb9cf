"""Attention over the paged KV cache, and over contiguous keys."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .cache import FP8, int4_values, token_rows, write_tokens
from .rotary import rope_and_cache

Keys: TypeAlias = Callable[[int, int, int], tuple[Tensor, Tensor]]
MAX_LOGITS = {"cpu": 2**19, "cuda": 2**23}  # that are computed at once


def _visible_tokens(
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    tp_rank: int,
    local_blocks: int,
    vert_stride: int,
    block_size: int,
    head_sliding_step: int,
) -> Tensor:
    """[num_heads, seq_len] bool: vLLM's block-sparse pattern."""
    head = torch.arange(num_heads)
    if head_sliding_step >= 0:
        offset = (tp_rank * num_heads + head) * head_sliding_step + 1
    else:
        kv_head = head // (num_heads // num_kv_heads)
        offset = (tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1
    block = torch.arange(seq_len) // block_size
    local = block > (seq_len - 1) // block_size - local_blocks
    vertical = (block[None, :] + offset[:, None]) % vert_stride == 0
    return local[None, :] | vertical


def naive_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    alibi_slopes: Tensor | None = None,
    k_scale: Tensor | float = 1.0,
    v_scale: Tensor | float = 1.0,
    kv_cache_dtype: str = "auto",
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> Tensor:
    """One query token a sequence attends to its pages (layout vllm), in float64.

    query [num_seqs, num_heads, head_size], key_cache [num_blocks, num_kv_heads, head_size / x,
    block_size, x], value_cache [num_blocks, num_kv_heads, head_size, block_size] -> out, float64.
    """
    if kv_cache_dtype != "auto":
        key_cache, value_cache = (x.view(FP8[kv_cache_dtype]) for x in (key_cache, value_cache))

    def hidden(seq_len: int, first: int, end: int) -> Tensor | None:
        if blocksparse_vert_stride <= 1:
            return None
        visible = _visible_tokens(
            seq_len, query.shape[1], num_kv_heads, tp_rank, blocksparse_local_blocks,
            blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step,
        )  # fmt: skip
        return ~visible[:, None, first:end].to(query.device)

    k_scale, v_scale = (torch.as_tensor(x, device=query.device) for x in (k_scale, v_scale))
    keys_of = _paged_keys(key_cache, value_cache, block_tables, k_scale, v_scale, "vllm")
    out, _ = _attention(
        query, list(range(len(query) + 1)), seq_lens.tolist(), keys_of, scale, (-1, 0),
        alibi_slopes, 0.0, None, hidden,
    )  # fmt: skip
    return out


def _head_tokens(
    cache: Tensor, layout: str, pages: Tensor, scale: Tensor | None, zero: Tensor | None
) -> Tensor:
    """The values of the pages of one sequence, [num_kv_heads, tokens, head_size] in float64."""
    if scale is not None and scale.dim() == 3:  # a scale a token and head
        scale = scale[pages].transpose(0, 1).flatten(1)
    rows = token_rows(cache[pages], layout)
    rows = rows if zero is None else int4_values(rows)
    tokens = _scaled(rows.double().flatten(0, 1).transpose(0, 1), scale)
    if zero is None:
        return tokens
    return tokens + zero[pages].transpose(0, 1).flatten(1)[..., None].double()


def _scaled(tokens: Tensor, scale: Tensor | None) -> Tensor:
    """scale: one, [num_kv_heads], or [num_kv_heads, tokens]."""
    if scale is None:
        return tokens
    factors = scale[..., None] if scale.dim() == 2 else scale.reshape(-1, 1, 1)
    return tokens * factors.double()


def _paged_keys(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
) -> Keys:
    block_size = token_rows(value_cache[:0], layout).shape[1]

    def keys_of(seq: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        read = slice(first // block_size, -(-end // block_size))  # no other page
        pages = block_tables[seq, read].long()
        inside = slice(first - read.start * block_size, end - read.start * block_size)
        return (
            _head_tokens(key_cache, layout, pages, k_scale, k_zero)[:, inside],
            _head_tokens(value_cache, layout, pages, v_scale, v_zero)[:, inside],
        )

    return keys_of


def table_of_page_list(
    kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """A table in CSR form -> (block_tables [num_seqs, most pages], seq_lens [num_seqs])."""
    ends = kv_indptr.tolist()
    pages = [kv_indices[first:end] for first, end in pairwise(ends)]
    tables = torch.zeros(len(pages), max(map(len, pages), default=0), dtype=torch.int32)
    for row, ids in zip(tables, pages):
        row[: len(ids)] = ids
    counts = torch.tensor(ends).diff()
    lens = torch.where(counts > 0, (counts - 1) * block_size + last_page_len.cpu(), 0)
    return tables.to(kv_indices.device), lens.int().to(kv_indices.device)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    query_start_loc: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "vllm",
    causal: bool = True,
    window_right: int = -1,
    kv_indptr: Tensor | None = None,
    k_token_scales: Tensor | None = None,
    v_token_scales: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_token_zeros: Tensor | None = None,
    v_token_zeros: Tensor | None = None,
    total_seq_lens: Tensor | None = None,
    shards: int = 1,
    shard: int = 0,
    interleave: int = 1,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Query tokens attend to the pages of their sequence -> (out, lse) in float64.

    Shapes and meaning as the op's; out [num_tokens, num_heads, head_size], lse [num_tokens,
    num_heads]. Tokens that no sequence owns give 0 and -inf. With kv_indptr, block_tables and
    seq_lens are kv_indices and last_page_len.
    """

    def place_of(stored: Tensor) -> Tensor:
        return (stored // interleave * shards + shard) * interleave + stored % interleave

    k_scale = k_scale if k_token_scales is None else k_token_scales
    v_scale = v_scale if v_token_scales is None else v_token_scales
    if kv_indptr is not None:
        block_size = token_rows(value_cache[:0], layout).shape[1]
        block_tables, seq_lens = table_of_page_list(kv_indptr, block_tables, seq_lens, block_size)
    keys_of = _paged_keys(
        key_cache, value_cache, block_tables, k_scale, v_scale, layout, k_token_zeros,
        v_token_zeros,
    )  # fmt: skip
    right = 0 if causal else window_right
    starts = list(range(len(query) + 1)) if query_start_loc is None else query_start_loc.tolist()
    return _attention(
        query, starts, seq_lens.tolist(), keys_of, scale, (sliding_window - 1, right),
        alibi_slopes, softcap, sinks, tree_mask=tree_mask, q_scale=q_scale,
        totals=None if total_seq_lens is None else total_seq_lens.tolist(), place_of=place_of,
    )  # fmt: skip


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sequences with contiguous keys -> (out, lse) in float64, in the shapes of the op."""
    ends = key_start_loc.tolist()

    def keys_of(seq: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        rows = slice(ends[seq] + first, ends[seq] + end)
        return (
            _scaled(key[rows].double().transpose(0, 1), k_scale),
            _scaled(value[rows].double().transpose(0, 1), v_scale),
        )

    lens = [end - start for start, end in pairwise(ends)]
    return _attention(
        query, query_start_loc.tolist(), lens, keys_of, scale,
        (window[0], 0 if causal else window[1]), alibi_slopes, softcap, sinks, q_scale=q_scale,
    )  # fmt: skip


def _outside(distance: Tensor, left: int, right: int) -> Tensor:
    """Whether tokens at this distance from the query token are outside of its window."""
    unseen = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        unseen |= distance < -left
    if right >= 0:
        unseen |= distance > right
    return unseen


def _tree_hides(words: Tensor, index: Tensor, other: Tensor) -> Tensor:
    """Whether query tokens ``index`` do not see the tokens ``other`` -> [tokens, seen]. Both count
    from the sequence's query token 0. words: the tokens' tree_mask."""
    bits = words.long()[:, None] >> other.clamp(0, 63)
    if words.dtype == torch.int32:
        bits = bits * (other < 32)
    return (other >= 0) & (other != index[:, None]) & (bits & 1 == 0)


def _attention(
    query: Tensor,
    starts: list[int],
    lens: list[int],
    keys_of: Keys,
    scale: float | None,
    window: tuple[int, int],
    alibi_slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    hidden: Callable[[int, int, int], Tensor | None] = lambda *_: None,
    tree_mask: Tensor | None = None,
    totals: list[int] | None = None,
    place_of: Callable[[Tensor], Tensor] = lambda stored: stored,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """keys_of(seq, first, end): those tokens' keys and values, [num_kv_heads, tokens, head_size].

    hidden(seq_len, first, end): those of them that are not visible, [num_heads, 1, tokens].
    window: visible tokens before and after a query token's position; negative: all.
    totals: lengths of the sequences, which have their tokens at place_of(tokens that are stored).
    """
    num_tokens, num_heads, head_size = query.shape
    factor = head_size**-0.5 if scale is None else scale
    left, right = window
    value_size = keys_of(0, 0, 0)[1].shape[-1] if lens else head_size
    out = query.new_zeros(num_tokens, num_heads, value_size, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64, device=query.device)

    def attend(seq: int, tokens: range) -> None:
        length, after = lens[seq], (totals or lens)[seq] - starts[seq + 1]
        positions = range(tokens.start + after, tokens.stop + after)
        end = max(0, length if right < 0 else min(length, positions[-1] + right + 1))
        first = min(end, max(0, positions[0] - left)) if left >= 0 else 0
        if totals is not None:  # the mask finds them
            first, end = 0, length
        key, value = keys_of(seq, first, end)
        if len(tokens) > 1 and not value.isfinite().all():  # 0 * NaN: only where it is visible
            for token in tokens:
                attend(seq, range(token, token + 1))
            return
        rows = slice(tokens.start, tokens.stop)
        # [kv_heads, group * tokens, head_size] -> logits [num_heads, tokens, seen]
        grouped = query[rows].double().transpose(0, 1).reshape(len(key), -1, head_size)
        grouped = _scaled(grouped, q_scale)
        logits = (factor * grouped @ key.transpose(1, 2)).view(num_heads, len(tokens), end - first)
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        seen = place_of(torch.arange(first, end, device=query.device))
        position = torch.arange(positions.start, positions.stop, device=query.device)
        distance = seen - position[:, None]  # [tokens, seen]
        if alibi_slopes is not None:
            logits = logits - alibi_slopes.double()[:, None, None] * distance.abs()
        unseen = hidden(length, first, end)
        if len(tokens) > 1 or totals is not None:  # one query token sees all of first .. end
            unseen = _outside(distance, left, right)
        if len(tokens) == 1 and unseen is not None and totals is not None:
            value = value.masked_fill(unseen[0][:, None], 0.0)
        if tree_mask is not None:
            first_new = starts[seq] + after
            hides = _tree_hides(tree_mask[rows], position - first_new, seen - first_new)
            unseen = hides if unseen is None else unseen | hides
        if unseen is not None:
            logits = logits.masked_fill(unseen, -torch.inf)
        if sinks is not None:  # a logit without a value
            sink = sinks.double()[:, None, None].expand(-1, len(tokens), 1)
            logits = torch.cat([logits, sink], dim=2)
        total = torch.logsumexp(logits, dim=2)  # [num_heads, tokens]
        weights = (logits - total.clamp_min(-1e300)[..., None]).exp()[..., : end - first]
        mean = weights.reshape(*grouped.shape[:2], end - first) @ value
        out[rows] = mean.view(num_heads, len(tokens), value_size).transpose(0, 1)
        lse[rows] = total.t()

    for seq, length in enumerate(lens):
        at_once = max(1, MAX_LOGITS[query.device.type] // (num_heads * max(1, length)))  # tokens
        for start in range(starts[seq], starts[seq + 1], at_once):
            attend(seq, range(start, min(start + at_once, starts[seq + 1])))
    return out, lse


def fused_decode_attention(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    is_neox: bool = True,
    bias: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    epsilon: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "vllm",
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """rope_and_cache, then paged_attention -> (out in float64, key cache, value cache afterwards).

    options: scale, alibi_slopes, sliding_window, softcap and sinks of paged_attention.
    """
    num_kv_heads, head_size = token_rows(value_cache[:0], layout).shape[2:]
    qkv = qkv if bias is None else qkv + bias
    num_heads = qkv.shape[1] // head_size - 2 * num_kv_heads
    rows = qkv.unflatten(1, (-1, head_size))
    query, key, value = rows.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    query, keys, values = rope_and_cache(
        positions, query, key, value, cos_sin_cache, is_neox, key_cache, value_cache, slot_mapping,
        layout, k_scale, v_scale, q_weight, k_weight, epsilon,
    )  # fmt: skip
    out, _ = paged_attention(
        query, keys, values, block_tables, seq_lens, k_scale=k_scale, v_scale=v_scale,
        layout=layout, **options,
    )  # fmt: skip
    return out, keys, values


def attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    seq_lens: Tensor,
    *,
    block_tables: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cumulative: bool = False,
    layout: str = "NHD",
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """New tokens behind those of the cache, then paged_attention over both -> (out in float64, key
    cache, value cache afterwards). options: those of paged_attention."""
    lens = (seq_lens.diff() if cumulative else seq_lens).tolist()
    if block_tables is None:  # a row is a page
        block_tables = torch.arange(len(lens), dtype=torch.int32, device=query.device)[:, None]
    page, width = token_rows(value_cache[:0], layout).shape[1], block_tables.shape[1]

    def slot(seq: int, position: int) -> int:
        column = position // page
        block = int(block_tables[seq, column]) if 0 <= column < width else -1
        return block * page + position % page if block >= 0 else -1

    count = 0 if key is None else key.shape[1]
    slots = [[slot(seq, length + i) for i in range(count)] for seq, length in enumerate(lens)]
    for seq, length in enumerate(lens):
        padded = length < 0 or (count > 0 and slots[seq][0] < 0)
        slots[seq] = [-1] * count if padded else slots[seq]
        lens[seq] = 0 if padded else length + count
    if key is not None and value is not None:
        to = torch.tensor(slots, dtype=torch.int64).flatten()
        key_cache = write_tokens(key_cache, key.flatten(0, 1), to, layout, None)
        value_cache = write_tokens(value_cache, value.flatten(0, 1), to, layout, None)
    rows = query
    if query.dim() == 4:
        rows = query.flatten(0, 1)
        query_start_loc = torch.arange(len(lens) + 1) * query.shape[1]
    out, _ = paged_attention(
        rows, key_cache, value_cache, block_tables, torch.tensor(lens),
        query_start_loc=query_start_loc, layout=layout, **options,
    )  # fmt: skip
    return out.view(query.shape), key_cache, value_cache


def merge_attn_states(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """[tokens, heads, D] and lse [heads, tokens] of each part -> those of both parts together."""
    output, lse = combine_attn_partials(
        torch.stack([prefix_output, suffix_output]),
        torch.stack([prefix_lse, suffix_lse]).transpose(1, 2),
    )
    return output, lse.t()


def combine_attn_partials(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """[partials, tokens, heads, D] and lse [partials, tokens, heads] -> all of them together."""
    lses = lse_partial.double()
    lses = torch.where(lses == torch.inf, -torch.inf, lses)
    weights = torch.where(lses == -torch.inf, 0.0, torch.softmax(lses, 0))[..., None]
    output = torch.where(weights == 0, 0.0, out_partial.double() * weights).sum(0)
    return output.to(out_partial.dtype), torch.logsumexp(lses, 0).float()
