"""Attention to the tokens with the best approximate scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cache import token_rows
from .pages import kept_pages

__all__ = ["sparq_attention", "sparq_choice", "value_mean_update"]


def sparq_choice(
    heads: Tensor,
    keys: Tensor,
    *,
    scale: float,
    r: int,
    k: int,
    window: int,
    sink_tokens: int = 0,
    chunk: int = 1,
    unit: int = 1,
) -> tuple[Tensor, Tensor]:
    """Of one KV head of a sequence: heads [group, head_size], keys [tokens, head_size] ->
    approximate scores [group, tokens] in float64, and whether each token is kept.

    Args:
        chunk: components that are chosen together.
        unit: tokens that are kept together.
    """
    heads, keys = heads.double(), keys.double()
    heads = torch.where(heads.isnan(), 0.0, heads)
    sums = heads.abs().unflatten(1, (-1, chunk)).sum((0, 2))
    chosen = sums.argsort(descending=True, stable=True)[: r // chunk]
    part = torch.zeros_like(heads).unflatten(1, (-1, chunk))
    part[:, chosen] = heads.unflatten(1, (-1, chunk))[:, chosen]
    part = part.flatten(1)
    norm, part_norm = heads.abs().sum(1), part.abs().sum(1)
    factors = scale * torch.where(part_norm > 0, norm / part_norm, 1.0).sqrt()
    scores = factors[:, None] * part @ keys.T

    tokens, budget = len(keys), k // unit
    units = -(-tokens // unit)
    if units <= budget:
        return scores, torch.ones(tokens, dtype=torch.bool, device=keys.device)
    total = torch.full((units * unit,), -torch.inf, dtype=torch.float64, device=keys.device)
    total[:tokens] = scores.sum(0).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    sinks, recent = -(-sink_tokens // unit), (max(window, 1) + unit - 2) // unit + 1
    best = kept_pages(total.view(units, unit).amax(1), units, budget, sinks, recent)
    kept = torch.zeros(units, dtype=torch.bool, device=keys.device)
    kept[best] = True
    return scores, kept.repeat_interleave(unit)[:tokens]


def _chunk_of(components: str, key_cache: Tensor, head_size: int, layout: str) -> int:
    if components == "single":
        return 1
    x = 16 // key_cache.dtype.itemsize
    return x if layout == "vllm" or head_size % (2 * x) else 2 * x


def sparq_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    r: int = 32,
    k: int = 1024,
    window: int | None = None,
    sink_tokens: int = 0,
    select: str = "pages",
    components: str = "chunks",
    mean_value: Tensor | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "vllm",
) -> tuple[Tensor, Tensor]:
    """(out, lse of the kept tokens), in float64. ``components="single"`` chooses r components one
    by one."""
    keys_of, values_of = token_rows(key_cache, layout), token_rows(value_cache, layout)
    num_kv_heads, head_size = keys_of.shape[2:]
    scale = 1 / math.sqrt(head_size) if scale is None else scale
    window = k // 4 if window is None else window
    chunk = _chunk_of(components, key_cache, head_size, layout)
    unit = keys_of.shape[1] if select == "pages" else 1
    grouped = query.double().unflatten(1, (num_kv_heads, -1))
    out, lse = torch.zeros_like(grouped), grouped.new_full(grouped.shape[:-1], -torch.inf)
    for seq, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        pages = block_tables[seq, : -(-length // keys_of.shape[1])].long()
        keys, values = (
            rows[pages].flatten(0, 1)[:length].double() * (1.0 if of is None else of.double())
            for rows, of in ((keys_of, k_scale), (values_of, v_scale))
        )
        for head in range(num_kv_heads):
            heads = grouped[seq, head]
            approximate, kept = sparq_choice(
                heads, keys[:, head], scale=scale, r=r, k=k, window=window,
                sink_tokens=sink_tokens, chunk=chunk, unit=unit,
            )  # fmt: skip
            scores = scale * heads @ keys[kept, head].T
            attended = scores.softmax(-1) @ values[kept, head]
            if mean_value is not None and not kept.all():
                alpha = approximate.softmax(-1)[:, kept].sum(-1, keepdim=True)
                attended = alpha * attended + (1 - alpha) * mean_value[seq, head].double()
            out[seq, head], lse[seq, head] = attended, scores.logsumexp(-1)
    return out.flatten(1, 2), lse.flatten(1)


def value_mean_update(
    mean: Tensor, counts: Tensor, value: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """(mean, counts) afterwards, the mean in float64."""
    mean, counts = mean.double(), counts.clone()
    for row in set(rows.tolist()) - {-1}:
        new = value[rows == row].double()
        old = max(int(counts[row]), 0)
        total = new.sum(0) + (mean[row] * old if old else 0.0)
        counts[row] = old + len(new)
        mean[row] = total / counts[row]
    return mean, counts
