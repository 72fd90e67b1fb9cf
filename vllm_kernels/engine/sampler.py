"""Samples tokens from logits. Each row follows the parameters of its own request."""

from __future__ import annotations

import torch
from torch import Tensor

from .request import Sequence
from .upload import upload

__all__ = ["sample"]


def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Samples the next token of every sequence.

    Each sequence has its own random number and inverts its cumulative probabilities with it. So a
    seed gives the same tokens in every batch.

    Args:
        logits: [len(sequences), vocabulary], any float dtype. Not modified.
        sequences: One sequence per row.

    Returns:
        Tokens, int64 [len(sequences)], and the highest logit of each row, both on the device of
        ``logits``. The highest logit is not finite if a row has NaN or +inf, or only -inf. The
        token means nothing then.
    """
    params = [sequence.request.params for sequence in sequences]
    penalized = [i for i, p in enumerate(params) if p.repetition_penalty != 1]
    random = [i for i, p in enumerate(params) if not p.is_greedy]
    if penalized:
        logits = logits.float().clone()
        for i in penalized:
            _penalize(logits[i], sequences[i].tokens, params[i].repetition_penalty)
    tokens = logits.argmax(-1)  # the index of NaN, if there is one
    highest = logits.gather(-1, tokens[:, None])
    # Two groups, so that a row's token does not depend on other rows' parameters.
    for restricted in (False, True):
        some = [i for i in random if (params[i].top_k > 0 or params[i].top_p < 1) is restricted]
        if some:
            rows = upload(some, logits.device)
            draw = _draw_restricted if restricted else _draw
            tokens[rows] = draw(logits[rows].float(), [sequences[i] for i in some])
    return tokens, highest.squeeze(-1)


def _penalize(logits: Tensor, tokens: list[int], penalty: float) -> None:
    """Applies the repetition penalty once per distinct token, in place. logits: [vocabulary]."""
    seen = upload(sorted(set(tokens)), logits.device)
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Draws one token per row. logits: float32 [rows, vocabulary]."""
    return _at(_tempered(logits, sequences).softmax(-1).cumsum(-1), sequences)


def _draw_restricted(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Draws one token per row after top-k and top-p. Lower token ids win ties."""
    device = logits.device
    vocabulary = logits.shape[-1]
    params = [sequence.request.params for sequence in sequences]
    kept = [min(p.top_k, vocabulary) or vocabulary for p in params]
    top_p = upload([p.top_p for p in params], device, torch.float32)
    tempered = _tempered(logits, sequences)
    # Values only: topk does not define the order of equal elements.
    best = tempered.topk(max(kept), sorted=True).values
    places = torch.arange(max(kept), device=device)
    best.masked_fill_(places >= upload(kept, device)[:, None], -torch.inf)
    probabilities = best.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # sum over likelier tokens
    inside = (before < top_p[:, None]) & (probabilities > 0)
    count = inside.sum(-1, keepdim=True).clamp_min(1)  # 0 if the row has NaN
    min_kept = best.gather(-1, count - 1)
    equal = tempered == min_kept
    room = count - (best > min_kept).sum(-1, keepdim=True)  # tied tokens to keep
    allowed = (tempered > min_kept) | (equal & (equal.cumsum(-1) <= room))
    return _at(tempered.masked_fill_(~allowed, -torch.inf).softmax(-1).cumsum(-1), sequences)


def _tempered(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    temperatures = [sequence.request.params.temperature for sequence in sequences]
    return logits / upload(temperatures, logits.device, torch.float32)[:, None]


def _at(cumulated: Tensor, sequences: list[Sequence]) -> Tensor:
    """Inverts cumulative probabilities at each sequence's random number, scaled to their sum."""
    numbers = [sequence.random_number() for sequence in sequences]
    total = cumulated[:, -1:]
    wanted = upload(numbers, cumulated.device, torch.float32)[:, None] * total
    places = torch.searchsorted(cumulated, wanted, right=True).squeeze(-1)
    # Rounding may lift the product to the sum. Then take the last token with a probability > 0.
    last = (cumulated < total).sum(-1)
    return torch.minimum(places, last)
