"""From logits to tokens, each row by the parameters of its own request."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kernels.integrations.request import Sequence

__all__ = ["sample"]


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """The next token of every sequence.

    Each sequence draws one number from its own generator and takes the token at that place of the
    cumulated probabilities, so that a seed gives the same tokens in every batch.

    Args:
        logits: [len(sequences), vocabulary], any float dtype; not changed.
        sequences: with the parameters of their requests.
    """
    params = [sequence.request.params for sequence in sequences]
    penalised = [i for i, p in enumerate(params) if p.repetition_penalty != 1]
    random = [i for i, p in enumerate(params) if p.temperature > 0]
    if penalised:
        logits = logits.float().clone()
        for i in penalised:
            _penalise(logits[i], sequences[i].tokens, params[i].repetition_penalty)
    tokens = logits.argmax(-1)
    if random:
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _draw(
            logits[rows].float(),
            torch.tensor([params[i].temperature for i in random]),
            [params[i].top_k for i in random],
            torch.tensor([params[i].top_p for i in random]),
            torch.tensor([sequences[i].random.random() for i in random], dtype=torch.float32),
        )
    return tokens.tolist()


def _penalise(logits: Tensor, tokens: list[int], penalty: float) -> None:
    """In place, once for each distinct token. logits: [vocabulary]."""
    seen = torch.tensor(sorted(set(tokens)), device=logits.device)
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw(
    logits: Tensor, temperature: Tensor, top_k: list[int], top_p: Tensor, uniform: Tensor
) -> Tensor:
    """A token for every row of logits [rows, vocabulary], float32.

    Args:
        temperature, top_p: [rows], float32.
        top_k: of each row; 0: all.
        uniform: [rows] in [0, 1).
    """
    vocabulary = logits.shape[-1]
    device = logits.device
    logits = logits / temperature.to(device)[:, None]
    kept = [min(k, vocabulary) or vocabulary for k in top_k]
    restricted = max(kept) < vocabulary or bool((top_p < 1).any()) or min(kept) < vocabulary
    if not restricted:
        return _at(logits.softmax(-1).cumsum(-1), uniform.to(device))
    logits, tokens = logits.topk(max(kept), sorted=True)  # all of them is a sort
    places = torch.arange(max(kept), device=device)
    logits.masked_fill_(places >= torch.tensor(kept, device=device)[:, None], -torch.inf)
    probabilities = logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of all that are likelier
    outside = before >= top_p.to(device)[:, None]
    outside[:, 0] = False
    probabilities.masked_fill_(outside, 0)
    chosen = _at(probabilities.cumsum(-1), uniform.to(device))
    return tokens.gather(-1, chosen[:, None]).squeeze(-1)


def _at(cumulated: Tensor, uniform: Tensor) -> Tensor:
    """The first place where the cumulated probabilities exceed ``uniform`` of their sum."""
    total = cumulated[:, -1:]
    places = torch.searchsorted(cumulated, uniform[:, None] * total, right=True).squeeze(-1)
    # By rounding the product may reach the sum: then the last place that adds to it.
    last = (cumulated < total).sum(-1)
    return torch.minimum(places, last)
