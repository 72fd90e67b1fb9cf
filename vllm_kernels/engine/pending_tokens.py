"""Sampled tokens on their way from the device to the host."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from .request import Sequence
from .upload import upload

__all__ = ["PendingTokens"]


class PendingTokens:
    """Sampled tokens of one pass. The constructor starts their copy to the host.

    Args:
        sequences: The sequences that get a token, in row order.
        tokens: int64 [len(sequences)], on the device.
        highest: The highest logit of each row, on the device.
    """

    def __init__(self, sequences: list[Sequence], tokens: Tensor, highest: Tensor) -> None:
        self.sequences = sequences
        self._order = sequences
        self._tokens = tokens
        self._arrived: torch.cuda.Event | None = None
        self._host, self._host_highest = tokens, highest
        if tokens.device.type == "cuda":
            self._host, self._host_highest = _to_host(tokens), _to_host(highest)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tokens_of(self, sequences: list[Sequence]) -> Tensor:
        """Returns the tokens of some of the sequences, on the device."""
        if sequences == self._order:
            return self._tokens
        row = {sequence: at for at, sequence in enumerate(self._order)}
        rows = upload([row[sequence] for sequence in sequences], self._tokens.device)
        return self._tokens[rows]

    def fetch(self) -> list[int]:
        """Waits for the pass and returns all tokens. -1 marks NaN or infinite logits."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, highest = self._host.tolist(), self._host_highest.tolist()
        return [token if isfinite(one) else -1 for token, one in zip(tokens, highest)]


def _to_host(tensor: Tensor) -> Tensor:
    """Starts a copy into pinned memory."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
