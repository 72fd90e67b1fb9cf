"""Which sequence owns which block of a paged KV cache.

A cache is a pool of ``num_blocks`` blocks of ``block_size`` tokens. :class:`KVCacheManager` maps
sequence ids to tables of block ids; token ``i`` of a sequence lies in slot
``table[i // block_size] * block_size + i % block_size``. It holds no keys or values: it says where
they go (``slot_mapping`` for ``reshape_and_cache``) and where they are (``block_tables`` and
``seq_lens`` for ``paged_attention``), and which blocks are to be copied (``copy_blocks``).

Every call is all or nothing: whatever it raises, the manager and the buffers are as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm_kernels import _C
from vllm_kernels._C import (
    DuplicateSequence,
    IntegrityError,
    InvalidArgument,
    KVCacheError,
    OutOfBlocks,
    ReferenceOverflow,
    Statistics,
    UnknownSequence,
)

__all__ = [
    "BatchBuffers",
    "DuplicateSequence",
    "IntegrityError",
    "InvalidArgument",
    "KVCacheError",
    "KVCacheManager",
    "OutOfBlocks",
    "ReferenceOverflow",
    "Statistics",
    "UnknownSequence",
]

Buffer: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
Integers: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int]"
"""int64 (read in place) or int32 values of shape [n]: an array, a CPU tensor, or a list."""


class BatchBuffers:
    """The caller's memory that :meth:`KVCacheManager.step` and :meth:`~KVCacheManager.build` fill.

    NumPy arrays or CPU tensors (pinned ones too), checked once, here, and kept alive. Their shapes
    are those of the largest batch: what a batch does not fill is padded, so that the ops see fixed
    shapes under CUDA graphs.

    Args:
        block_tables: int32 [max_sequences, max_blocks]. Block ids of each sequence. Entries beyond
            a sequence's blocks are left as they are; no op reads them.
        seq_lens: int32 [max_sequences]. Tokens of each sequence; padding 0.
        query_start_loc: int32 [max_sequences + 1]. Where each sequence's query tokens start, then
            their number in all, to the end.
        slot_mapping: int64 [max_tokens]. Slot of each query token; padding -1 (skipped).
        positions: int64 [max_tokens], or None. Index of each query token in its sequence;
            padding 0.

    Raises:
        InvalidArgument: a dtype, shape or stride that does not fit, read-only or overlapping
            memory, or a tensor that is not on the CPU.
    """

    __slots__ = (
        "_native",
        "block_tables",
        "positions",
        "query_start_loc",
        "seq_lens",
        "slot_mapping",
    )

    def __init__(
        self,
        block_tables: Buffer,
        seq_lens: Buffer,
        query_start_loc: Buffer,
        slot_mapping: Buffer,
        positions: Buffer | None = None,
    ) -> None:
        self._native = _C.BatchBuffers(
            block_tables, seq_lens, query_start_loc, slot_mapping, positions
        )
        self.block_tables = block_tables
        self.seq_lens = seq_lens
        self.query_start_loc = query_start_loc
        self.slot_mapping = slot_mapping
        self.positions = positions

    @classmethod
    def zeros(
        cls, max_sequences: int, max_blocks: int, max_tokens: int, *, pin_memory: bool = False
    ) -> BatchBuffers:
        """Buffers of CPU tensors for ``max_sequences`` sequences of at most ``max_blocks`` blocks
        each, with ``max_tokens`` query tokens in all. Pinned memory copies to a GPU without a wait.
        """

        def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)

        return cls(
            tensor(max_sequences, max_blocks, dtype=torch.int32),
            tensor(max_sequences, dtype=torch.int32),
            tensor(max_sequences + 1, dtype=torch.int32),
            tensor(max_tokens, dtype=torch.int64),
            tensor(max_tokens, dtype=torch.int64),
        )


class KVCacheManager:
    """Block tables for many sequences over one pool of blocks.

    Sequence ids are any int64 values the caller likes. Sequences may share blocks (:meth:`fork`,
    :meth:`reorder`); one that grows within a shared block gets a block of its own, and the call
    returns the pair to copy.

    Copies: int64 [n, 2], rows of (source block, destination block), each returned once. Run them
    (``copy_blocks``, a call for the pairs of each manager call), in the order in which they were
    returned, before the cache is written again.

    Threads: calls from several threads are safe; they run one after the other, batch calls without
    the GIL. A fork of the process, a pickle or a copy of the manager is refused.

    Args:
        num_blocks: blocks of the cache, 1 to 2**31 - 2.
        block_size: tokens of a block, >= 1.
        max_references: how many sequences may share one block.

    Raises:
        InvalidArgument: a value out of range, or more slots than an int64 can number.
        MemoryError: no memory for the pool's 12 bytes a block.
    """

    __slots__ = ("_native", "block_size", "num_blocks")

    def __init__(
        self, num_blocks: int, block_size: int, *, max_references: int = 2**31 - 1
    ) -> None:
        self._native = _C.KVCacheManager(num_blocks, block_size, max_references)
        self.num_blocks = num_blocks
        self.block_size = block_size

    def __repr__(self) -> str:
        return (
            f"KVCacheManager(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"num_free_blocks={self.num_free_blocks}, num_sequences={self.num_sequences})"
        )

    def __reduce__(self) -> Any:
        return self._native.__reduce__()

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._native

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._native.num_free_blocks

    @property
    def num_sequences(self) -> int:
        """Sequences that are allocated."""
        return self._native.num_sequences

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether enough blocks are free for a new sequence of ``num_tokens`` tokens."""
        return self._native.can_allocate(num_tokens)

    # One sequence.

    def allocate(self, sequence_id: int, num_tokens: int) -> None:
        """Adds a sequence of ``num_tokens`` >= 0 tokens, with blocks of its own for them.

        Raises:
            DuplicateSequence: the id exists.
            OutOfBlocks: too few blocks are free (``.needed``, ``.free``).
        """
        self._native.allocate(sequence_id, num_tokens)

    def append(self, sequence_id: int, num_tokens: int = 1) -> npt.NDArray[np.int64]:
        """Lengthens a sequence by ``num_tokens`` >= 0 tokens.

        Returns:
            int64 [0 or 1, 2]: the pair to copy, where the last block was shared and partly filled.

        Raises:
            UnknownSequence: the id does not exist.
            OutOfBlocks: too few blocks are free for the tokens, or for the copy.
        """
        return self._native.append(sequence_id, num_tokens)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Adds sequence ``child_id`` with the tokens of ``parent_id``, sharing all of its blocks.

        Raises:
            UnknownSequence: the parent does not exist.
            DuplicateSequence: the child exists.
            ReferenceOverflow: a block is shared by ``max_references`` sequences already.
        """
        self._native.fork(parent_id, child_id)

    def free(self, sequence_id: int) -> None:
        """Forgets a sequence; blocks that no other one holds become free, the last one first.

        Raises:
            UnknownSequence: the id does not exist (any more).
        """
        self._native.free(sequence_id)

    def truncate(self, sequence_id: int, num_tokens: int) -> None:
        """Shortens a sequence to its first ``num_tokens`` tokens, 0 to as many as it has.

        Raises:
            UnknownSequence: the id does not exist.
            InvalidArgument: ``num_tokens`` is negative or more than the sequence has.
        """
        self._native.truncate(sequence_id, num_tokens)

    def num_tokens(self, sequence_id: int) -> int:
        """Tokens of a sequence. Raises UnknownSequence."""
        return self._native.num_tokens(sequence_id)

    def block_table(self, sequence_id: int) -> npt.NDArray[np.int32]:
        """Block ids of a sequence: int32 [ceil(tokens / block_size)], a copy.

        Raises UnknownSequence.
        """
        return self._native.block_table(sequence_id)

    def slot_mapping(
        self, sequence_id: int, start: int = 0, num_tokens: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Slots of ``num_tokens`` tokens from ``start`` on (None: to the end): int64 [num_tokens].

        Raises UnknownSequence, and InvalidArgument for a range outside the sequence.
        """
        return self._native.slot_mapping(sequence_id, start, num_tokens)

    def sequence_ids(self) -> list[int]:
        """Ids of all sequences, in no order."""
        return self._native.sequence_ids()

    # Many sequences in one call. The ids of one batch are distinct; counts are one for each of
    # them, or one int for all.

    def allocate_batch(self, sequence_ids: Integers, num_tokens: Integers | int) -> None:
        """:meth:`allocate` for many sequences: all of them, or an error and none."""
        self._native.allocate_batch(sequence_ids, num_tokens)

    def append_batch(
        self, sequence_ids: Integers, num_tokens: Integers | int = 1
    ) -> npt.NDArray[np.int64]:
        """:meth:`append` for many sequences: all of them, or an error and none.

        Returns:
            int64 [n, 2]: the pairs to copy.
        """
        return self._native.append_batch(sequence_ids, num_tokens)

    def free_batch(self, sequence_ids: Integers) -> None:
        """:meth:`free` for many sequences: all of them, or an error and none."""
        self._native.free_batch(sequence_ids)

    def truncate_batch(self, sequence_ids: Integers, num_tokens: Integers | int) -> None:
        """:meth:`truncate` for many sequences: all of them, or an error and none."""
        self._native.truncate_batch(sequence_ids, num_tokens)

    def reorder(self, sequence_ids: Integers, parent_ids: Integers) -> None:
        """Beam search: ``sequence_ids[i]`` becomes what ``parent_ids[i]`` was before the call.

        It shares the parent's blocks and gives its own back. Parents may repeat; they may also be
        sequences that are not reordered themselves.

        Raises:
            UnknownSequence: an id or a parent does not exist.
            DuplicateSequence: an id stands twice in ``sequence_ids``.
            ReferenceOverflow: a block would be shared by more than ``max_references`` sequences,
                counting those that are about to give it back.
        """
        self._native.reorder(sequence_ids, parent_ids)

    def build(
        self, sequence_ids: Integers, num_query_tokens: Integers | int, buffers: BatchBuffers
    ) -> None:
        """Fills ``buffers`` for a pass over the last ``num_query_tokens[i]`` tokens of each
        sequence, which it holds already (a prompt after :meth:`allocate`).

        Raises:
            UnknownSequence, DuplicateSequence: an id does not exist, or stands twice.
            InvalidArgument: more query tokens than a sequence has, or a batch that the buffers have
                no room for.
        """
        self._native.build(sequence_ids, num_query_tokens, buffers._native)

    def step(
        self, sequence_ids: Integers, num_tokens: Integers | int, buffers: BatchBuffers
    ) -> npt.NDArray[np.int64]:
        """:meth:`append_batch` and :meth:`build` in one: the appended tokens are the query tokens.

        Returns:
            int64 [n, 2]: the pairs to copy before the new tokens are written.

        Raises:
            The errors of :meth:`append_batch` and of :meth:`build`.
        """
        return self._native.step(sequence_ids, num_tokens, buffers._native)

    # All sequences.

    def reset(self) -> None:
        """Forgets every sequence and sets the statistics to zero."""
        self._native.reset()

    def statistics(self) -> Statistics:
        """How full the cache is at this moment; the fields are described in ``Statistics``."""
        return self._native.statistics()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless counts, tables and free list agree. Reads all of them."""
        self._native.check_integrity()
