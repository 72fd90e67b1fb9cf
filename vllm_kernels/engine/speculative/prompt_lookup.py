"""Drafts tokens by looking up the last ones in what came before."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from ..request import Sequence
from .options import PromptLookup

__all__ = ["PromptLookupDrafter"]


class PromptLookupDrafter:
    """Drafts by :class:`PromptLookup`."""

    def __init__(self, options: PromptLookup) -> None:
        self.num_tokens = options.num_tokens
        self._sizes = range(options.max_ngram, options.min_ngram - 1, -1)
        self._indexes: WeakKeyDictionary[Sequence, _Index] = WeakKeyDictionary()

    def propose(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """Returns drafts of the sequences whose last tokens came before."""
        drafts = {}
        for sequence in sequences:
            index = self._indexes.setdefault(sequence, _Index(self._sizes))
            start = index.find(sequence.tokens)
            if start is not None:
                drafts[sequence] = _continued(sequence.tokens, start, self.num_tokens)
        return drafts

    def reset(self) -> None:
        """Forgets all sequences."""
        self._indexes.clear()


class _Index:
    """Where each n-gram of a sequence ended last."""

    def __init__(self, sizes: range) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._num_indexed = 0

    def find(self, tokens: list[int]) -> int | None:
        """Returns the place after the longest n-gram that also ends ``tokens``, or None."""
        for end in range(self._num_indexed + 1, len(tokens)):  # the last token is only looked up
            for size, ends in self._ends.items():
                if end >= size:
                    ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
        for size, ends in self._ends.items():
            found = ends.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if found is not None:
                return found
        return None


def _continued(tokens: list[int], start: int, count: int) -> list[int]:
    """Returns ``count`` tokens from ``start`` on. Past the end they repeat."""
    period = len(tokens) - start
    return [tokens[start + at % period] for at in range(count)]
