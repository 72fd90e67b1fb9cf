"""Which sequences start to run in a pass, and how many of their tokens."""

from __future__ import annotations

import numpy as np

from ...kv_cache import KVCacheManager
from ..plan import Copies, SchedulerStatistics
from ..request import Sequence
from .queues import Queues

__all__ = ["Admission", "chunk"]

_MAX_PROMPT_LOGITS = 256
"""Maximum number of tokens per pass and sequence whose logits are all kept."""


class Admission:
    """Admits sequences that wait or are swapped out. :class:`Scheduler` names the rules.

    Args:
        manager: The KV-cache manager.
        queues: The scheduler's queues.
        max_batch_size: Maximum number of sequences per pass.
        max_batch_tokens: Maximum number of tokens per pass.
        prefix_caching: Whether the manager shares blocks of running sequences.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        queues: Queues,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        prefix_caching: bool,
    ) -> None:
        self.manager = manager
        self.watermark_blocks = max(1, manager.num_blocks // 100)
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.prefix_caching = prefix_caching
        self._queues = queues

    def admit(
        self,
        chosen: dict[Sequence, int],
        budget: int,
        copies: list[Copies],
        statistics: SchedulerStatistics,
    ) -> list[Sequence]:
        """Admits sequences that fit, swapped ones before waiting ones, in order of arrival."""
        queues = self._queues
        if not queues.swapped and not queues.waiting:
            return []
        places = self._places()
        while queues.swapped and places and budget:
            sequence = queues.swapped[0]
            needed = self._blocks(len(sequence.tokens))
            if not self.manager.can_swap_in([sequence.id]) or self._is_tight(needed):
                return []
            copies.append(Copies("swap_in", self.manager.swap_in([sequence.id])))
            queues.swapped.popleft()
            queues.run(sequence)
            chosen[sequence] = chunk(sequence, budget)
            budget -= chosen[sequence]
            places -= 1
        if queues.swapped:
            return []
        admitted: list[Sequence] = []
        # Blocks that running prompts still need. Admission counted all of their tokens.
        promised = sum(self._blocks(sequence.num_to_compute) for sequence in queues.running)
        while queues.waiting and budget:
            sequence = queues.waiting[0]
            if places < sequence.width:
                break
            tokens = np.array(sequence.tokens, np.int32)
            # can_allocate counts the whole prompt in every group, although a window holds less.
            # If nothing else runs, the check in add() is enough.
            salt = sequence.request.salt
            if queues.running and not self.manager.can_allocate(tokens, salt=salt):
                break
            matched = self.manager.match(tokens, salt=salt)
            needed = self._blocks(len(tokens) - matched)
            if self._is_tight(promised + needed) or self._comes(sequence, matched, chosen):
                break
            cached = self.manager.allocate(sequence.id, tokens, num_new=0, salt=salt)
            queues.waiting.popleft()
            queues.run(sequence)
            _count_cached(sequence, cached, statistics)
            admitted.append(sequence)
            promised += needed
            places -= sequence.width
            chosen[sequence] = chunk(sequence, budget)
            budget -= chosen[sequence]
        return admitted

    def may_admit(self, sequence: Sequence) -> bool:
        """Whether :meth:`admit` may admit a waiting sequence. This is an estimate."""
        if self._places() < sequence.width:
            return False
        tokens = np.array(sequence.tokens, np.int32)
        return self.manager.can_allocate(tokens, salt=sequence.request.salt)

    def _comes(self, sequence: Sequence, matched: int, chosen: dict[Sequence, int]) -> bool:
        """Whether this pass computes a prefix that ``sequence`` should wait for.

        The prefix must be half of its missing tokens and an eighth of ``max_batch_tokens``.
        """
        if not self.prefix_caching:
            return False
        tokens, block = sequence.tokens, self.manager.block_size
        min_common = max((len(tokens) - matched + 1) // 2, self.max_batch_tokens // 8, 1)
        for other, num_tokens in chosen.items():
            until = min(other.num_computed + num_tokens, len(tokens) - 1) // block * block
            if (
                num_tokens == 1
                or until - matched < min_common
                or other.request.salt != sequence.request.salt
                or other.tokens[matched : matched + block] != tokens[matched : matched + block]
            ):
                continue
            differs = np.array(tokens[:until]) != np.array(other.tokens[:until])
            common = int(differs.argmax()) // block * block if differs.any() else until
            if common - matched >= min_common:
                return True
        return False

    def _places(self) -> int:
        """Returns the number of sequences that may still be admitted."""
        return self.max_batch_size - sum(sequence.width for sequence in self._queues.running)

    def _is_tight(self, needed: int) -> bool:
        """Whether ``needed`` blocks would leave too few for the running sequences."""
        free = self.manager.num_free_blocks - self.watermark_blocks
        return bool(self._queues.running) and needed > free

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.manager.block_size) * self.manager.num_groups


def chunk(sequence: Sequence, budget: int) -> int:
    """Returns the number of tokens to compute next. Logits of many tokens need memory."""
    if sequence.wants_prompt_logprobs:
        budget = min(budget, _MAX_PROMPT_LOGITS)
    return min(sequence.num_to_compute, budget)


def _count_cached(sequence: Sequence, cached: int, statistics: SchedulerStatistics) -> None:
    sequence.num_computed = cached
    request = sequence.request
    if request.num_cached_tokens is None:  # first admission, not a recomputation
        request.num_cached_tokens = cached
        statistics.num_cached_tokens += cached
        statistics.num_prompt_tokens += len(sequence.tokens)
