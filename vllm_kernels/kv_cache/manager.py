"""Sequences, their block tables, and the prefixes they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _C
from .._C import InvalidArgument
from .arguments import Integers, MultimodalItem, Tokens, native_buffers, refuse_kinds
from .buffers import BatchBuffers
from .events import AllBlocksCleared, BlockRemoved, BlockStored
from .queries import Queries

__all__ = ["Integers", "KVCacheManager", "MultimodalItem", "Tokens"]


class KVCacheManager(Queries):
    """Block tables for many sequences over one pool of blocks.

    Sequence ids are any int64 values the caller likes. Sequences may share blocks (:meth:`fork`,
    :meth:`reorder`, a common prefix); one that grows within a shared block gets a block of its own,
    and the call returns the pair to copy.

    Copies: int64 [n, 2], rows of (source block, destination block), each returned once. Run them
    (``copy_blocks``, a call for the pairs of each manager call), in the order in which they were
    returned, before the cache is written again.

    Prefix caching: if token ids are known (``tokens``), every full block is registered under a
    keyed 128-bit hash of its tokens and all before them, and of ``salt``, ``adapter``,
    ``cache_dtype`` and multimodal items. A later sequence that starts with the same tokens shares
    the block, after the tokens themselves were compared. A block stays findable when no sequence
    holds it any more, until it is needed: the one unused longest goes first, of a sequence the last
    one. Blocks are registered when they are handed out, so passes must run in the order of
    their steps; after a pass that failed, call :meth:`reset_prefix_cache` or :meth:`evict_blocks`.

    Groups: ``windows`` names the groups of layers that have block tables of their own over the one
    pool, as models that mix full and sliding-window attention want them. In a group with a window,
    each append frees the blocks that are invisible to later tokens. Block 0, which is then never
    allocated, replaces them in the table.

    Shards: with ``shards=N``, N ranks hold each sequence together (context parallelism). Token
    ``i`` lives on rank ``(i // interleave) % N``, as in vLLM. Each rank has a manager and makes the
    same calls. A table entry then stands for ``N * block_size`` tokens, of which each rank has
    ``block_size``; prefixes and windows count in these blocks too. So all ranks take, share, evict
    and refuse the same blocks, and their tables are equal. Arguments and ``num_tokens`` count
    tokens of whole sequences. ``seq_lens`` counts the tokens of this rank, and the slot of a token
    on another rank is -1.

    Threads: calls from several threads are safe; they run one after the other, batch calls without
    the GIL. One :class:`BatchBuffers` is for one thread at a time, ``invalidate`` and
    ``changed_rows`` included. A fork of the process, a pickle or a copy of the manager is refused.

    Args:
        num_blocks: blocks of the cache, 1 to 2**31 - 3 (with a null block, that one included).
        block_size: tokens of a block, >= 1. With shards: those of each rank.
        shards: ranks that hold each sequence together.
        shard: this one, 0 to shards - 1. Needed if there are several.
        interleave: consecutive tokens on one rank, a divisor of ``block_size``.
        num_host_blocks: blocks of a second pool in host memory, for :meth:`swap_out`.
        watermark_blocks: blocks that :meth:`allocate` and :meth:`swap_in` leave free, so that the
            sequences that run can grow before one of them has to be preempted.
        windows: for each group of layers, the tokens visible to a token, itself included; None or
            0: all.
        prefix_caching: whether blocks whose tokens are known are registered.
        null_block: whether block 0 is never given out. None: if a group has a window.
        events: whether changes of the prefix cache are recorded for :meth:`take_events`.
        max_references: how many sequences may share one block.
        hash_key: 16 bytes, for managers whose hashes are to be the same. None: random.
        hash_bits: bits of the hash that are used, 1 to 128; fewer than 128 only in tests.

    Raises:
        InvalidArgument: a value out of range or no integer, or more slots than an int64 can number.
        MemoryError: no memory for the pool's 16 bytes a block.

    Example:
        >>> from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager
        >>> manager = KVCacheManager(num_blocks=8, block_size=4)
        >>> buffers = BatchBuffers.zeros(max_sequences=2, max_blocks=4, max_tokens=16)
        >>> prompt = [5, 3, 8, 1, 9, 2]
        >>> manager.allocate(1, prompt, num_new=0)  # nothing is cached yet
        0
        >>> copies = manager.step([1], [6], buffers, tokens=prompt)  # then run the model
        >>> manager.allocate(2, prompt, num_new=0)  # shares the full block
        4
        >>> copies = manager.step([1, 2], [1, 2], buffers, tokens=[7, 9, 2])
        >>> manager.block_table(1).tolist(), manager.block_table(2).tolist()
        ([0, 1], [0, 2])
        >>> manager.free(1)
    """

    __slots__ = (
        "block_size",
        "interleave",
        "num_blocks",
        "num_host_blocks",
        "shard",
        "shards",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        shards: int = 1,
        shard: int | None = None,
        interleave: int = 1,
        num_host_blocks: int = 0,
        watermark_blocks: int = 0,
        windows: Sequence[int | None] = (None,),
        prefix_caching: bool = True,
        null_block: bool | None = None,
        events: bool = False,
        max_references: int = 2**31 - 1,
        hash_key: bytes | None = None,
        hash_bits: int = 128,
    ) -> None:
        integers = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "shards": shards,
            "shard": shard or 0,
            "interleave": interleave,
            "num_host_blocks": num_host_blocks,
            "watermark_blocks": watermark_blocks,
            "max_references": max_references,
            "hash_bits": hash_bits,
        }
        try:
            self.windows = tuple(window or 0 for window in windows)
            self._native = _C.KVCacheManager(
                **integers,
                windows=list(self.windows),
                prefix_caching=prefix_caching,
                null_block=bool(null_block),
                events=events,
                hash_key=hash_key,
            )
        except TypeError:
            refuse_kinds(windows, **integers)
            raise
        except InvalidArgument as error:  # of the pool, under its own name
            text = str(error).replace("BlockPool", "KVCacheManager", 1)
            raise InvalidArgument(text) from None
        if shard is None and shards > 1:
            raise InvalidArgument(
                f"KVCacheManager: shard: expected 0 to {shards - 1} with shards={shards}, got None"
            )
        if null_block is False and self._native.has_null_block:
            raise InvalidArgument(
                "KVCacheManager: null_block: expected None or True with a window, got False"
            )
        pool = num_blocks - self._native.has_null_block
        if watermark_blocks >= max(pool, 1):
            raise InvalidArgument(
                f"KVCacheManager: watermark_blocks: expected fewer than the {pool} blocks of the "
                f"pool, got {watermark_blocks}: nothing could be allocated"
            )
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.shards = shards
        self.shard = shard or 0
        self.interleave = interleave

    def __repr__(self) -> str:
        return (
            f"KVCacheManager(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"num_free_blocks={self.num_free_blocks}, num_sequences={self.num_sequences})"
        )

    def __reduce__(self) -> Any:
        return self._native.__reduce__()

    # One sequence.

    def allocate(
        self,
        sequence_id: int,
        tokens: int | Tokens,
        *,
        num_new: int | None = None,
        salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
        cache_dtype: bytes | str | None = None,
        multimodal: Sequence[MultimodalItem] = (),
    ) -> int:
        """Adds a sequence.

        Args:
            sequence_id: a new id.
            tokens: token ids, [n]: the sequence shares their cached blocks. Or
                their number, >= 0: all blocks are new, and ids may follow by
                :meth:`record_tokens`.
            num_new: slots for at most so many tokens beyond the cached ones (chunked prefill: 0,
                and the chunks by :meth:`step` with ``tokens=``). None: for all of them. Blocks are
                findable as soon as they are allocated, so use 0 if a pass may not run.
            salt, adapter, cache_dtype: of a tenant, a LoRA adapter, a kind of cache: tokens are
                only found by sequences with the same three.
            multimodal: the items of the placeholder tokens among ``tokens``, in any order, within
                ``tokens`` and without overlap.

        Returns:
            How many leading tokens are cached already: whole blocks, and fewer than n. The
            sequence's ``num_tokens`` is that and up to ``num_new`` more.

        Raises:
            DuplicateSequence: the id exists.
            OutOfBlocks: too few blocks are free (``.needed`` with the watermark, ``.free``).
            InvalidArgument: a token that is no int32, or an item out of range.
        """
        return self._native.allocate(
            sequence_id, tokens, num_new, salt, adapter, cache_dtype, multimodal
        )

    def append(
        self,
        sequence_id: int,
        num_tokens: int = 1,
        *,
        tokens: Tokens | None = None,
        lookahead: int = 0,
    ) -> npt.NDArray[np.int64]:
        """Lengthens a sequence by ``num_tokens`` >= 0 tokens; :meth:`append_batch` for one.

        Returns:
            int64 [0 to num_groups, 2]: pairs to copy, where the last block was shared and partly
            filled.

        Raises:
            UnknownSequence: the id does not exist.
            OutOfBlocks: too few blocks are free for the tokens, or for the copy.
        """
        return self._native.append(sequence_id, num_tokens, tokens, lookahead)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Adds sequence ``child_id`` with the tokens of ``parent_id``, sharing all of its blocks
        (but not its lookahead).

        Raises:
            UnknownSequence: the parent does not exist.
            DuplicateSequence: the child exists.
            ReferenceOverflow: a block is shared by ``max_references`` sequences already.
            InvalidArgument: the parent is swapped out.
        """
        self._native.fork(parent_id, child_id)

    def free(self, sequence_id: int, *, num_computed: int | None = None) -> None:
        """Forgets a sequence; blocks that no other one holds become free, the last one first.

        Blocks whose tokens are known are findable as soon as they are allocated. For a
        sequence that is aborted before its passes have run, give the number of leading tokens that
        were computed (``num_computed``, cached ones included). Later blocks become unfindable, even
        if other sequences hold them meanwhile. None: all of them were.

        Raises:
            UnknownSequence: the id does not exist (any more).
            InvalidArgument: ``num_computed`` is negative.
        """
        self._native.free(sequence_id, num_computed)

    def truncate(
        self, sequence_id: int, num_tokens: int, *, num_computed: int | None = None
    ) -> None:
        """Shortens a sequence to its first ``num_tokens`` tokens, 0 to as many as it has, and drops
        its lookahead (speculative decoding: the tokens that were not accepted). Blocks whose tokens
        were known stay findable until they are written again; except for those
        after ``num_computed``, as in :meth:`free`, if a pass did not run. (Before
        :meth:`swap_out` of a sequence whose pass did not run: truncate it to what was computed.)

        Raises:
            UnknownSequence: the id does not exist.
            InvalidArgument: ``num_tokens`` is negative or more than the sequence has; or so few
                that the next token would need blocks that a window has freed; or
                ``num_computed`` is negative.
        """
        self._native.truncate(sequence_id, num_tokens, num_computed)

    # Many sequences in one call. The ids of one batch are distinct; counts are one for each of
    # them, or one int for all.

    def allocate_batch(self, sequence_ids: Integers, num_tokens: Integers | int) -> None:
        """:meth:`allocate` for many sequences by number of tokens: all of them, or an error and
        none."""
        self._native.allocate_batch(sequence_ids, num_tokens)

    def append_batch(
        self,
        sequence_ids: Integers,
        num_tokens: Integers | int = 1,
        *,
        tokens: Tokens | None = None,
        lookahead: int = 0,
    ) -> npt.NDArray[np.int64]:
        """Lengthens many sequences: all of them, or an error and none.

        Args:
            sequence_ids: [n], distinct.
            num_tokens: how many tokens each gets, >= 0.
            tokens: ids of the appended tokens, one sequence after the other, [sum of num_tokens]
                (the pass's input ids). None: not known yet; they may follow by
                :meth:`record_tokens`, and until they do no block beyond them is registered.
            lookahead: slots for each sequence after its tokens, for the tokens that a draft model
                writes. They are in the block table, not in ``num_tokens``.

        Returns:
            int64 [m, 2]: the pairs to copy.

        Raises:
            UnknownSequence, DuplicateSequence: an id does not exist, or occurs twice.
            OutOfBlocks: too few blocks are free; those that windows free count as free if no
                sequence outside of the batch holds them.
            InvalidArgument: a negative count, tokens for a sequence with earlier ones unknown, or
                a sequence that is swapped out.
        """
        return self._native.append_batch(sequence_ids, num_tokens, tokens, lookahead)

    def record_tokens(
        self, sequence_ids: Integers, num_tokens: Integers | int, tokens: Tokens
    ) -> None:
        """Records the ids of tokens that have slots already: of each sequence the next
        ``num_tokens[i]`` unknown ones (sampled tokens whose slots were allocated ahead).

        Args:
            tokens: one sequence after the other, [sum of num_tokens].

        Raises:
            UnknownSequence, DuplicateSequence: an id does not exist, or occurs twice.
            InvalidArgument: more ids than a sequence has unknown tokens; or tokens that complete a
                block that another sequence shares (:meth:`fork` before they were known), and whose
                recorded tokens differ.
        """
        self._native.record_tokens(sequence_ids, num_tokens, tokens)

    def free_batch(
        self, sequence_ids: Integers, *, num_computed: Integers | int | None = None
    ) -> None:
        """:meth:`free` for many sequences: all of them, or an error and none."""
        self._native.free_batch(sequence_ids, num_computed)

    def truncate_batch(
        self,
        sequence_ids: Integers,
        num_tokens: Integers | int,
        *,
        num_computed: Integers | int | None = None,
    ) -> None:
        """:meth:`truncate` for many sequences: all of them, or an error and none."""
        self._native.truncate_batch(sequence_ids, num_tokens, num_computed)

    def reorder(self, sequence_ids: Integers, parent_ids: Integers) -> None:
        """Beam search: ``sequence_ids[i]`` becomes what ``parent_ids[i]`` was before the call.

        It shares the parent's blocks and gives its own back. Parents may repeat; they may also be
        sequences that are not reordered themselves.

        Raises:
            UnknownSequence: an id or a parent does not exist.
            DuplicateSequence: an id occurs twice in ``sequence_ids``.
            ReferenceOverflow: a block would be shared by more than ``max_references`` sequences,
                counting those that are about to give it back.
            InvalidArgument: a sequence or parent is swapped out.
        """
        self._native.reorder(sequence_ids, parent_ids)

    def build(
        self,
        sequence_ids: Integers,
        num_query_tokens: Integers | int,
        buffers: BatchBuffers | Sequence[BatchBuffers],
    ) -> int:
        """Fills ``buffers`` (one for each group) for a pass over the last ``num_query_tokens[i]``
        tokens of each sequence, which it holds already (a prompt after :meth:`allocate`).

        Returns:
            The number of query tokens of all sequences.

        Raises:
            UnknownSequence, DuplicateSequence: an id does not exist, or occurs twice.
            InvalidArgument: more query tokens than a sequence has, or a batch that the buffers have
                no room for.
        """
        return self._native.build(sequence_ids, num_query_tokens, native_buffers("build", buffers))

    def step(
        self,
        sequence_ids: Integers,
        num_tokens: Integers | int,
        buffers: BatchBuffers | Sequence[BatchBuffers],
        *,
        tokens: Tokens | None = None,
        lookahead: int = 0,
    ) -> npt.NDArray[np.int64]:
        """:meth:`append_batch` and :meth:`build` in one: the appended tokens are the query tokens.

        Returns:
            int64 [m, 2]: the pairs to copy before the new tokens are written.

        Raises:
            The errors of :meth:`append_batch` and of :meth:`build`.
        """
        natives = native_buffers("step", buffers)
        return self._native.step(sequence_ids, num_tokens, natives, tokens, lookahead)

    # Host blocks.

    def swap_out(self, sequence_ids: Integers) -> npt.NDArray[np.int64]:
        """Moves sequences to host blocks; their own become free. Until :meth:`swap_in` they can
        only be freed.

        Returns:
            int64 [m, 2]: (block, host block) pairs for ``swap_blocks``, each block once; shared
            blocks stay shared. Run them before anything is written to the cache.

        Raises:
            UnknownSequence, DuplicateSequence: an id does not exist, or occurs twice.
            InvalidArgument: one is swapped out already; or another thread lengthened one meanwhile,
                so that the pairs have no room ("copies"): nothing changed, call again.
            OutOfBlocks: too few host blocks are free.
        """
        return self._native.swap_out(sequence_ids)

    def swap_in(self, sequence_ids: Integers) -> npt.NDArray[np.int64]:
        """Moves sequences back. Blocks that are still cached are shared, not copied.

        Returns:
            int64 [m, 2]: (host block, block) pairs for ``swap_blocks``.

        Raises:
            UnknownSequence, DuplicateSequence: an id does not exist, or occurs twice.
            InvalidArgument: one is not swapped out.
            OutOfBlocks: too few blocks are free.
        """
        return self._native.swap_in(sequence_ids)

    # Prefixes.

    def evict_blocks(self, blocks: Integers) -> None:
        """Makes blocks unfindable; sequences that hold them keep them. Raises InvalidArgument for
        ids out of range."""
        self._native.evict_blocks(blocks)

    def reset_prefix_cache(self) -> None:
        """Makes all blocks unfindable (new weights), and also those that the sequences alive now
        will fill."""
        self._native.reset_prefix_cache()

    def take_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """What happened to the prefix cache since the last call, in order; empty unless made with
        ``events=True``. They pile up until they are taken, by one thread at a time; an error
        (no memory) leaves them there."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        for kind, *fields in self._native.peek_events():
            events.append((BlockStored, BlockRemoved, AllBlocksCleared)[kind](*fields))
        self._native.drop_events(len(events))
        return events

    # All sequences.

    def reset(self) -> None:
        """Forgets every sequence and every cached block, and sets the statistics to zero."""
        self._native.reset()
