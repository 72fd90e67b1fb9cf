"""The plan of a forward pass, the scheduler's counters, and what a sequence needs of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..kv_cache import KVCacheManager
from .request import Sequence

__all__ = ["Copies", "Plan", "SchedulerStatistics", "blocks_at_most", "num_usable_blocks"]


@dataclass
class Copies:
    """Block copies that must precede the pass."""

    kind: str  # "copy", "swap_out" or "swap_in"
    pairs: npt.NDArray[np.int64]  # [n, 2], (source, destination)


@dataclass
class Plan:
    """One forward pass."""

    sequences: list[Sequence]  # sequences with one token come first
    counts: list[int]  # number of tokens per sequence
    input_ids: npt.NDArray[np.int64] | None  # [num_tokens]; None: the tokens of the last pass
    copies: list[Copies]
    num_common_blocks: int = 0
    """Number of leading blocks that all one-token sequences share. 0 also means not counted.

    It holds for every layer group without a window.
    """
    drafts: Mapping[Sequence, list[int]] = field(default_factory=dict)
    """Drafted tokens, which are the last ones of their sequences in ``input_ids``."""
    num_logits: list[int] = field(init=False)
    """Number of last tokens of each sequence whose logits are needed."""
    with_prompt_logits: frozenset[Sequence] = field(init=False)
    """Sequences whose tokens all need logits, for log-probabilities of the prompt."""
    num_decoding: int = field(init=False)
    """Number of leading sequences with one token, which is no prompt token."""

    def __post_init__(self) -> None:
        self.with_prompt_logits = frozenset(
            sequence for sequence in self.sequences if sequence.wants_prompt_logprobs
        )
        self.num_logits = [
            count
            if sequence in self.drafts or sequence in self.with_prompt_logits
            else int(sequence.num_to_compute == count)
            for sequence, count in zip(self.sequences, self.counts)
        ]
        self.num_decoding = sum(
            count == 1 and sequence.is_decoding
            for sequence, count in zip(self.sequences, self.counts)
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(self.counts)

    @property
    def num_single(self) -> int:
        """The number of leading sequences with one token."""
        return self.counts.count(1)


@dataclass
class SchedulerStatistics:
    """Counters since the start or the last reset.

    Args:
        num_steps: Number of passes.
        num_tokens: Number of computed tokens. Recomputed ones count again.
        num_swapped: Number of preemptions that swapped to the host.
        num_recomputed: Number of preemptions that freed the blocks.
        num_cached_tokens: Number of prompt tokens that the prefix cache had at first admission.
        num_prompt_tokens: Number of prompt tokens of admitted requests. Each counts once.
        num_failed_passes: Number of passes that failed and were recomputed.
        num_errors: Number of requests that ended with ``FinishReason.ERROR``.
        num_non_finite: Number of these whose logits were NaN or infinite.
        num_drafted: Number of drafted tokens that were verified.
        num_accepted: Number of drafted tokens that became output.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_swapped: int = 0
    num_recomputed: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_failed_passes: int = 0
    num_errors: int = 0
    num_non_finite: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def blocks_at_most(num_tokens: int, manager: KVCacheManager, max_batch_tokens: int) -> int:
    """Returns the most blocks that a sequence of ``num_tokens`` ever holds."""
    needed = 0
    for window in manager.windows:
        # Each step frees blocks before the window, so a sequence holds window + step.
        held = min(num_tokens, window + max_batch_tokens) if window else num_tokens
        needed += -(-held // manager.block_size) + (1 if window else 0)
    return needed


def num_usable_blocks(manager: KVCacheManager) -> int:
    """Returns the number of blocks that sequences may hold."""
    return manager.num_blocks - (manager.null_block is not None)
