"""A KVCacheManager beside its plain model: how both start, and what holds after every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from model import Model, Sequence
from ranks import AllRanks

from vllm_kernels import kv_cache
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

MANY = 10**6


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 40),
        block_size=st.integers(1, 6),
        max_references=st.sampled_from([2, 3, MANY, MANY]),
        windows=st.sampled_from(
            [(None,), (None,), (None,), (1,), (1, 1), (2,), (5,), (None, 3), (4, None, 9)]
        ),
        host=st.sampled_from([0, 5, 50]),
        watermark=st.sampled_from([0, 0, 2]),
        hash_bits=st.sampled_from([1, 3, 128]),
        caching=st.sampled_from([True, True, True, False]),
        ranks=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2), (3, 1)]),
    )
    def start(self, ranks: tuple[int, int], **given: Any) -> None:
        given["watermark"] = min(given["watermark"], given["num_blocks"] - 2)  # fewer than usable
        names = {"host": "num_host_blocks", "watermark": "watermark_blocks"}
        names |= {"caching": "prefix_caching"}
        arguments = {names.get(name, name): value for name, value in given.items()}
        shards, interleave = ranks
        self.manager: Any
        if shards == 1:
            self.manager = KVCacheManager(**arguments, events=True)
        else:
            arguments["block_size"] = interleave * (1 + arguments["block_size"] // 3)
            self.manager = AllRanks(**arguments, shards=shards, interleave=interleave, events=True)
        self.model = Model(
            self.manager, given["caching"], given["watermark"], given["max_references"]
        )
        self.block_size = self.manager.block_size
        self.usable = self.manager.num_blocks - (self.manager.null_block is not None)
        self.next_id = 0
        self.num_copies = self.peak = 0
        # Columns for more blocks than there are: those run out first.
        self.buffers = [
            BatchBuffers.zeros(512, self.manager.num_blocks + 6, 512 * 6)
            for _ in self.manager.windows
        ]

    # --- helpers ---

    @property
    def sequences(self) -> dict[int, Sequence]:
        return self.model.sequences

    def on_device(self) -> list[int]:
        return sorted(i for i, sequence in self.sequences.items() if not sequence.swapped)

    def some_ids(self, data: st.DataObject) -> list[int]:
        ids = self.on_device()
        return data.draw(st.lists(st.sampled_from(ids), unique=True), "ids") if ids else []

    def any_id(self, data: st.DataObject, label: str = "id") -> int:
        return data.draw(st.sampled_from(self.on_device()), label)

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id * (-1) ** self.next_id

    def state(self) -> tuple[Any, ...]:
        self.model.follow_events()
        statistics = self.manager.statistics()
        fields = [name for name in dir(statistics) if not name.startswith("_")]
        groups = range(self.manager.num_groups)
        return (
            sorted(self.manager.sequence_ids()),
            {i: [self.model.table(i, group) for group in groups] for i in self.sequences},
            {i: self.manager.num_tokens(i) for i in self.sequences},
            {i: self.manager.num_known_tokens(i) for i in self.sequences},
            {name: getattr(statistics, name) for name in fields},
            dict(self.model.findable),
        )

    def refused(
        self, error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]
    ) -> Exception:
        before = self.state()
        with pytest.raises(error) as info:
            call()
        assert self.state() == before
        return info.value

    def out_of_blocks(self, call: Callable[[], Any], needed: int, free: int) -> None:
        error = self.refused(kv_cache.OutOfBlocks, call)
        assert isinstance(error, kv_cache.OutOfBlocks)
        assert (error.needed, error.free) == (needed, free)

    def draw_tokens(self, data: st.DataObject, count: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count), "tokens")

    # --- invariants ---

    @invariant()
    def holds_together(self) -> None:
        manager, model = self.manager, self.model
        manager.check_integrity()
        assert sorted(manager.sequence_ids()) == sorted(self.sequences)
        model.check_readers()
        references = model.references()
        filled: dict[int, int] = {}  # slots that some reader uses, of each block
        entries = 0
        for i, sequence in self.sequences.items():
            length = len(sequence.tokens)
            assert i in manager and manager.num_tokens(i) == length
            known = manager.num_known_tokens(i)
            assert known == (-1 if sequence.known is None else sequence.known), (i, known)
            if sequence.swapped:
                continue
            for group in range(manager.num_groups):
                for index, block in enumerate(model.table(i, group)):
                    if block == model.null:
                        continue
                    entries += 1
                    last = max(0, min(self.block_size, length - index * self.block_size))
                    filled[block] = max(filled.get(block, 0), last)
        cached = model.findable.keys() - references.keys()
        on_device = [sequence for sequence in self.sequences.values() if not sequence.swapped]
        statistics = manager.statistics()
        assert statistics.total_blocks == self.usable
        assert statistics.used_blocks == len(references)
        assert statistics.cached_blocks == len(cached)
        assert statistics.free_blocks == self.usable - len(references) - len(cached)
        assert manager.num_free_blocks == self.usable - len(references)
        assert statistics.shared_blocks == sum(count > 1 for count in references.values())
        assert statistics.table_entries == references.total() == entries
        assert statistics.num_tokens == sum(len(sequence.tokens) for sequence in on_device)
        assert statistics.num_sequences == manager.num_sequences == len(self.sequences)
        assert statistics.num_swapped_sequences == len(self.sequences) - len(on_device)
        assert statistics.waste_slots == sum(self.block_size - used for used in filled.values())
        assert statistics.num_copies == self.num_copies
        assert statistics.peak_used_blocks >= max(self.peak, len(references))
        host = Counter(
            block
            for i, sequence in self.sequences.items()
            if sequence.swapped
            for group in range(manager.num_groups)
            for block in model.table(i, group)
            if block >= 0
        )
        assert statistics.used_host_blocks == len(host)
        self.peak = statistics.peak_used_blocks
