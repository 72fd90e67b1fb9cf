"""KVCacheManager from Python: a state machine against a plain model, and bad input.

The model keeps every sequence as a list of tokens. The cache is a shadow array with one token per
slot: tokens are written through the manager's slots, copy-on-write pairs are applied, and a reader
that goes through the block table must find the sequence's own tokens.

``KV_CACHE_EXAMPLES`` sets how many random histories are run (default 150, of up to 80 steps).
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from vllm_kernels import kv_cache
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

BIG = 10**6


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 40),
        block_size=st.integers(1, 6),
        max_references=st.sampled_from([2, 3, BIG]),
    )
    def start(self, num_blocks: int, block_size: int, max_references: int) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, max_references=max_references)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_references = max_references
        self.shadow = np.full(num_blocks * block_size, -1)
        self.tokens: dict[int, list[int]] = {}
        self.next_id = 0
        self.next_token = 0
        self.num_copies = 0
        self.peak = 0
        # Columns for more blocks than there are: those run out first.
        self.buffers = BatchBuffers.zeros(512, num_blocks + 6, 512 * 6)

    # --- helpers ---

    def tables(self) -> dict[int, list[int]]:
        return {i: self.manager.block_table(i).tolist() for i in self.tokens}

    def references(self) -> Counter[int]:
        return Counter(block for table in self.tables().values() for block in table)

    def some_ids(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True), "ids")

    def any_id(self, data: st.DataObject, label: str = "id") -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)), label)

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id * (-1) ** self.next_id

    def new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def state(self) -> tuple[Any, ...]:
        statistics = self.manager.statistics()
        fields = [name for name in dir(statistics) if not name.startswith("_")]
        return (
            sorted(self.manager.sequence_ids()),
            self.tables(),
            {i: self.manager.num_tokens(i) for i in self.tokens},
            {name: getattr(statistics, name) for name in fields},
        )

    def refused(
        self, error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]
    ) -> Exception:
        before = self.state()
        with pytest.raises(error) as info:
            call()
        assert self.state() == before
        return info.value

    def write(self, sequence_id: int, slots: list[int]) -> None:
        """New tokens into ``slots``, which must belong to this sequence alone."""
        references = self.references()
        tokens = self.new_tokens(len(slots))
        for slot, token in zip(slots, tokens, strict=True):
            assert references[slot // self.block_size] == 1
            self.shadow[slot] = token
        self.tokens[sequence_id] += tokens

    def apply_copies(self, pairs: np.ndarray) -> None:
        assert pairs.dtype == np.int64 and pairs.ndim == 2 and pairs.shape[1] == 2
        sources, destinations = set(pairs[:, 0].tolist()), pairs[:, 1].tolist()
        assert len(set(destinations)) == len(destinations)
        assert sources.isdisjoint(destinations)
        pool = self.shadow.reshape(self.num_blocks, self.block_size)
        pool[pairs[:, 1]] = pool[pairs[:, 0]]
        self.num_copies += len(pairs)

    def needed(self, ids: list[int], counts: list[int]) -> tuple[int, int]:
        """(blocks, copies) that an append takes, one sequence after the other."""
        references, tables = self.references(), self.tables()
        blocks = copies = 0
        for i, count in zip(ids, counts, strict=True):
            have = len(self.tokens[i])
            after = blocks_for(have + count, self.block_size)
            blocks += after - blocks_for(have, self.block_size)
            if count and have % self.block_size and references[tables[i][-1]] > 1:
                references[tables[i][-1]] -= 1
                copies += 1
        return blocks + copies, copies

    # --- rules ---

    @rule(count=st.integers(0, 30))
    def allocate(self, count: int) -> None:
        new = self.new_id()
        needed = blocks_for(count, self.block_size)
        free = self.manager.num_free_blocks
        assert self.manager.can_allocate(count) == (needed <= free)
        if needed > free:
            error = self.refused(kv_cache.OutOfBlocks, lambda: self.manager.allocate(new, count))
            assert (error.needed, error.free) == (needed, free)
            return
        self.manager.allocate(new, count)
        self.tokens[new] = []
        self.write(new, self.manager.slot_mapping(new).tolist())

    @rule(counts=st.lists(st.integers(0, 12), max_size=5), data=st.data())
    def allocate_batch(self, counts: list[int], data: st.DataObject) -> None:
        ids = [self.new_id() for _ in counts]
        needed = sum(blocks_for(count, self.block_size) for count in counts)
        call = lambda ids=ids: self.manager.allocate_batch(ids, counts)  # noqa: E731
        if needed > self.manager.num_free_blocks:
            self.refused(kv_cache.OutOfBlocks, call)
            return
        if len(ids) > 1 and data.draw(st.booleans(), "twice"):
            self.refused(kv_cache.DuplicateSequence, lambda: call([ids[0], *ids[:-1]]))
        call()
        for i in ids:
            self.tokens[i] = []
            self.write(i, self.manager.slot_mapping(i).tolist())

    def append_to(self, ids: list[int], counts: list[int], call: Callable[[], np.ndarray]) -> bool:
        needed, copies = self.needed(ids, counts)
        free = self.manager.num_free_blocks
        if needed > free:
            error = self.refused(kv_cache.OutOfBlocks, call)
            assert (error.needed, error.free) == (needed, free)
            return False
        pairs = call()
        assert len(pairs) == copies
        self.apply_copies(pairs)
        return True

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(0, 9))
    def append(self, data: st.DataObject, count: int) -> None:
        i = self.any_id(data)
        start = len(self.tokens[i])
        if self.append_to([i], [count], lambda: self.manager.append(i, count)):
            self.write(i, self.manager.slot_mapping(i, start).tolist())

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(0, 3))
    def append_batch(self, data: st.DataObject, count: int) -> None:
        ids = self.some_ids(data)
        starts = {i: len(self.tokens[i]) for i in ids}
        array = np.array(ids, dtype=np.int64)
        if self.append_to(ids, [count] * len(ids), lambda: self.manager.append_batch(array, count)):
            for i in ids:
                self.write(i, self.manager.slot_mapping(i, starts[i]).tolist())

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        counts = [data.draw(st.integers(0, 5), "count") for _ in ids]
        id_tensor = torch.tensor(ids, dtype=torch.int64)
        count_tensor = torch.tensor(counts, dtype=torch.int32)
        call = lambda: self.manager.step(id_tensor, count_tensor, self.buffers)  # noqa: E731
        if self.append_to(ids, counts, call):
            self.read_buffers(ids, counts, self.write)

    def read_buffers(
        self, ids: list[int], counts: list[int], visit: Callable[[int, list[int]], None]
    ) -> None:
        """Checks every buffer; ``visit(id, slots)`` gets each sequence's query slots."""
        starts = self.buffers.query_start_loc.tolist()
        slots = self.buffers.slot_mapping.tolist()
        positions = self.buffers.positions.tolist()
        for row, (i, count) in enumerate(zip(ids, counts, strict=True)):
            table = self.manager.block_table(i)
            assert self.buffers.block_tables[row, : len(table)].tolist() == table.tolist()
            length = self.manager.num_tokens(i)
            assert self.buffers.seq_lens[row] == length
            begin, end = starts[row], starts[row + 1]
            assert end - begin == count
            assert positions[begin:end] == list(range(length - count, length))
            assert slots[begin:end] == self.manager.slot_mapping(i, length - count).tolist()
            visit(i, slots[begin:end])
        total = sum(counts)
        assert self.buffers.seq_lens[len(ids) :].count_nonzero() == 0
        assert all(start == total for start in starts[len(ids) :])
        assert all(slot == -1 for slot in slots[total:])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def build(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        counts = [data.draw(st.integers(0, min(6, len(self.tokens[i]))), "count") for i in ids]
        self.manager.build(ids, counts, self.buffers)

        def sees_own_tokens(i: int, slots: list[int]) -> None:
            wanted = self.tokens[i][len(self.tokens[i]) - len(slots) :]
            assert self.shadow[slots].tolist() == wanted

        self.read_buffers(ids, counts, sees_own_tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.any_id(data, "parent"), self.new_id()
        references = self.references()
        table = self.manager.block_table(parent).tolist()
        if any(references[block] >= self.max_references for block in table):
            self.refused(kv_cache.ReferenceOverflow, lambda: self.manager.fork(parent, child))
            return
        self.manager.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        parents = [self.any_id(data, "parent") for _ in ids]
        before, tables = dict(self.tokens), self.tables()
        references = self.references()
        for i, parent in zip(ids, parents, strict=True):
            references.update(tables[parent] if parent != i else [])
        if max(references.values(), default=0) > self.max_references:
            self.refused(kv_cache.ReferenceOverflow, lambda: self.manager.reorder(ids, parents))
            return
        self.manager.reorder(ids, parents)
        for i, parent in zip(ids, parents, strict=True):
            self.tokens[i] = list(before[parent])
            assert self.manager.block_table(i).tolist() == tables[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        i = self.any_id(data)
        length = len(self.tokens[i])
        self.refused(kv_cache.InvalidArgument, lambda: self.manager.truncate(i, length + 1))
        keep = data.draw(st.integers(0, length), "keep")
        self.manager.truncate(i, keep)
        del self.tokens[i][keep:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate_batch(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        keep = [data.draw(st.integers(0, len(self.tokens[i])), "keep") for i in ids]
        self.manager.truncate_batch(ids, keep)
        for i, length in zip(ids, keep, strict=True):
            del self.tokens[i][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        i = self.any_id(data)
        self.manager.free(i)
        del self.tokens[i]
        self.refused(kv_cache.UnknownSequence, lambda: self.manager.free(i))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free_batch(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        if ids:
            self.refused(
                kv_cache.DuplicateSequence, lambda: self.manager.free_batch([*ids, ids[0]])
            )
        self.refused(kv_cache.UnknownSequence, lambda: self.manager.free_batch([*ids, BIG]))
        self.manager.free_batch(ids)
        for i in ids:
            del self.tokens[i]

    @precondition(lambda self: len(self.tokens) > 6)
    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.tokens.clear()
        self.num_copies = self.peak = 0

    # --- invariants ---

    @invariant()
    def holds_together(self) -> None:
        self.manager.check_integrity()
        references, tables = self.references(), self.tables()
        filled: dict[int, int] = {}  # slots that some reader uses, of each block
        assert sorted(self.manager.sequence_ids()) == sorted(self.tokens)
        for i, tokens in self.tokens.items():
            table = tables[i]
            assert i in self.manager
            assert self.manager.num_tokens(i) == len(tokens)
            assert len(table) == blocks_for(len(tokens), self.block_size)
            slots = self.manager.slot_mapping(i)
            assert self.shadow[slots].tolist() == tokens
            for index, block in enumerate(table):
                assert 0 <= block < self.num_blocks
                last = min(self.block_size, len(tokens) - index * self.block_size)
                filled[block] = max(filled.get(block, 0), last)
        statistics = self.manager.statistics()
        assert statistics.total_blocks == self.num_blocks
        assert statistics.used_blocks == len(references)
        assert statistics.free_blocks == self.num_blocks - len(references)
        assert statistics.free_blocks == self.manager.num_free_blocks
        assert statistics.shared_blocks == sum(count > 1 for count in references.values())
        assert statistics.table_entries == references.total()
        assert statistics.num_tokens == sum(map(len, self.tokens.values()))
        assert statistics.num_sequences == self.manager.num_sequences == len(self.tokens)
        assert statistics.waste_slots == sum(self.block_size - used for used in filled.values())
        assert statistics.num_copies == self.num_copies
        assert statistics.peak_used_blocks >= max(self.peak, len(references))
        self.peak = statistics.peak_used_blocks


TestStateMachine = ManagerMachine.TestCase
TestStateMachine.settings = settings(
    max_examples=int(os.environ.get("KV_CACHE_EXAMPLES", "150")),
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# --- input from Python ---


def make_buffers(**changes: Any) -> dict[str, Any]:
    """Arguments of a BatchBuffers for 4 sequences of 3 blocks and 8 tokens."""
    return {
        "block_tables": torch.zeros(4, 3, dtype=torch.int32),
        "seq_lens": torch.zeros(4, dtype=torch.int32),
        "query_start_loc": torch.zeros(5, dtype=torch.int32),
        "slot_mapping": torch.zeros(8, dtype=torch.int64),
        "positions": torch.zeros(8, dtype=torch.int64),
        **changes,
    }


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


SLOTS = torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_tables": torch.zeros(4, 3, dtype=torch.int64)},
            r"buffers: block_tables: expected int32 of 2 dimensions, got int64 of shape \[4, 3\]",
        ),
        (
            {"block_tables": torch.zeros(12, dtype=torch.int32)},
            r"block_tables: expected int32 of 2 dimensions, got int32 of shape \[12\]",
        ),
        (
            {"block_tables": torch.zeros(3, 4, dtype=torch.int32).T},
            "block_tables: expected a contiguous last dimension, got strides of 16 bytes",
        ),
        (
            {"block_tables": torch.zeros(1, 3, dtype=torch.int32).expand(4, 3)},
            r"block_tables: expected rows .* do not overlap, got shape \[4, 3\] with row stride 0",
        ),
        (
            {"seq_lens": torch.zeros(3, dtype=torch.int32)},
            r"seq_lens: expected 4 elements \(rows of block_tables\), got 3",
        ),
        (
            {"seq_lens": torch.zeros(8, dtype=torch.int32)[::2]},
            "seq_lens: expected a contiguous last dimension",
        ),
        ({"seq_lens": [0, 0, 0, 0]}, "seq_lens: expected a numpy array or a CPU tensor, got list"),
        (
            {"seq_lens": torch.zeros(4, dtype=torch.int32, device="meta")},
            "seq_lens: expected a numpy array or a CPU tensor, got Tensor: can't convert meta",
        ),
        (
            {"query_start_loc": torch.zeros(4, dtype=torch.int32)},
            r"query_start_loc: expected 5 elements \(rows of block_tables \+ 1\), got 4",
        ),
        ({"slot_mapping": None}, "slot_mapping: expected a numpy array .*, got NoneType"),
        ({"slot_mapping": np.zeros(8, np.int32)}, "slot_mapping: expected int64"),
        (
            {"slot_mapping": read_only(np.zeros(8, np.int64))},
            "slot_mapping: expected writable memory, got read-only",
        ),
        (
            {"positions": torch.zeros(7, dtype=torch.int64)},
            r"positions: expected 8 elements \(as slot_mapping\), got 7",
        ),
        (
            {"slot_mapping": SLOTS, "positions": SLOTS},
            "positions: expected memory of its own, got memory that overlaps slot_mapping",
        ),
    ],
)
def test_buffers_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kv_cache.InvalidArgument, match=message):
        BatchBuffers(**make_buffers(**changes))


@pytest.mark.parametrize("kind", ["torch", "numpy", "strided rows", "no positions"])
def test_step_writes_into_the_callers_memory(kind: str) -> None:
    arguments = make_buffers()
    if kind == "numpy":
        arguments = {name: tensor.numpy() for name, tensor in arguments.items()}
    elif kind == "strided rows":
        arguments["block_tables"] = torch.zeros(4, 9, dtype=torch.int32)[:, 2:5]
    elif kind == "no positions":
        arguments["positions"] = None
    buffers = BatchBuffers(**arguments)
    manager = KVCacheManager(8, 4)
    manager.allocate_batch([5, 6], [6, 4])
    pairs = manager.step([6, 5], [1, 2], buffers)
    assert pairs.shape == (0, 2) and pairs.dtype == np.int64
    assert buffers.block_tables is arguments["block_tables"]
    assert buffers.block_tables.tolist() == [[2, 3, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert buffers.seq_lens.tolist() == [5, 8, 0, 0]
    assert buffers.query_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert buffers.slot_mapping.tolist() == [12, 6, 7, -1, -1, -1, -1, -1]
    if kind != "no positions":
        assert buffers.positions.tolist() == [4, 6, 7, 0, 0, 0, 0, 0]


def test_buffers_keep_their_memory_alive() -> None:
    buffers = BatchBuffers.zeros(256, 64, 4096)
    native = buffers._native
    del buffers
    junk = [np.full(100_000, 7) for _ in range(20)]
    manager = KVCacheManager(64, 4)
    manager.allocate(1, 200)
    manager._native.build([1], [200], [native])
    assert all((array == 7).all() for array in junk)


@pytest.mark.parametrize(
    "ids",
    [
        [3, -9],
        (3, -9),
        np.array([3, -9]),
        np.array([3, -9], dtype=np.int32),
        np.array([3, -9], dtype=">i8"),
        np.array([3, 0, -9, 0])[::2],
        torch.tensor([3, -9]),
        torch.tensor([3, -9], dtype=torch.int32),
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
)
@pytest.mark.parametrize("count", [2, np.int64(2), [2, 2], np.array([2, 2], dtype=np.int32)])
def test_integers_come_as_lists_arrays_or_tensors(ids: Any, count: Any) -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate_batch(ids, count)
    manager.append_batch(ids, count)
    assert manager.num_tokens(3) == manager.num_tokens(-9) == 4
    manager.truncate_batch(ids, count)
    manager.reorder(ids, ids)
    manager.free_batch(ids)
    assert manager.num_sequences == 0


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        (np.array([1.0]), 1, r"append: sequence_ids: expected int64 or int32 .* float64"),
        (np.array([True]), 1, r"append: sequence_ids: expected int64 or int32 .* bool"),
        (np.array([1], np.uint64), 1, r"append: sequence_ids: expected int64 or int32 .* uint64"),
        (torch.ones(1, 1, dtype=torch.int64), 1, r"got int64 of shape \[1, 1\]"),
        (torch.ones(1, dtype=torch.int64, device="meta"), 1, "sequence_ids: .* got Tensor: can't"),
        ([[1], [1, 2]], 1, "append: sequence_ids: expected"),
        (None, 1, "append: sequence_ids: expected"),
        ("1", 1, "append: sequence_ids: expected"),
        ([2**70], 1, "append: sequence_ids: expected"),
        ([1], 2**70, "append: num_tokens: expected an int64"),
        ([1], 1.5, "append: num_tokens: expected"),
        ([1], [1, 1], r"append: num_tokens: expected 1 elements \(as sequence_ids\), got 2"),
        ([1], -1, "append: num_tokens: expected >= 0, got -1 at index 0"),
    ],
)
def test_integers_that_are_none_are_refused(ids: Any, counts: Any, message: str) -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(1, 3)
    with pytest.raises(kv_cache.InvalidArgument, match=message):
        manager.append_batch(ids, counts)
    assert manager.num_tokens(1) == 3


def test_empty_batches_do_nothing() -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate_batch([], [])
    assert manager.append_batch([], []).shape == (0, 2)
    manager.free_batch(np.array([], dtype=np.int64))
    manager.free_batch(())
    manager.allocate_batch(range(0), 0)
    assert manager.append_batch((), range(0)).shape == (0, 2)
    for untyped in (np.array([]), torch.empty(0)):
        with pytest.raises(ValueError, match=r"int64 or int32 values of shape .* got float"):
            manager.free_batch(untyped)
    manager.reorder([], [])
    buffers = BatchBuffers(**make_buffers())
    assert manager.step([], 1, buffers).shape == (0, 2)
    assert buffers.slot_mapping.tolist() == [-1] * 8


def test_pairs_are_copy_blocks_block_mapping() -> None:
    manager = KVCacheManager(16, 4)
    manager.allocate(0, 6)
    for child in (1, 2, 3):
        manager.fork(0, child)
    pairs = manager.append_batch([0, 1, 2, 3])
    assert pairs.tolist() == [[1, 2], [1, 3], [1, 4]]
    mapping = torch.from_numpy(pairs)
    assert mapping.dtype == torch.int64 and mapping.is_contiguous()
    assert pairs.flags.owndata and pairs.nbytes == 48


@pytest.mark.parametrize(
    ("num_blocks", "block_size"),
    [(0, 16), (-1, 16), (16, 0), (16, -1), (2**31 - 1, 16), (16, 2**60), (2**63 - 1, 2**63 - 1)],
)
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(kv_cache.InvalidArgument, match=r"expected .* got"):
        KVCacheManager(num_blocks, block_size)


def test_errors_have_the_documented_bases() -> None:
    for name in (
        "InvalidArgument",
        "UnknownSequence",
        "DuplicateSequence",
        "OutOfBlocks",
        "ReferenceOverflow",
        "IntegrityError",
    ):
        assert issubclass(getattr(kv_cache, name), kv_cache.KVCacheError)
    assert issubclass(kv_cache.KVCacheError, RuntimeError)
    assert issubclass(kv_cache.InvalidArgument, ValueError)


def test_pickle_and_copy_are_refused() -> None:
    manager = KVCacheManager(8, 4)
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            call(manager)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork() beside torch's threads
def test_a_fork_of_the_process_is_refused() -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(1, 3)
    child = os.fork()
    if child == 0:
        try:
            manager.append(1)
        except kv_cache.KVCacheError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    manager.append(1)


def test_threads_share_one_manager() -> None:
    manager = KVCacheManager(4096, 4)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            ids = np.arange(first, first + 50)
            buffers = BatchBuffers.zeros(50, 16, 200)
            for _ in range(40):
                manager.allocate_batch(ids, 3)
                for _ in range(4):
                    manager.step(ids, 2, buffers)
                assert (buffers.seq_lens == 11).all()
                manager.free_batch(ids)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    manager.check_integrity()
    assert manager.num_free_blocks == 4096
