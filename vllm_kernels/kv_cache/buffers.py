"""The caller's memory that a batch is written into."""

from __future__ import annotations

from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .. import _C
from .._C import InvalidArgument

__all__ = ["BatchBuffers"]

Buffer: TypeAlias = "torch.Tensor | npt.NDArray[Any]"


class BatchBuffers:
    """The caller's memory that :meth:`KVCacheManager.step` and :meth:`~KVCacheManager.build` fill.

    NumPy arrays or CPU tensors (pinned ones too), checked once, here, and kept alive. Their shapes
    are those of the largest batch. The rest of a batch is padded, so that the ops get fixed shapes
    under CUDA graphs: the first ``n`` rows are a batch of ``n``, for every ``n`` from the batch's
    own size up.

    Only changes since the last call are written: the new block ids of a sequence that keeps its
    row, and padding over the rows of the last batch. So nobody else may write to these
    buffers, or :meth:`invalidate` must be called afterwards. A cache with several groups of layers
    has one of these for each.

    Args:
        block_tables: int32 [max_sequences, max_blocks]. Block ids of each sequence. Entries beyond
            a sequence's blocks are left as they are; no op reads them.
        seq_lens: int32 [max_sequences]. Tokens of each sequence on this rank; padding 0.
        query_start_loc: int32 [max_sequences + 1]. Where each sequence's query tokens start, then
            their number in all, to the end.
        slot_mapping: int64 [max_tokens]. Slot of each query token; -1 (skipped) for padding and
            for tokens on other ranks.
        positions: int64 [max_tokens], or None. Index of each query token in its sequence;
            padding 0.

    Raises:
        InvalidArgument: a dtype, shape or stride that does not fit, read-only or overlapping
            memory, or a tensor that is not on the CPU.

    Example:
        >>> from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager
        >>> buffers = BatchBuffers.zeros(max_sequences=2, max_blocks=4, max_tokens=6)
        >>> manager = KVCacheManager(num_blocks=8, block_size=4)
        >>> manager.allocate_batch([1, 2], 0)
        >>> copies = manager.step([1, 2], [3, 1], buffers)
        >>> buffers.seq_lens.tolist(), buffers.query_start_loc.tolist()
        ([3, 1], [0, 3, 4])
        >>> buffers.positions.tolist(), buffers.slot_mapping.tolist()
        ([0, 1, 2, 0, 0, 0], [0, 1, 2, 4, -1, -1])
    """

    __slots__ = (
        "_native",
        "block_tables",
        "positions",
        "query_start_loc",
        "seq_lens",
        "slot_mapping",
    )

    # As they were given; `zeros` gives tensors. Any: a union would want a cast at every use.
    block_tables: Any
    seq_lens: Any
    query_start_loc: Any
    slot_mapping: Any
    positions: Any

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

    @property
    def changed_rows(self) -> npt.NDArray[np.int32]:
        """Rows of ``block_tables`` that the last call wrote to, ascending: int32 [n]. Only these
        need to be copied to a device copy of the tables that is kept from step to step."""
        return self._native.changed_rows

    def invalidate(self) -> None:
        """Makes the next call write every row and all of the padding."""
        self._native.invalidate()

    @classmethod
    def zeros(
        cls, max_sequences: int, max_blocks: int, max_tokens: int, *, pin_memory: bool = False
    ) -> BatchBuffers:
        """Buffers of CPU tensors of zeros, for any batch up to these sizes.

        ``block_tables`` int32 [max_sequences, max_blocks], ``seq_lens`` int32 [max_sequences],
        ``query_start_loc`` int32 [max_sequences + 1], ``slot_mapping`` int64 [max_tokens] and
        ``positions`` int64 [max_tokens]: a query token's index in its sequence, which rotary
        embeddings take.

        Args:
            max_sequences: of a batch.
            max_blocks: of a sequence: its longest length / block_size, rounded up.
            max_tokens: query tokens of a batch, those of all sequences together.
            pin_memory: whether copies to a GPU need no wait.

        Raises:
            InvalidArgument: a size below 1.
        """
        for name, size in (
            ("max_sequences", max_sequences),
            ("max_blocks", max_blocks),
            ("max_tokens", max_tokens),
        ):
            if not isinstance(size, Integral) or size < 1:
                raise InvalidArgument(
                    f"BatchBuffers.zeros: {name}: expected an integer, at least 1, got {size!r}"
                )

        def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=pin_memory)

        return cls(
            tensor(max_sequences, max_blocks, dtype=torch.int32),
            tensor(max_sequences, dtype=torch.int32),
            tensor(max_sequences + 1, dtype=torch.int32),
            tensor(max_tokens, dtype=torch.int64),
            tensor(max_tokens, dtype=torch.int64),
        )
