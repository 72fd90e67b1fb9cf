"""Random loans between instances against a plain model, with failing allocations.

``python ledger_traces.py --seconds 60 --seed 7`` prints what happened, as JSON. With
``--allocations LIBRARY`` each call of the ledger is repeated with its k-th allocation failing, for
every k. LIBRARY is failing_allocations.cpp, compiled and preloaded (LD_PRELOAD).

The model knows which sequence has which block, and what is in every block. It chooses lenders and
destinations by the rules that the ledger documents, and never asks the ledger.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_kernels.distributed import Ledger
from vllm_kernels.kv_cache import (
    InvalidArgument,
    KVCacheError,
    KVCacheManager,
    OutOfBlocks,
    UnknownSequence,
)

BLOCK_SIZE = 2
Block = tuple[int, int]
"""Instance and block."""


@dataclass
class Instance:
    total: int
    local: dict[int, list[int]] = field(default_factory=dict)
    """Blocks of the sequences in the instance's manager."""
    reserve: int = 0
    lost: bool = False


@dataclass
class Loan:
    home: int
    blocks: list[Block]


class Model:
    def __init__(self, sizes: list[int]) -> None:
        self.instances = [Instance(size) for size in sizes]
        self.loans: dict[int, Loan] = {}

    def held(self, instance: int) -> list[int]:
        """Blocks of the instance that the ledger has."""
        return [b for loan in self.loans.values() for i, b in loan.blocks if i == instance]

    def owed(self, borrower: int, lender: int) -> int:
        if borrower == lender:
            return 0
        return sum(
            i == lender
            for loan in self.loans.values()
            if loan.home == borrower
            for i, _ in loan.blocks
        )

    def lent(self, lender: int) -> int:
        return sum(self.owed(borrower, lender) for borrower in range(len(self.instances)))

    def free(self, instance: int) -> int:
        one = self.instances[instance]
        return one.total - sum(map(len, one.local.values())) - len(self.held(instance))

    def spare(self, instance: int) -> int:
        one = self.instances[instance]
        return 0 if one.lost else max(0, self.free(instance) - one.reserve)

    def lender(self, borrower: int, count: int) -> int:
        """The one that lends if nobody is named."""
        if self.spare(borrower) >= count:
            return borrower
        most = max(self.spare(i) for i in range(len(self.instances)))
        if most == self.spare(borrower):
            return borrower
        return next(i for i in range(len(self.instances)) if self.spare(i) == most)

    def recalled(self, lender: int, count: int) -> list[tuple[int, int, int]]:
        """(sequence, index of its block, destination) of each move."""
        spare = [0 if i == lender else self.spare(i) for i in range(len(self.instances))]
        moves: list[tuple[int, int, int]] = []
        for sequence, loan in sorted(self.loans.items(), reverse=True):
            for index in reversed(range(len(loan.blocks))):
                if len(moves) == count:
                    return moves
                if loan.home == lender or loan.blocks[index][0] != lender:
                    continue
                to = loan.home if spare[loan.home] else spare.index(max(spare))
                spare[to] -= 1
                moves.append((sequence, index, to))
        return moves

    def lost_with(self, instance: int) -> list[int]:
        ids = set(self.instances[instance].local)
        for sequence, loan in self.loans.items():
            if loan.home == instance or any(i == instance for i, _ in loan.blocks):
                ids.add(sequence)
        return sorted(ids)


class Trace:
    """One cluster, its model, and the contents of all blocks."""

    def __init__(self, seed: int, failing: ctypes.CDLL | None) -> None:
        self.random = random.Random(seed)
        self.failing = failing
        sizes = [self.random.randint(1, 12) for _ in range(self.random.randint(1, 5))]
        self.managers = [KVCacheManager(size, BLOCK_SIZE) for size in sizes]
        self.ledger = Ledger(self.managers)
        self.model = Model(sizes)
        self.contents: dict[Block, tuple[int, int]] = {}
        """Sequence and index of its block."""
        self.next_id = 0
        self.happened: Counter[str] = Counter()

    # --- calls ---

    def state(self) -> tuple[Any, ...]:
        """Everything that can be asked."""
        instances = range(len(self.managers))
        return (
            [self.ledger.blocks(i).tolist() for i in sorted(self.model.loans)],
            [self.ledger.counts(i) for i in instances],
            [self.ledger.owed(i, j) for i in instances for j in instances],
            [
                {i: manager.block_table(i).tolist() for i in manager.sequence_ids()}
                for manager in self.managers
            ],
            [manager.num_free_blocks for manager in self.managers],
        )

    def call(self, function: Callable[[], Any]) -> Any:
        """The call; before it, the same with each of its allocations failing."""
        if self.failing is not None:
            before = self.state()
            for number in itertools.count():
                result, error = None, None
                self.failing.fail_allocation(number)
                try:
                    result = function()
                except Exception as one:
                    error = one
                failed = self.failing.stop_failing()
                if not failed:
                    if error is not None:
                        raise error
                    return result
                # Another error than MemoryError: while one was raised, its message found no memory.
                assert error is not None, result
                self.happened["failed allocations"] += 1
                self.ledger.check_integrity()
                assert self.state() == before
        return function()

    def refused(self, kind: type[KVCacheError], function: Callable[[], Any]) -> KVCacheError:
        before = self.state()
        try:
            self.call(function)
        except kind as error:
            assert self.state() == before
            self.happened[kind.__name__] += 1
            return error
        raise AssertionError(f"expected {kind.__name__}")

    def out_of_blocks(self, needed: int, free: int, function: Callable[[], Any]) -> None:
        error = self.refused(OutOfBlocks, function)
        assert isinstance(error, OutOfBlocks) and (error.needed, error.free) == (needed, free)

    # --- choices ---

    def any_instance(self) -> int:
        return self.random.randrange(len(self.managers))

    def any_loan(self) -> int | None:
        return self.random.choice(sorted(self.model.loans)) if self.model.loans else None

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id * self.random.choice((1, -1))

    # --- steps ---

    def use(self) -> None:
        """A sequence of an instance's own, whose tokens may stay cached."""
        i, count = self.any_instance(), self.random.randint(0, 6)
        if self.model.instances[i].lost:
            return
        sequence = self.new_id()
        prompt = [abs(sequence)] * (count * BLOCK_SIZE)
        tokens = self.random.choice((prompt, len(prompt)))
        if count > self.model.free(i):
            self.refused(OutOfBlocks, lambda: self.managers[i].allocate(sequence, tokens))
            return
        self.managers[i].allocate(sequence, tokens)
        table = self.managers[i].block_table(sequence).tolist()
        assert set(table).isdisjoint(self.model.held(i)), "a lent block was given out"
        self.model.instances[i].local[sequence] = table
        for index, block in enumerate(table):
            self.contents[i, block] = (sequence, index)

    def stop_using(self) -> None:
        i = self.any_instance()
        local = self.model.instances[i].local
        if local:
            sequence = self.random.choice(sorted(local))
            self.managers[i].free(sequence)
            del local[sequence]

    def lend(self) -> None:
        model, borrower = self.model, self.any_instance()
        lender = self.random.choice((None, None, self.any_instance()))
        count = self.random.randint(1, 4)
        homes = [i for i, loan in model.loans.items() if loan.home == borrower]
        sequence = self.random.choice([self.new_id(), *homes])
        call = lambda: self.ledger.lend(lender, borrower, sequence, count)  # noqa: E731
        if any(model.instances[i].lost for i in (borrower, lender) if i is not None):
            self.refused(InvalidArgument, call)
            return
        source = model.lender(borrower, count) if lender is None else lender
        if count > model.spare(source):
            self.out_of_blocks(count, model.spare(source), call)
            return
        before = self.taken_blocks()
        rows = [(int(i), int(block)) for i, block in self.call(call)]
        assert len(set(rows)) == count and {i for i, _ in rows} == {source}
        assert before.isdisjoint(rows), "a block was lent that somebody has"
        loan = model.loans.setdefault(sequence, Loan(borrower, []))
        for row in rows:
            self.contents[row] = (sequence, len(loan.blocks))
            loan.blocks.append(row)
        self.happened["lent"] += 1

    def taken_blocks(self) -> set[Block]:
        local = {
            (i, block)
            for i, one in enumerate(self.model.instances)
            for table in one.local.values()
            for block in table
        }
        return local | {block for loan in self.model.loans.values() for block in loan.blocks}

    def give_back(self) -> None:
        sequence = self.any_loan()
        if sequence is None:
            return
        blocks = self.model.loans[sequence].blocks
        too_many = len(blocks) + 1
        self.refused(InvalidArgument, lambda: self.ledger.give_back(sequence, too_many))
        count = self.random.randint(0, len(blocks))
        self.call(lambda: self.ledger.give_back(sequence, count))
        del blocks[len(blocks) - count :]
        if not blocks:
            del self.model.loans[sequence]

    def free(self) -> None:
        sequence = self.any_loan()
        if sequence is None:
            return
        self.call(lambda: self.ledger.free(sequence))
        del self.model.loans[sequence]
        self.refused(UnknownSequence, lambda: self.ledger.free(sequence))
        assert sequence not in self.ledger

    def recall(self) -> None:
        model, lender = self.model, self.any_instance()
        count = self.random.randint(0, model.lent(lender) + 1)
        call = lambda: self.ledger.recall(lender, count)  # noqa: E731
        if model.instances[lender].lost or count > model.lent(lender):
            self.refused(InvalidArgument, call)
            return
        spare = sum(model.spare(i) for i in range(len(self.managers)) if i != lender)
        if count > spare:
            self.out_of_blocks(count, spare, call)
            return
        expected, taken = model.recalled(lender, count), self.taken_blocks()
        moves = self.call(call).tolist()
        assert len(moves) == len(expected)
        before = dict(self.contents)
        for move, (sequence, index, to) in zip(moves, expected, strict=True):
            source = model.loans[sequence].blocks[index]
            destination = (move[3], move[4])
            assert move[:4] == [sequence, *source, to]
            assert destination not in taken
            taken.add(destination)
            self.contents[destination] = before[source]
            model.loans[sequence].blocks[index] = destination
        self.happened["recalled"] += len(moves)

    def set_reserve(self) -> None:
        i, count = self.any_instance(), self.random.choice((0, 0, 1, 3))
        if self.model.instances[i].lost:
            self.refused(InvalidArgument, lambda: self.ledger.set_reserve(i, count))
            return
        self.call(lambda: self.ledger.set_reserve(i, count))
        self.model.instances[i].reserve = count

    def lose(self) -> None:
        i = self.any_instance()
        one = self.model.instances[i]
        if one.lost:
            self.refused(InvalidArgument, lambda: self.ledger.instance_lost(i))
            self.call(lambda: self.ledger.instance_back(i))
            one.lost = False
            one.local.clear()
            return
        self.refused(InvalidArgument, lambda: self.ledger.instance_back(i))
        if self.random.random() < 0.7:
            return
        expected = self.model.lost_with(i)
        assert self.call(lambda: self.ledger.instance_lost(i)) == expected
        for sequence in expected:
            self.model.loans.pop(sequence, None)
        one.lost, one.reserve = True, 0
        self.happened["lost"] += 1

    # --- invariants ---

    def check(self) -> None:
        ledger, model = self.ledger, self.model
        ledger.check_integrity()
        for i, one in enumerate(model.instances):
            counts = ledger.counts(i)
            assert counts.total == counts.lent + counts.used + counts.free == one.total
            assert (counts.lent, counts.free) == (model.lent(i), model.free(i))
            assert (counts.reserve, counts.lost) == (one.reserve, one.lost)
            for j in range(len(model.instances)):
                assert ledger.owed(i, j) == model.owed(i, j)
            assert counts.borrowed == sum(
                ledger.owed(i, j) for j in range(len(model.instances)) if j != i
            )
            for sequence, table in one.local.items():
                for index, block in enumerate(table):
                    assert self.contents[i, block] == (sequence, index)
        for sequence, loan in model.loans.items():
            rows = [tuple(row) for row in ledger.blocks(sequence).tolist()]
            assert rows == loan.blocks
            for index, row in enumerate(rows):
                assert self.contents[row] == (sequence, index)

    def run(self, steps: int) -> None:
        kinds = [self.use] * 4 + [self.stop_using] * 3 + [self.lend] * 8
        kinds += [self.give_back, self.free, self.recall, self.recall, self.set_reserve, self.lose]
        for _ in range(steps):
            self.random.choice(kinds)()
            self.happened["steps"] += 1
            self.check()


def run(seconds: float, seed: int, failing: ctypes.CDLL | None = None) -> Counter[str]:
    """Traces of 60 steps for so many seconds, at least one."""
    happened: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while not happened or time.monotonic() < end:
        try:
            trace = Trace(seed, failing)
            trace.run(60)
        except BaseException:
            print(f"seed {seed}")
            raise
        happened += trace.happened
        seed += 1
    return happened


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allocations")
    given = parser.parse_args()
    library = None if given.allocations is None else ctypes.CDLL(given.allocations)
    print(json.dumps(run(given.seconds, given.seed, library)))
