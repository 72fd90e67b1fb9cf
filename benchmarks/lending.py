"""What bench_lending.py runs: a model, the sequences of two instances, and their schedule.

The schedule depends on lengths alone, so all ranks have the same one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_kernels.distributed import Ledger
from vllm_kernels.kv_cache import KVCacheManager, OutOfBlocks

BORROWER, LENDER = 0, 1
BLOCK = 16


@dataclass
class Sequence:
    """A prompt of ``prompt`` tokens that grows to ``end`` tokens."""

    id: int  # in order of arrival, over both instances
    prompt: int
    end: int
    length: int = 0  # tokens that exist
    computed: int = 0  # tokens with keys and values
    steps: list[int] = field(default_factory=list)  # that gave it a token


class Defaults(NamedTuple):
    """Options of the command line that are not given."""

    long: int
    short: int
    shorts: int
    tokens: int
    budget: int
    share: float
    rounds: int


SMALL = Defaults(long=200, short=24, shorts=5, tokens=64, budget=64, share=0.1, rounds=0)
LARGE = Defaults(long=16384, short=512, shorts=16, tokens=512, budget=2048, share=0.1, rounds=3)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def make_trace(long: int, short: int, shorts: int, tokens: int) -> list[list[Sequence]]:
    """The sequences of both instances. Short ones generate half to all of ``tokens``."""
    prompts = [[long] + [short] * shorts, [short] * (shorts // 2)]
    trace: list[list[Sequence]] = []
    for lengths in prompts:
        first = sum(map(len, trace))
        new = [tokens - index * tokens // (2 * len(lengths)) for index in range(len(lengths))]
        trace.append([
            Sequence(first + index, length, length + new[index], length)
            for index, length in enumerate(lengths)
        ])  # fmt: skip
    return trace


def blocks_for(sequences: list[Sequence], share: float) -> int:
    """Blocks for all prompts, and for a share of what the sequences generate."""
    prompts = sum(blocks_of(sequence.prompt) for sequence in sequences)
    ends = sum(blocks_of(sequence.end) for sequence in sequences)
    return prompts + len(sequences) + int(share * (ends - prompts))


@dataclass
class Loan:
    """The new token of a sequence whose last blocks are lent."""

    sequence: Sequence
    blocks: npt.NDArray[np.int32]
    tokens: int  # in these blocks, with the new one

    @property
    def slot(self) -> int:
        last = self.tokens - 1
        return int(self.blocks[last // BLOCK]) * BLOCK + last % BLOCK


@dataclass
class Plan:
    """A step of one instance."""

    rows: list[tuple[Sequence, int]] = field(default_factory=list)  # and the tokens to compute
    swaps: list[tuple[bool, npt.NDArray[np.int64]]] = field(default_factory=list)  # True: out


class Schedule:
    """What both instances do, step by step. Equal on all ranks."""

    def __init__(self, mode: str, trace: list[list[Sequence]], num_blocks: int, budget: int):
        self.mode, self.budget = mode, budget
        host = num_blocks if mode == "swap" else 0
        self.managers = [
            KVCacheManager(num_blocks, BLOCK, num_host_blocks=host, prefix_caching=False)
            for _ in trace
        ]
        self.ledger = Ledger(self.managers)
        self.waiting = [deque(sequences) for sequences in trace]
        self.running: list[list[Sequence]] = [[] for _ in trace]
        self.preemptions = self.lent = self.num_steps = 0
        self.moved: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None

    def is_done(self, instance: int) -> bool:
        return not (self.waiting[instance] or self.running[instance])

    def step(self) -> tuple[list[Plan], Loan | None]:
        """Plans the next step of both instances."""
        self.moved = None
        self.ledger.set_reserve(LENDER, self._missing(LENDER))
        plans = [self._plan(instance) for instance in (BORROWER, LENDER)]
        return plans, self._loan(plans[BORROWER])

    def advance(self, plans: list[Plan]) -> None:
        """The step is done: lengths grow, and finished sequences free their blocks."""
        for instance, plan in enumerate(plans):
            for sequence, count in plan.rows:
                sequence.computed += count
                if sequence.computed == sequence.length:
                    sequence.length += 1
                    sequence.steps.append(self.num_steps)
                if sequence.length == sequence.end:
                    self._release(instance, sequence)
                    self.running[instance].remove(sequence)
        self.num_steps += 1

    def _missing(self, instance: int) -> int:
        """Blocks that the instance's sequences still need to the end."""
        sequences = [*self.waiting[instance], *self.running[instance]]
        ends = sum(blocks_of(sequence.end) for sequence in sequences)
        manager = self.managers[instance]
        return ends - sum(
            blocks_of(manager.num_tokens(sequence.id)) for sequence in self.running[instance]
        )

    def _plan(self, instance: int) -> Plan:
        plan = Plan()
        self._admit(instance, plan)
        while not self._take_blocks(instance, plan):
            if not (instance == BORROWER and self.mode == "lend" and self._move_to_lender()):
                self._preempt(instance, plan)
        return plan

    def _admit(self, instance: int, plan: Plan) -> None:
        """Starts sequences while there is room for their tokens. A block for each running one
        stays free."""
        manager, running = self.managers[instance], self.running[instance]
        while self.waiting[instance]:
            sequence = self.waiting[instance][0]
            ahead = sum(blocks_of(s.length) - blocks_of(s.computed) for s in running)
            needed = blocks_of(sequence.length) + ahead + len(running)
            if running and needed > manager.num_free_blocks:
                return
            if sequence.id in manager:
                plan.swaps.append((False, manager.swap_in([sequence.id])))
            else:
                manager.allocate(sequence.id, 0)
            running.append(self.waiting[instance].popleft())

    def _take_blocks(self, instance: int, plan: Plan) -> bool:
        """Chooses the next tokens: one of each decoding sequence, then chunks of prompts. A
        sequence with lent blocks has row 0. Returns whether there are blocks for all."""
        order = sorted(
            self.running[instance],
            key=lambda s: (s.length - s.computed > 1, s.id not in self.ledger, s.id),
        )
        plan.rows, budget = [], self.budget
        for sequence in order:
            count = min(sequence.length - sequence.computed, budget)
            budget -= count
            if count:
                plan.rows.append((sequence, count))
        at_home = [(s.id, count) for s, count in plan.rows if s.id not in self.ledger]
        try:
            self.managers[instance].append_batch(
                [sequence for sequence, _ in at_home], [count for _, count in at_home]
            )
        except OutOfBlocks:
            return False
        return True

    def _move_to_lender(self) -> bool:
        """Moves the end of the longest sequence to lent blocks. So many stay that the other
        sequences have room to their ends. Returns False if the lender has too few for it."""
        manager, running = self.managers[BORROWER], self.running[BORROWER]
        longest = max(running, key=lambda sequence: sequence.length)
        has_loan = any(sequence.id in self.ledger for sequence in running)
        if has_loan or longest.length - longest.computed > 1:
            return False
        others = sum(blocks_of(s.end) for s in running if s is not longest)
        kept = max(manager.num_blocks - others, 1)
        table = manager.block_table(longest.id)[kept:]
        free = self.ledger.counts(LENDER).free - self.ledger.counts(LENDER).reserve
        if not len(table) or free < blocks_of(longest.end) - kept:
            return False
        rows = self.ledger.lend(LENDER, BORROWER, longest.id, len(table))
        manager.truncate(longest.id, kept * BLOCK)
        self.moved = table.copy(), rows[:, 1].copy()
        self.lent += len(table)
        return True

    def _loan(self, plan: Plan) -> Loan | None:
        """The row with lent blocks, if there is one. It gets a block for its new token."""
        for sequence, _ in plan.rows:
            if sequence.id in self.ledger:
                tokens = sequence.length - self.managers[BORROWER].num_tokens(sequence.id)
                if tokens > len(self.ledger.blocks(sequence.id)) * BLOCK:
                    self.ledger.lend(LENDER, BORROWER, sequence.id, 1)
                    self.lent += 1
                return Loan(sequence, self.ledger.blocks(sequence.id)[:, 1], tokens)
        return None

    def _preempt(self, instance: int, plan: Plan) -> None:
        """Takes the blocks of the sequence that came last."""
        running = self.running[instance]
        if len(running) == 1:
            raise RuntimeError(f"instance {instance} has too few blocks for one sequence")
        last = max(running, key=lambda sequence: sequence.id)
        running.remove(last)
        if self.mode == "swap":
            plan.swaps.append((True, self.managers[instance].swap_out([last.id])))
        else:
            self._release(instance, last)
            last.computed = 0
        self.waiting[instance].appendleft(last)
        self.preemptions += 1

    def _release(self, instance: int, sequence: Sequence) -> None:
        self.managers[instance].free(sequence.id)
        if sequence.id in self.ledger:
            self.ledger.free(sequence.id)

    def check_end(self) -> None:
        """All blocks are free, and nobody owes one."""
        self.ledger.check_integrity()
        assert self.ledger.owed(BORROWER, LENDER) == 0
        assert all(manager.num_free_blocks == manager.num_blocks for manager in self.managers)


class Clock:
    """When the steps of a rank ended, without a wait for each of them."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of the steps, after the device is synchronized."""
        first, *others = self.marks
        if self.on_cuda:
            return [first.elapsed_time(event) * 1e-3 for event in others]
        return [mark - first for mark in others]

    def latency(self, sequences: list[Sequence]) -> tuple[float, float]:
        """The longest pause between two tokens, and the mean seconds to a sequence's end."""
        seconds = np.array(self.seconds())
        pause = max(float(np.diff(seconds[sequence.steps]).max()) for sequence in sequences)
        return pause, float(np.mean([seconds[sequence.steps[-1]] for sequence in sequences]))


# --- the model


@dataclass(frozen=True)
class Sizes:
    """Of a Qwen3 with tied embeddings; the values are those of 596 M parameters."""

    vocabulary: int = 151936
    hidden: int = 1024
    intermediate: int = 3072
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128


TINY = Sizes(512, 64, 128, layers=2, heads=4, kv_heads=2, head_size=32)


class Model:
    """Random weights, the same on all ranks, and the table of rotations."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, max_length: int):
        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, columns: int) -> Tensor:
            tensor = torch.randn(rows, columns, generator=generator, device=device)
            return (tensor * columns**-0.5).to(dtype)

        self.sizes = sizes
        self.heads = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        self.embeddings = random(sizes.vocabulary, sizes.hidden)
        ones = torch.ones(sizes.hidden, dtype=dtype, device=device)
        # Queries are longer than those of a new model, so that few tokens have most of the weight.
        sharp = torch.full((sizes.head_size,), 3.0, dtype=dtype, device=device)
        self.layers = [
            {
                "norm_1": ones,
                "qkv": random(sum(self.heads) * sizes.head_size, sizes.hidden),
                "q_norm": sharp,
                "k_norm": sharp / 3,
                "out": random(sizes.hidden, sizes.heads * sizes.head_size),
                "norm_2": ones,
                "gate_up": random(2 * sizes.intermediate, sizes.hidden),
                "down": random(sizes.hidden, sizes.intermediate),
            }
            for _ in range(sizes.layers)
        ]
        self.norm = ones
        exponents = torch.arange(0, sizes.head_size, 2, device=device) / sizes.head_size
        angles = torch.arange(max_length, device=device)[:, None] / 1e6**exponents
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
