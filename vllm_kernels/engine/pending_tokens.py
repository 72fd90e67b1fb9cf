"""Sampled tokens on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kernels.engine.request import Sequence
from vllm_kernels.engine.upload import upload

__all__ = ["PendingTokens"]


class PendingTokens:
    """Sampled tokens of one pass. The constructor starts their copy to the host.

    Args:
        sequences: The sequences that get a token, in row order.
        tokens: int64 [len(sequences)], on the device.
    """

    def __init__(self, sequences: list[Sequence], tokens: Tensor) -> None:
        self.sequences = sequences
        self._order = sequences
        self._tokens = tokens
        self._host = tokens
        self._arrived: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tokens_of(self, sequences: list[Sequence]) -> Tensor:
        """Returns the tokens of some of the sequences, on the device.

        The next pass embeds them, so -1 (non-finite logits) becomes 0. Its result is dropped.
        """
        tokens = self._tokens.clamp_min(0)
        if sequences == self._order:
            return tokens
        row = {sequence: at for at, sequence in enumerate(self._order)}
        rows = upload([row[sequence] for sequence in sequences], tokens.device)
        return tokens[rows]

    def fetch(self) -> list[int]:
        """Waits for the pass and returns all tokens."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
