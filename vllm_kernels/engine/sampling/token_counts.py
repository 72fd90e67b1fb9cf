"""How often each token came: lists for the penalties, kept on the device.

The host counts the tokens of a sequence that it knows. The device counts the token that a pass
feeds, because the host may not know it yet.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ... import append_token_counts
from ..request import Sequence
from ..upload import upload

__all__ = ["CountLists", "TokenCounts"]

_GROWTH = 256
"""Free entries per row. After so many new tokens the host makes the lists again."""
_ENTRIES_PER_ROW = 512
"""Room at first. More room makes CUDA graphs invalid."""
_NO_TOKEN = -1  # an entry that the op skips


class TokenCounts:
    """The distinct tokens of one sequence, in order of arrival, and how often the output has each.

    A count of 0 means that only the prompt has the token.
    """

    def __init__(self, prompt: Items[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(distinct)}
        self._tokens = np.array(distinct, np.int32)
        self._counts = np.zeros(len(distinct), np.int32)
        self.num_known = len(prompt)

    def upto(
        self, tokens: Items[int], end: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Returns distinct tokens and counts of tokens[:end]. ``end`` never falls."""
        for token in tokens[self.num_known : end]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                more = max(64, place)
                self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(more, np.int32)])
            self._tokens[place] = token
            self._counts[place] += 1
        self.num_known = max(self.num_known, end)
        size = len(self._places)
        return self._tokens[:size], self._counts[:size]


class CountLists:
    """Lists of (token, count) for the rows of a pass, on the device.

    Row i has entries [indptr[i], indptr[i + 1]). Some at its end are free, with token -1. A row
    without penalties has none. CUDA graphs use the tensors, so they keep their addresses until
    :meth:`load` needs more room and counts up ``generation``.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._rows = max_rows
        self._device = device
        self.generation = 0
        self.size = 0  # number of entries of all rows
        self._num_left = 0  # number of passes until a row may be full
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._next_positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._allocate(_ENTRIES_PER_ROW * max_rows)

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = torch.full((capacity,), _NO_TOKEN, dtype=torch.int32, device=self._device)
        self._counts = torch.zeros(capacity, dtype=torch.int32, device=self._device)

    def lists(self, num_rows: int, is_captured: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the lists for the op. A CUDA graph needs all entries that may be used."""
        size = self._capacity if is_captured else self.size
        return self.indptr[: num_rows + 1], self._tokens[:size], self._counts[:size]

    def needs_load(self) -> bool:
        """Whether a row may be full. Call it once per pass over the same rows."""
        self._num_left -= 1
        return self._num_left < 0

    def load(self, sequences: list[Sequence]) -> None:
        """Counts all tokens before the ones that the next pass feeds. They are known."""
        lengths, next_positions = np.zeros(self._rows, np.int32), np.zeros(self._rows, np.int64)
        tokens, counts, sizes = [], [], np.zeros(self._rows + 1, np.int64)
        for row, sequence in enumerate(sequences):
            if not sequence.request.params.has_penalties:
                continue
            if sequence.counts is None:
                sequence.counts = TokenCounts(sequence.request.prompt)
            some, how_often = sequence.counts.upto(sequence.tokens, sequence.length - 1)
            tokens += [some, np.full(_GROWTH, _NO_TOKEN, np.int32)]
            counts += [how_often, np.zeros(_GROWTH, np.int32)]
            sizes[row + 1] = len(some) + _GROWTH
            # A token may be known that a failed pass counted ahead.
            lengths[row], next_positions[row] = len(some), sequence.counts.num_known
        self.size, self._num_left = int(sizes.sum()), _GROWTH - 1
        if self.size > self._capacity:
            self._allocate(2 * self.size)
            self.generation += 1
        self._lengths.copy_(upload(lengths, self._device))
        self._next_positions.copy_(upload(next_positions, self._device))
        self.indptr.copy_(upload(sizes.cumsum().astype(np.int32), self._device))
        self._tokens.fill_(_NO_TOKEN)
        if tokens:
            self._tokens[: self.size] = upload(np.concatenate(tokens), self._device)
            self._counts[: self.size] = upload(np.concatenate(counts), self._device)

    def append(self, input_ids: Tensor, positions: Tensor) -> None:
        """Counts the tokens that this pass feeds. Without synchronisation, for CUDA graphs.

        A position that is counted already is not counted again, so a pass may be repeated.

        Args:
            input_ids: int64 [n], the last token of each row.
            positions: int64 [n], their positions.
        """
        n = len(input_ids)
        append_token_counts(
            self._tokens, self._counts, self._lengths[:n], self.indptr[: n + 1], input_ids,
            positions, self._next_positions[:n],
        )  # fmt: skip
