"""Instances that lend each other cache blocks for long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _C
from .._C import InvalidArgument
from ..kv_cache import KVCacheManager

__all__ = ["InstanceCounts", "Ledger"]


class InstanceCounts(NamedTuple):
    """Blocks of one instance: ``total = lent + used + free``."""

    total: int
    lent: int
    """To other instances."""
    used: int
    """By sequences of its own."""
    free: int
    """Empty ones and cached ones."""
    borrowed: int
    """Of other instances."""
    reserve: int
    """What :meth:`Ledger.set_reserve` keeps free."""
    lost: bool


class Ledger:
    """Which instance lends cache blocks to which other one, and for which sequence.

    An instance is a cache with a :class:`~vllm_kernels.kv_cache.KVCacheManager`. If it has no block
    left for a long sequence, the sequence borrows blocks of another instance. Keys and values stay
    where they are: each instance attends to its own blocks, and ``combine_attn_partials`` merges
    the results. This is the debt ledger of Infinite-LLM (arXiv:2401.02669, gManager and rManager).

    A sequence has one home. The home's manager has its first tokens, and the ledger lists the
    blocks of the further ones, in their order: only the last one may be partly filled. Sequence
    ids are the same on all instances.

    Blocks have one owner and at most one borrower. A manager belongs to one ledger, and its
    statistics count its blocks in the ledger as ``held_blocks``. Ledger and managers hold no
    tensors, so one process can have them for all instances.

    Errors: every call is all or nothing, as with the manager. Calls from several threads are safe.

    Args:
        managers: of the instances 0, 1 and so on: distinct, with one block size.

    Raises:
        InvalidArgument: no managers, one of them twice, or different block sizes.

    Example:
        >>> from vllm_kernels.distributed import Ledger
        >>> from vllm_kernels.kv_cache import KVCacheManager, OutOfBlocks
        >>> managers = [KVCacheManager(2, 16), KVCacheManager(8, 16)]
        >>> ledger = Ledger(managers)
        >>> managers[0].allocate(1, 32)
        0
        >>> try:
        ...     managers[0].append(1)
        ... except OutOfBlocks:
        ...     print(ledger.lend(None, 0, 1, 1).tolist())  # block 0 of instance 1
        [[1, 0]]
        >>> ledger.counts(1).lent, ledger.owed(0, 1)
        (1, 1)
        >>> ledger.free(1)
        >>> ledger.check_integrity()
    """

    __slots__ = ("_native", "managers")

    def __init__(self, managers: Sequence[KVCacheManager]) -> None:
        self.managers = tuple(managers)
        for manager in self.managers:
            if not isinstance(manager, KVCacheManager):
                raise InvalidArgument(
                    f"Ledger: managers: expected KVCacheManager, got {type(manager).__name__}"
                )
        self._native = _C.Ledger(tuple(manager._native for manager in self.managers))

    def __repr__(self) -> str:
        return f"Ledger({len(self.managers)} instances)"

    def __reduce__(self) -> Any:
        return self._native.__reduce__()

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._native

    def set_reserve(self, instance: int, num_blocks: int) -> None:
        """Sets how many blocks the instance's next step needs. :meth:`lend` and :meth:`recall`
        leave so many free there. At first it is 0.

        Raises:
            InvalidArgument: no such instance, a lost one, or a number below 0.
        """
        self._native.set_reserve(instance, num_blocks)

    def lend(
        self, lender: int | None, borrower: int, sequence_id: int, num_blocks: int
    ) -> npt.NDArray[np.int32]:
        """Gives a sequence ``num_blocks`` >= 1 further blocks.

        Args:
            lender: the instance whose blocks they are. None: the borrower itself, if it has so
                many; else the instance with the most free blocks, of equals the first one.
            borrower: the sequence's home.
            sequence_id: of the borrower.

        Returns:
            int32 [num_blocks, 2]: rows of (instance, block), in the order of the tokens.

        Raises:
            OutOfBlocks: the lender has fewer free blocks beyond its reserve (``.free``).
            InvalidArgument: no such instance, a lost one, another home, or a number below 1.
        """
        return self._native.lend(lender, borrower, sequence_id, num_blocks)

    def give_back(self, sequence_id: int, num_blocks: int) -> None:
        """Returns the last ``num_blocks`` blocks of a sequence to their owners.

        Raises:
            UnknownSequence: it has no blocks in the ledger.
            InvalidArgument: it has fewer.
        """
        self._native.give_back(sequence_id, num_blocks)

    def free(self, sequence_id: int) -> None:
        """Returns all blocks of a sequence. Its home's manager frees the others.

        Raises:
            UnknownSequence: it has no blocks in the ledger.
        """
        self._native.free(sequence_id)

    def recall(self, lender: int, num_blocks: int) -> npt.NDArray[np.int64]:
        """Takes blocks that an instance has lent back, and replaces them by others: of the
        sequence's home, or of the instance with the most free blocks.

        Sequences are taken in descending order of id, and their blocks from the last one on.

        Returns:
            int64 [num_blocks, 5]: rows of (sequence id, instance and block to copy from, instance
            and block to copy to). Run all copies before anything is written to a cache.

        Raises:
            OutOfBlocks: the other instances have too few free blocks beyond their reserves.
            InvalidArgument: no such instance, a lost one, or more blocks than it has lent.
        """
        return self._native.recall(lender, num_blocks)

    def instance_lost(self, instance: int) -> list[int]:
        """Strikes out an instance whose cache is gone.

        The blocks of sequences with a block there, or with their home there, go back to their
        owners. Other instances' managers keep their blocks of these sequences until ``free``.

        Returns:
            Ids of the sequences to compute again, ascending: those, and all of the instance.

        Raises:
            InvalidArgument: no such instance, or it is lost already.
        """
        return self._native.instance_lost(instance)

    def instance_back(self, instance: int) -> None:
        """Takes a lost instance back, with an empty cache: resets its manager.

        Raises:
            InvalidArgument: no such instance, or it is not lost.
        """
        self._native.instance_back(instance)

    def blocks(self, sequence_id: int) -> npt.NDArray[np.int32]:
        """The blocks of a sequence in the ledger, in the order of its tokens: int32 [n, 2], rows
        of (instance, block).

        Raises:
            UnknownSequence: it has none.
        """
        return self._native.blocks(sequence_id)

    def owed(self, borrower: int, lender: int) -> int:
        """How many blocks of ``lender`` the sequences of ``borrower`` have.

        Raises:
            InvalidArgument: no such instance.
        """
        return self._native.owed(borrower, lender)

    def counts(self, instance: int) -> InstanceCounts:
        """The blocks of an instance in numbers.

        Raises:
            InvalidArgument: no such instance.
        """
        return InstanceCounts(*self._native.counts(instance))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless loans, debts and managers agree. It checks the managers
        too, and reads all of them."""
        self._native.check_integrity()
