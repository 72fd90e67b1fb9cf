"""Sampled tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ..request import Request, Sequence
from ..upload import download, upload
from .logprobs import TokenLogprobs, TopLogprobs

__all__ = ["Extras", "PendingTokens", "SampledToken"]


class SampledToken(NamedTuple):
    """A new token of a sequence."""

    token: int
    """-1 marks NaN or infinite logits."""
    logprobs: TopLogprobs | None = None


@dataclass
class Extras:
    """What a pass has besides one token per sequence."""

    num_rows: list[int] | None = None
    """Number of drawn tokens per sequence. None means 1."""
    drafted: Collection[Sequence] = ()
    """The sequences with drafts."""
    num_accepted: Tensor | None = None
    """int32 [number of drafted sequences]: the number of drafted tokens to keep."""
    logprobs: TokenLogprobs | None = None
    """Log-probabilities of the drawn tokens of the sequences that ask for them."""
    prompts: list[tuple[Request, int, TokenLogprobs]] = field(default_factory=list)
    """Requests, positions in their prompts, and log-probabilities from there on."""
    errors: Mapping[Sequence, Exception] = field(default_factory=dict)
    """What ends a request instead of its token."""


class PendingTokens:
    """Sampled tokens of one pass. The constructor starts their copy to the host.

    Args:
        sequences: The sequences that get a token, in row order.
        tokens: int64 [rows], on the device. There is a row per sequence, or ``extras.num_rows``.
        highest: The model's logit of each token, on the device.
        extras: More results of the pass.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        tokens: Tensor,
        highest: Tensor,
        extras: Extras | None = None,
    ) -> None:
        self.sequences = sequences
        self.extras = extras or Extras()
        self._order = sequences
        self._tokens = tokens
        self._host, self._host_highest = download(tokens), download(highest)
        accepted = self.extras.num_accepted
        self._host_accepted = None if accepted is None else download(accepted)
        self._arrived: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tokens_of(self, sequences: list[Sequence]) -> Tensor:
        """Returns the tokens of some of the sequences, on the device."""
        if sequences == self._order:
            return self._tokens
        row = {sequence: at for at, sequence in enumerate(self._order)}
        rows = upload([row[sequence] for sequence in sequences], self._tokens.device)
        return self._tokens[rows]

    def fetch(self) -> list[list[SampledToken]]:
        """Waits for the pass and returns the new tokens of each sequence.

        It also adds the log-probabilities of prompts to their requests.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        for request, start, found in self.extras.prompts:
            num_top = request.params.prompt_logprobs
            assert num_top is not None
            request.add_prompt_logprobs(start, found.fetch(num_top))
        tokens, highest = self._host.tolist(), self._host_highest.tolist()
        flat = [token if isfinite(one) else -1 for token, one in zip(tokens, highest)]
        if self.extras.num_rows is None and self.extras.logprobs is None:
            return [[SampledToken(token)] for token in flat]
        return self._by_sequence(flat)

    def _by_sequence(self, flat: list[int]) -> list[list[SampledToken]]:
        """Divides tokens and log-probabilities among the sequences, without rejected drafts."""
        extras = self.extras
        sizes = extras.num_rows or [1] * len(self.sequences)
        logprobs = self._logprobs(sizes)
        accepted = iter([] if self._host_accepted is None else self._host_accepted.tolist())
        new, start = [], 0
        for sequence, size in zip(self.sequences, sizes):
            tokens = [SampledToken(token) for token in flat[start : start + size]]
            start += size
            if sequence.request.params.logprobs is not None:
                tokens = [one._replace(logprobs=next(logprobs)) for one in tokens]
            new.append(tokens if size == 1 else tokens[: next(accepted) + 1])
        return new

    def _logprobs(self, sizes: list[int]) -> Iterator[TopLogprobs]:
        """The log-probabilities of the rows whose requests ask for them."""
        if self.extras.logprobs is None:
            return iter(())
        num_top = []
        for sequence, size in zip(self.sequences, sizes):
            wanted = sequence.request.params.logprobs
            num_top += [] if wanted is None else [wanted] * size
        return iter(self.extras.logprobs.fetch(num_top))
