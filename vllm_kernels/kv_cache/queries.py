"""What a manager answers about its sequences and its blocks. Nothing here changes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .. import _C
from .._C import Statistics
from .arguments import Integers, MultimodalItem, Tokens

__all__ = ["Queries"]


class Queries:
    """The calls of a :class:`~vllm_kernels.kv_cache.KVCacheManager` that only read. It is their
    one base class, and makes what they read."""

    __slots__ = ("_native", "windows")
    _native: _C.KVCacheManager
    windows: tuple[int, ...]

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._native

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with block tables of its own."""
        return len(self.windows)

    @property
    def null_block(self) -> int | None:
        """The block that is never given out, 0, or None."""
        return 0 if self._native.has_null_block else None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included; they can be allocated."""
        return self._native.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that no sequence holds."""
        return self._native.num_free_host_blocks

    @property
    def num_sequences(self) -> int:
        """Sequences that are allocated, swapped ones included."""
        return self._native.num_sequences

    # Would it fit?

    def match(
        self,
        tokens: Tokens,
        *,
        salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
        cache_dtype: bytes | str | None = None,
        multimodal: Sequence[MultimodalItem] = (),
    ) -> int:
        """How many leading ones of ``tokens`` :meth:`allocate` would find cached; changes nothing.

        Whole blocks, and fewer than all tokens: at least one is left to compute.
        """
        return self._native.match(tokens, salt, adapter, cache_dtype, multimodal)

    def can_allocate(
        self,
        tokens: int | Tokens,
        *,
        salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
        cache_dtype: bytes | str | None = None,
        multimodal: Sequence[MultimodalItem] = (),
    ) -> bool:
        """Whether enough blocks are free for all of a new sequence: of so many tokens, or of these
        ones, without those that are cached."""
        return self._native.can_allocate(tokens, salt, adapter, cache_dtype, multimodal)

    def can_swap_out(self, sequence_ids: Integers) -> bool:
        """Whether enough host blocks are free."""
        return self._native.can_swap_out(sequence_ids)

    def can_swap_in(self, sequence_ids: Integers) -> bool:
        """Whether enough blocks are free, the watermark included if other sequences run."""
        return self._native.can_swap_in(sequence_ids)

    # One sequence.

    def num_tokens(self, sequence_id: int) -> int:
        """Tokens of a sequence. Raises UnknownSequence."""
        return self._native.num_tokens(sequence_id)

    def num_local_tokens(self, sequence_id: int) -> int:
        """The tokens of this rank among them: all of them without shards. Raises
        UnknownSequence."""
        return self._native.num_local_tokens(sequence_id)

    def num_known_tokens(self, sequence_id: int) -> int:
        """Leading tokens whose ids are known, -1 if the manager does not track them (any more:
        no prefix caching, or :meth:`reset_prefix_cache`). Raises UnknownSequence."""
        return self._native.num_known_tokens(sequence_id)

    def is_swapped(self, sequence_id: int) -> bool:
        """Whether the sequence is in host blocks. Raises UnknownSequence."""
        return self._native.is_swapped(sequence_id)

    def block_table(self, sequence_id: int, *, group: int = 0) -> npt.NDArray[np.int32]:
        """Block ids of a sequence: int32 [ceil(tokens / block_size)], a copy; more with
        lookahead, 0 for blocks before the window. Of a swapped one, host blocks (-1 there).

        Raises UnknownSequence.
        """
        return self._native.block_table(sequence_id, group)

    def slot_mapping(
        self, sequence_id: int, start: int = 0, num_tokens: int | None = None, *, group: int = 0
    ) -> npt.NDArray[np.int64]:
        """Slots of ``num_tokens`` tokens from ``start`` on (None: to the end): int64 [num_tokens];
        -1 before the window.

        Raises UnknownSequence, and InvalidArgument for a range outside the sequence.
        """
        return self._native.slot_mapping(sequence_id, start, num_tokens, group)

    # Many sequences.

    def sequence_ids(self) -> list[int]:
        """Ids of all sequences, in no order."""
        return self._native.sequence_ids()

    def num_common_prefix_blocks(self, sequence_ids: Integers, *, group: int = 0) -> int:
        """Leading blocks, filled, that are the same in all of the sequences (cascade attention)."""
        return self._native.num_common_prefix_blocks(sequence_ids, group)

    # The whole cache.

    def statistics(self) -> Statistics:
        """How full the cache is at this moment; the fields are described in ``Statistics``."""
        return self._native.statistics()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, tables, prefixes and free lists agree. Reads all of
        them."""
        self._native.check_integrity()
