"""Log-probabilities of tokens, as the model gives them before all sampling parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import token_logprobs
from ..upload import download

__all__ = ["Logprob", "TokenLogprobs", "top_of"]

_MAX_TOP = 128  # of the op


class Logprob(NamedTuple):
    """A token's log-probability."""

    logprob: float
    rank: int
    """1 for the likeliest token."""


class TokenLogprobs:
    """Log-probabilities of rows of logits, on their way to the host.

    Args:
        logits: [rows, vocabulary], any float dtype.
        tokens: int64 [n], a token per row.
        num_top: Number of likeliest tokens to report. -1 means all.
        rows: int32 [n], rows of logits. None means all, in order.
    """

    def __init__(
        self, logits: Tensor, tokens: Tensor, num_top: int, rows: Tensor | None = None
    ) -> None:
        vocabulary = logits.shape[-1]
        num_top = vocabulary if num_top < 0 else min(num_top, vocabulary)
        if num_top <= _MAX_TOP:
            found = token_logprobs(logits, tokens, num_top, rows=rows)
        else:
            found = _all_logprobs(logits if rows is None else logits[rows], tokens, num_top)
        self._tensors = [download(tensor) for tensor in found]

    def fetch(self) -> list[list[tuple[int, Logprob]]]:
        """Returns (token, logprob) of each row's token, then of the likeliest ones in order.

        On a GPU the caller must wait for the copies first.
        """
        logprobs, ids, ranks = (tensor.tolist() for tensor in self._tensors)
        rows = []
        for values, tokens, rank in zip(logprobs, ids, ranks):
            # Only the first one's rank is not its place.
            pairs = zip(tokens, map(Logprob, values, [rank, *range(1, len(values))]))
            rows.append(list(pairs))
        return rows


def top_of(row: list[tuple[int, Logprob]], num_top: int) -> dict[int, Logprob]:
    """Returns the row's token and the ``num_top`` likeliest ones. -1 means all."""
    return dict(row if num_top < 0 else row[: 1 + num_top])


def _all_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    best = logits.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    ids = torch.cat([tokens[:, None], best], 1)
    ranks = (logits >= logits.gather(1, tokens[:, None])).sum(1)
    return logprobs.gather(1, ids), ids, ranks
