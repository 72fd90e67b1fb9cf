"""Draws the tokens of a pass. Each row follows the parameters of its own request.

The parameters lie on the device. They are uploaded when the rows of a pass change, not for each
token. A CUDA graph reads them at fixed addresses, so one graph serves every mixture of requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ... import sample
from ...errors import InvalidArgument
from ..request import Sequence
from ..upload import upload
from .constraints import Constraints, num_words
from .token_counts import CountLists

__all__ = ["Sampler"]

_FLOATS = ("temperature", "top_p", "min_p")
_PENALTIES = ("repetition", "frequency", "presence")


class Sampler:
    """Draws a token per row, in one launch.

    Call :meth:`prepare` with the sequence of each row, then :meth:`draw`. A CUDA graph contains
    ``draw``, and ``prepare`` precedes its replay.

    Args:
        max_rows: Maximum number of rows.
        vocabulary: Number of logits per row.
        device: Device of the logits.
    """

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocabulary = vocabulary
        self._device = device
        self._sequences: list[Sequence] = []  # of the uploaded parameters
        self._constraints: dict[int, Constraints] = {}  # by row
        self._banned: dict[int, frozenset[int]] = {}  # by row
        self._masked: list[int] = []  # rows whose mask changes with each token
        self._bitmask_of_row: dict[int, npt.NDArray[np.int32]] = {}
        self.errors: dict[Sequence, Exception] = {}  # of masks, since the last prepare()
        self._floats = torch.zeros(6, max_rows, device=device)
        self._top_k = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._mask_rows = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self._bitmask = torch.zeros(
            max_rows, num_words(vocabulary), dtype=torch.int32, device=device
        )
        self._counts = CountLists(max_rows, device)
        self._bias_indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._bias_size = self._bias_generation = 0
        self._allocate_bias(1024)
        self.has_penalties = False

    @property
    def generation(self) -> int:
        """Counts the tensors that were replaced. Then older CUDA graphs must not replay."""
        return self._bias_generation + self._counts.generation

    def invalidate(self) -> None:
        """Forgets the uploaded parameters, after a pass that failed."""
        self._sequences, self._constraints, self._masked = [], {}, []

    def prepare(self, sequences: list[Sequence]) -> None:
        """Uploads the parameters of the next rows, as far as they changed.

        Args:
            sequences: The sequence of each row. It may have one token that only the device knows.
        """
        self.errors = {}
        is_same = sequences == self._sequences
        if not is_same:
            self._sequences = []  # until all is uploaded
            self._upload_numbers(sequences)
            self._constraints = {
                row: sequence.request.constraints
                for row, sequence in enumerate(sequences)
                if sequence.request.constraints is not None
            }
        banned = {row: one.banned(sequences[row]) for row, one in self._constraints.items()}
        if not is_same or banned != self._banned:
            self._banned = banned
            self._upload_bias()
        if not is_same or self._masked:
            self._upload_masks(sequences, not is_same)
        if self.has_penalties and (self._counts.needs_load() or not is_same):
            self._counts.load(sequences)
        self._sequences = list(sequences)

    def draw(
        self,
        logits: Tensor,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor | None = None,
        is_captured: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draws the next token of every row that :meth:`prepare` got. Without synchronisation.

        The random number of a token depends on its sequence's seed and its position alone. So a
        repeated pass draws the same, in any batch.

        Args:
            logits: [rows, vocabulary], any float dtype. Not modified.
            input_ids: int64 [n], the token before each drawn one.
            positions: int64 [n], their positions.
            rows: int32 [n], the row of logits of each token. None means i.
            is_captured: Whether a CUDA graph captures this call, for any later parameters.

        Returns:
            Tokens, int64 [n], and the model's logits of these tokens, [n]. Such a logit is not
            finite if the row has NaN or +inf, or only -inf. The token means nothing then.
        """
        n = len(input_ids)
        options: dict[str, Any] = {
            name: self._floats[at, :n] for at, name in enumerate(_FLOATS + _PENALTIES)
        }
        if self.has_penalties:
            self._counts.append(input_ids, positions)
            options["token_counts"] = self._counts.lists(n, is_captured)
        else:
            options |= dict.fromkeys(_PENALTIES)
        if self._bias_size or is_captured:
            end = None if is_captured else self._bias_size
            options["bias"] = (
                self._bias_indptr[: n + 1], self._bias_tokens[:end], self._bias_values[:end]
            )  # fmt: skip
        if self._bitmask_of_row or is_captured:
            options |= {"bitmask": self._bitmask, "bitmask_rows": self._mask_rows[:n]}
        tokens = sample(
            logits, top_k=self._top_k[:n], seeds=self._seeds[:n], offsets=positions, rows=rows,
            **options,
        )  # fmt: skip
        if rows is None:
            return tokens, logits.gather(1, tokens[:, None])[:, 0]
        return tokens, logits[rows.long(), tokens]

    # Inner workings.

    def _upload_numbers(self, sequences: list[Sequence]) -> None:
        params = [sequence.request.params for sequence in sequences]
        n = len(params)
        floats = np.array(
            [
                (
                    p.temperature, p.top_p, p.min_p,
                    p.repetition_penalty, p.frequency_penalty, p.presence_penalty,
                )
                for p in params
            ],
            np.float32,
        ).reshape(n, 6)  # fmt: skip
        # Rows of padding are greedy.
        padded = np.zeros((6, self.max_rows), np.float32)
        padded[:, :n] = floats.T
        self._floats.copy_(upload(padded, self._device))
        self._top_k[:n] = upload([p.top_k for p in params], self._device, torch.int32)
        self._seeds[:n] = upload([s.seed for s in sequences], self._device, torch.int64)
        self.has_penalties = any(p.has_penalties for p in params)

    def _allocate_bias(self, capacity: int) -> None:
        self._bias_tokens = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        self._bias_values = torch.zeros(capacity, device=self._device)

    def _upload_bias(self) -> None:
        sizes = np.zeros(self.max_rows + 1, np.int64)
        tokens: list[int] = []
        values: list[float] = []
        for row, banned in self._banned.items():
            bias = self._constraints[row].bias
            if banned:
                bias = bias | dict.fromkeys(banned, -np.inf)
            sizes[row + 1] = len(bias)
            tokens += bias
            values += bias.values()
        if not tokens and not self._bias_size:
            return
        self._bias_size = len(tokens)
        if len(tokens) > len(self._bias_tokens):
            self._allocate_bias(2 * len(tokens))
            self._bias_generation += 1
        self._bias_indptr.copy_(upload(sizes.cumsum().astype(np.int32), self._device))
        self._bias_tokens[: len(tokens)] = upload(tokens, self._device, torch.int32)
        self._bias_values[: len(tokens)] = upload(values, self._device, torch.float32)

    def _upload_masks(self, sequences: list[Sequence], is_new: bool) -> None:
        """Fills the bitmasks of rows, and uploads them side by side."""
        if is_new:
            had_any = bool(self._bitmask_of_row)
            self._masked, self._bitmask_of_row = [], {}
            for row, sequence in enumerate(sequences):
                constraints = sequence.request.constraints
                if sequence.request.params.logits_mask is not None:
                    self._masked.append(row)
                elif constraints is not None and constraints.allowed is not None:
                    self._bitmask_of_row[row] = constraints.allowed
            if not (had_any or self._masked or self._bitmask_of_row):
                return
        for row in self._masked:
            self._bitmask_of_row[row] = self._mask(sequences[row])
        count = len(self._bitmask_of_row)
        if count:
            some = np.stack(list(self._bitmask_of_row.values()))
            self._bitmask[:count].copy_(upload(some, self._device))
        if is_new:
            places = np.full(self.max_rows, -1, np.int32)
            places[list(self._bitmask_of_row)] = np.arange(count)
            self._mask_rows.copy_(upload(places, self._device))

    def _mask(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """Returns the words of a sequence's mask. If it fails, all tokens are allowed."""
        words = torch.full((1, num_words(self.vocabulary)), -1, dtype=torch.int32)
        constraints = sequence.request.constraints
        try:
            if sequence.mask is None:
                make = sequence.request.params.logits_mask
                assert make is not None
                mask = make()
                if not hasattr(mask, "fill_next_token_bitmask"):
                    raise InvalidArgument(
                        f"Engine: request {sequence.request.id}: logits_mask: expected an object "
                        f"with fill_next_token_bitmask, got {type(mask).__name__}"
                    )
                sequence.mask = mask
            sequence.mask.fill_next_token_bitmask(words, 0)
            if constraints is not None and constraints.allowed is not None:
                words &= torch.from_numpy(constraints.allowed)
            if not words.any():
                raise InvalidArgument(
                    f"Engine: request {sequence.request.id}: logits_mask: expected an allowed "
                    f"token for output token {sequence.num_sampled}, got none"
                )
        except Exception as error:
            self.errors[sequence] = error
            words.fill_(-1)
        return words[0].numpy()
