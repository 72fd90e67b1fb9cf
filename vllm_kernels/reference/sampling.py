"""Sampling, bit for bit what the ops compute.

Weights are integers, floor(e^(x - max) * 2^40), so their sums do not depend on an order. The
exponential is a fixed sequence of float32 operations, rounded to nearest
(csrc/ops/sampling/sampling_math.h). Here a fused multiply-add is exact as well: ``_fused`` rounds
the float64 sum to odd first. Then rounding it to float32 gives what one rounding gives.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

__all__ = [
    "append_token_counts",
    "apply_repetition_penalties",
    "apply_token_bitmask_",
    "kept_tokens",
    "philox",
    "processed_logits",
    "sample",
    "softmax",
    "spec_verify",
    "token_logprobs",
    "top_k_top_p_mask_",
]

MIN_TEMPERATURE = 1e-5
ONE = 2.0**40
TokenLists = tuple[Tensor, Tensor, Tensor]


# --- float32 arithmetic ---------------------------------------------------------------------------


def _fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c of float32 values, rounded once.

    The product is exact in float64. The sum's rounding error (Knuth's two-sum) tells which way the
    float64 result must move to have an odd last bit; then rounding it to float32 is right."""
    product = a.double() * _float32(b).double()
    addend = _float32(c).double().expand_as(product)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & (bits % 2 == 0), bits + toward, bits)
    return odd.view(torch.float64).float()


def _float32(x: Tensor | float) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32)


def _exp(difference: Tensor) -> Tensor:
    """e^d of float32 d <= 0; e^-87 below -87."""
    hex_ = float.fromhex
    d = torch.where(difference < -87.0, -87.0, difference)
    shifted = _fused(d, hex_("0x1.715476p0"), hex_("0x1.8p23"))
    n = shifted - hex_("0x1.8p23")
    r = _fused(n, hex_("-0x1.63p-1"), d)
    r = _fused(n, hex_("0x1.bd0106p-13"), r)
    r2 = r * r
    low = _fused(r, hex_("0x1.555492p-3"), hex_("0x1.fffffcp-2"))
    q = _fused(r, hex_("0x1.1239c6p-7"), hex_("0x1.5558bcp-5"))
    q = _fused(r2, hex_("0x1.6a4154p-10"), q)
    q = _fused(r2, q, low)
    return torch.ldexp(_fused(q, r2, r) + 1.0, n)


def _log(v: Tensor, bits: int = 0) -> Tensor:
    """ln(v) - bits * ln2 of normal float32 v > 0."""
    hex_ = float.fromhex
    word = v.view(torch.int32)
    n = (word - 0x3F3504F3) >> 23
    r = (word - (n << 23)).view(torch.float32) - 1.0
    p = torch.full_like(r, hex_("-0x1.403966p-4"))
    for coefficient in (
        "0x1.069198p-3", "-0x1.0c9ccep-3", "0x1.229d9cp-3", "-0x1.5485c2p-3",
        "0x1.99a390p-3", "-0x1.0001e2p-2", "0x1.55554ep-2", "-0.8p0",
    ):  # fmt: skip
        p = _fused(p, r, hex_(coefficient))
    p = _fused(p, r * r, r)
    exponent = (n - bits).float()
    return _fused(exponent, hex_("0x1.63p-1"), _fused(exponent, hex_("-0x1.bd0106p-13"), p))


def _weights(logits: Tensor) -> Tensor:
    """int64 weights of a row of float32 logits with a finite maximum."""
    return (_exp(logits - logits.max()) * ONE).long()


def _fixed_point(fraction: float) -> int:
    """floor(fraction * 2^64), within [0, 2^64)."""
    return min(int(fraction * 2.0**64), 2**64 - 1) if fraction > 0 else 0


def philox(seed: int, offset: int) -> int:
    """64 random bits: Philox 4x32-10 (Salmon et al. 2011) of key ``seed``, counter ``offset``."""
    key, counter = ([x % 2**32, x >> 32 & (2**32 - 1)] for x in (seed, offset))
    words = philox_words([*counter, 0, 0], key)
    return words[1] << 32 | words[0]


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """Four words of 32 bits, of a counter of four and a key of two, the lowest first."""
    x, (key0, key1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ key0, b % 2**32, (a >> 32) ^ x[3] ^ key1, a % 2**32]
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return x


# --- a row ----------------------------------------------------------------------------------------


def _allowed(words: Tensor, vocab_size: int) -> Tensor:
    """bool [vocab_size] of the int32 words of a bitmask."""
    tokens = torch.arange(min(vocab_size, 32 * words.numel()))
    allowed = torch.ones(vocab_size, dtype=torch.bool)
    allowed[: tokens.numel()] = (words[tokens // 32] >> (tokens % 32)) % 2 == 1
    return allowed


def _entries(lists: TokenLists | None, sample: int) -> tuple[Tensor, Tensor]:
    if lists is None:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    indptr, tokens, values = (x.cpu() for x in lists)
    part = slice(int(indptr[sample]), int(indptr[sample + 1]))
    used = tokens[part] >= 0
    return tokens[part][used].long(), values[part][used]


def _at(values: Tensor | None, sample: int, default: float) -> float:
    return default if values is None else values[sample].item()


def processed_logits(
    logits: Tensor,
    sample: int,
    *,
    bitmask: Tensor | None = None,
    bitmask_rows: Tensor | None = None,
    token_counts: TokenLists | None = None,
    repetition: Tensor | None = None,
    frequency: Tensor | None = None,
    presence: Tensor | None = None,
    bias: TokenLists | None = None,
) -> Tensor:
    """A sample's row of logits [vocab_size] in float32 after bitmask, bias and penalties."""
    x = logits.cpu().float().clone()
    if bitmask is not None:
        row = sample if bitmask_rows is None else int(bitmask_rows[sample])
        if row >= 0:
            x[~_allowed(bitmask[row].cpu(), x.numel())] = -torch.inf
    tokens, values = _entries(bias, sample)
    x[tokens] += values.float()
    tokens, counts = _entries(token_counts, sample)
    penalty = torch.tensor(_at(repetition, sample, 1.0))
    listed = x[tokens]
    listed = torch.where(listed > 0, listed / penalty, listed * penalty)
    lessened = listed - torch.tensor(_at(frequency, sample, 0.0)) * counts.float()
    lessened = lessened - torch.tensor(_at(presence, sample, 0.0))
    x[tokens] = torch.where(counts > 0, lessened, listed)
    return x


def kept_tokens(x: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """bool [vocab_size] of a row of float32 logits, divided by the temperature, with a finite
    maximum."""
    x = x + 0.0  # -0 equals +0
    order = x.argsort(descending=True, stable=True)
    kept = torch.ones(x.numel(), dtype=torch.bool)
    if min_p >= 2.0**-126:
        log = _log(torch.tensor([min(min_p, 1.0)]))[0]
        kept &= x[order] >= torch.minimum(x.max() + log, x.max())
    if 0 < top_k < x.numel():
        kept[top_k:] = False
    if top_p < 1:
        weights = _weights(x)[order] * kept
        product = int(weights.sum()) * _fixed_point(top_p)
        limit = max((product >> 64) + (product % 2**64 != 0), 1)
        kept &= weights.cumsum(0) - weights < limit
    result = torch.empty_like(kept)
    result[order] = kept
    return result


def _draw(x: Tensor, kept: Tensor, random: int) -> int:
    upto = (_weights(x) * kept).cumsum(0)
    target = int(upto[-1]) * random >> 64
    return int(torch.searchsorted(upto, target, right=True))


# --- the ops --------------------------------------------------------------------------------------


@overload
def sample(logits: Tensor, *, num_logprobs: None = ..., **request: Any) -> Tensor: ...


@overload
def sample(
    logits: Tensor, *, num_logprobs: int, **request: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    rows: Tensor | None = None,
    num_logprobs: int | None = None,
    **processors: Tensor | TokenLists | None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """[num_rows, vocab_size] -> int64 [num_samples] on the CPU, and what token_logprobs gives."""
    samples = logits.shape[0] if rows is None else rows.numel()
    tokens = torch.empty(samples, dtype=torch.int64)
    for i in range(samples):
        row = logits[i if rows is None else int(rows[i])]
        x = processed_logits(row, i, **processors)  # type: ignore[arg-type]
        divisor = _at(temperature, i, 0.0)
        greedy = not divisor >= torch.tensor(MIN_TEMPERATURE)
        if not greedy:
            x = x / torch.tensor(divisor)
        if greedy or not x.max().isfinite():
            tokens[i] = _first_highest(x)
            continue
        if uniforms is not None:
            random = _fixed_point(uniforms[i].item())
        else:
            assert seeds is not None and offsets is not None
            random = philox(int(seeds[i]), int(offsets[i]))
        kept = kept_tokens(x, int(_at(top_k, i, 0)), _at(top_p, i, 1.0), _at(min_p, i, 0.0))
        tokens[i] = _draw(x, kept, random)
    if num_logprobs is None:
        return tokens
    return tokens, *token_logprobs(logits, tokens, num_logprobs, rows=rows)


def _first_highest(x: Tensor) -> int:
    highest = x.isnan() if x.isnan().any() else x == x.max()
    return int(highest.nonzero()[0])


def top_k_top_p_mask_(
    logits: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Returns the masked logits; its argument stays."""
    masked = logits.clone()
    for i, row in enumerate(logits.cpu().float()):
        if row.max().isfinite():
            kept = kept_tokens(row, int(_at(top_k, i, 0)), _at(top_p, i, 1.0), _at(min_p, i, 0.0))
            masked[i, ~kept.to(logits.device)] = -torch.inf
    return masked


def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int = 0, *, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs [num_samples, 1 + num_top], ids, ranks [num_samples]) on the CPU."""
    samples = tokens.numel()
    logprobs = torch.full((samples, 1 + num_top), -torch.inf)
    ids = torch.full((samples, 1 + num_top), -1)
    ranks = torch.empty(samples, dtype=torch.int64)
    for i in range(samples):
        x = logits[i if rows is None else int(rows[i])].cpu().float() + 0.0
        token = int(tokens[i])
        best = x.argsort(descending=True, stable=True)[:num_top]
        chosen = torch.cat([torch.tensor([token]), best])
        log_sum = torch.tensor(torch.nan)
        if x.max().isfinite():
            log_sum = _log(_weights(x).sum().float()[None], 40)[0]
        logprobs[i, : chosen.numel()] = x[chosen] - x.max() - log_sum
        ids[i, : chosen.numel()] = chosen
        ranks[i] = ((x >= x[token]) | x.isnan()).sum()  # NaN is above all
    return logprobs, ids, ranks


def softmax(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """float32 [num_rows, vocab_size] on the CPU."""
    out = torch.full(logits.shape, torch.nan)
    for i, row in enumerate(logits.cpu().float()):
        x = row / torch.tensor(_at(temperature, i, 1.0))
        if x.max().isfinite():
            difference = x - x.max()
            powers = torch.where(difference < -87.0, 0.0, _exp(difference))
            out[i] = powers / (_weights(x).sum().float() * 2.0**-40)
    return out


def apply_token_bitmask_(
    logits: Tensor, bitmask: Tensor, bitmask_rows: Tensor | None = None
) -> Tensor:
    """Returns the masked logits; its argument stays."""
    masked = logits.clone()
    for i in range(logits.shape[0]):
        row = i if bitmask_rows is None else int(bitmask_rows[i])
        if row >= 0:
            allowed = _allowed(bitmask[row].cpu(), logits.shape[1])
            masked[i, ~allowed.to(logits.device)] = -torch.inf
    return masked


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> Tensor:
    """Returns the penalized logits; its argument stays."""
    x, penalty = logits.float(), repetition_penalties[:, None]
    penalized = torch.where(x > 0, x / penalty, x * penalty).to(logits.dtype)
    return torch.where(prompt_mask | output_mask, penalized, logits)


def append_token_counts(
    tokens: Tensor,
    counts: Tensor,
    lengths: Tensor,
    indptr: Tensor,
    new_tokens: Tensor,
    positions: Tensor | None = None,
    next_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns what the op writes; its arguments stay."""
    tokens, counts, lengths = tokens.clone(), counts.clone(), lengths.clone()
    next_positions = None if next_positions is None else next_positions.clone()
    for row, token in enumerate(new_tokens.tolist()):
        begin, end = indptr[row : row + 2].tolist()
        if next_positions is not None:
            assert positions is not None
            if positions[row] < next_positions[row]:
                continue
            next_positions[row] = positions[row] + 1
        if token < 0 or begin == end:
            continue
        used = begin + int(lengths[row])
        same = tokens[begin:used] == token
        counts[begin:used] += same
        if not same.any():
            tokens[used], counts[used] = token, 1
            lengths[row] += 1
    return tokens, counts, lengths, next_positions


def spec_verify(
    draft_tokens: Tensor,
    target_tokens: Tensor | None = None,
    *,
    target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(tokens [num_seqs, num_draft + 1], accepted [num_seqs]) on the CPU."""
    num_seqs, num_draft = draft_tokens.shape
    tokens = torch.full((num_seqs, num_draft + 1), -1)
    accepted = torch.zeros(num_seqs, dtype=torch.int32)
    for s in range(num_seqs):
        for i in range(num_draft + 1):
            token = int(draft_tokens[s, i]) if i < num_draft else -1
            if target_tokens is not None:
                tokens[s, i] = target_tokens[s, i]
                if token < 0 or token != int(target_tokens[s, i]):
                    break
            else:
                assert target_probs is not None and uniforms is not None
                target = target_probs[s, i].cpu()
                draft = None if draft_probs is None else draft_probs[s, min(i, num_draft - 1)].cpu()
                keep, draw = uniforms[s, i].cpu()
                drafted = torch.tensor(1.0) if draft is None else draft[token]
                if token < 0 or not keep * drafted < target[token]:
                    tokens[s, i] = _draw_residual(target, draft, token, draw.item())
                    break
                tokens[s, i] = token
            accepted[s] += 1
    return tokens, accepted


def _draw_residual(target: Tensor, draft: Tensor | None, token: int, uniform: float) -> int:
    """A token of max(target - draft, 0); of the target if that is 0, or if no token was
    rejected; 0 if that is 0 too."""
    rest = target.clone()
    if token >= 0 and draft is not None:
        rest = target - draft
    elif token >= 0:
        rest[token] = 0
    for probabilities in (rest, target):
        upto = (probabilities.clamp(0, 1) * ONE).long().cumsum(0)
        if upto[-1] > 0:
            break
    else:
        return 0
    return int(torch.searchsorted(upto, int(upto[-1]) * _fixed_point(uniform) >> 64, right=True))
