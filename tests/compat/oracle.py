"""What FlashAttention's functions mean, in plain PyTorch and float64."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [S, H, D], k [Sk, Hk, D], v [Sk, Hk, Dv] of one sequence -> out [S, H, Dv], lse [H, S]."""
    (queries, heads, size), keys = q.shape, k.shape[0]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[0], 0) for x in (k, v))
    logits = q @ k.transpose(1, 2) * (size**-0.5 if scale is None else scale)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(queries, device=q.device)[:, None] + keys - queries
    distance = torch.arange(keys, device=q.device) - position
    if slopes is not None:
        logits = logits - slopes.double()[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(heads, queries, 1)
        logits = torch.cat([logits, sink], dim=-1)
    lse = torch.logsumexp(logits, -1)
    weights = (logits - lse.clamp_min(-1e300)[..., None]).exp()[..., :keys]
    return (weights @ v).transpose(0, 1), lse


def turned(x: Tensor, first: int, step: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, D], token i at position first + step * i."""
    positions = first + step * torch.arange(x.shape[0], device=x.device)
    cos, sin = (t.double()[positions][:, None] for t in (cos, sin))
    width = 2 * cos.shape[-1]
    x, rest = x.double()[..., :width], x.double()[..., width:]
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        both = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = x.chunk(2, -1)
        both = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([both, rest], -1)
