"""Log-probabilities of tokens, as the model gives them before all sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ... import token_logprobs
from ...ops.sampling import MAX_TOP_LOGPROBS
from ..upload import download

__all__ = ["Logprob", "TokenLogprobs", "TopLogprobs"]


class Logprob(NamedTuple):
    """A token's log-probability."""

    logprob: float
    rank: int
    """1 for the likeliest token."""


class TopLogprobs(Mapping[int, Logprob]):
    """Maps a token and the likeliest ones in its place, in this order, to their :class:`Logprob`.

    It makes a Logprob when it is asked for one. Thousands of small objects per pass would keep
    Python's garbage collector busy. Two of equal items are equal, whatever their order.

    Example:
        >>> import numpy as np
        >>> from vllm_kernels.integrations.transformers import TopLogprobs
        >>> TopLogprobs(np.array([7, 5, 7]), np.array([-0.75, -0.5, -0.75], np.float32), rank=2)
        {7: Logprob(logprob=-0.75, rank=2), 5: Logprob(logprob=-0.5, rank=1)}
    """

    __slots__ = ("_ids", "_logprobs", "_rank")

    def __init__(
        self, ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], rank: int
    ) -> None:
        self._ids = ids  # [1 + num_top]; the first may come again
        self._logprobs = logprobs  # [1 + num_top]
        self._rank = rank  # of the first token. The others' is their place.

    def __getitem__(self, token: int) -> Logprob:
        places = (self._ids == token).nonzero()[0]
        if not len(places):
            raise KeyError(token)
        place = int(places[-1])
        return Logprob(float(self._logprobs[place]), place or self._rank)

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys(self._ids.tolist()))

    def __len__(self) -> int:
        again = bool((self._ids[1:] == self._ids[0]).any())
        return len(self._ids) - again

    def __repr__(self) -> str:
        return repr(dict(self))


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
        if num_top <= MAX_TOP_LOGPROBS:
            found = token_logprobs(logits, tokens, num_top, rows=rows)
        else:
            found = _all_logprobs(logits if rows is None else logits[rows], tokens, num_top)
        self._tensors = [download(tensor) for tensor in found]

    def fetch(self, num_top: int | list[int]) -> list[TopLogprobs]:
        """Returns the log-probabilities of each row.

        On a GPU the caller must wait for the copies first.

        Args:
            num_top: Number of likeliest tokens that each row asks for, or all rows. -1 means all.
        """
        logprobs, ids, ranks = (tensor.numpy().copy() for tensor in self._tensors)
        each = [num_top] * len(ids) if isinstance(num_top, int) else num_top
        ends = [None if number < 0 else 1 + number for number in each]
        return [
            TopLogprobs(tokens[:end], values[:end], rank)
            for tokens, values, rank, end in zip(ids, logprobs, ranks.tolist(), ends)
        ]


def _all_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    best = logits.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    ids = torch.cat([tokens[:, None], best], 1)
    ranks = (logits >= logits.gather(1, tokens[:, None])).sum(1)
    return logprobs.gather(1, ids), ids, ranks
