"""KVCacheManager against a plain model (model.py), in random histories of calls.

``KV_CACHE_EXAMPLES`` sets how many histories of up to 60 calls are run (default 60); 400 are more
than 10,000 calls (CONTRIBUTING.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from manager_machine import MANY, ManagerMachine
from model import Sequence

from vllm_kernels import kv_cache
from vllm_kernels.kv_cache import MultimodalItem

# Few tokens and long runs of one, so that prefixes meet.
PROMPTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6)), max_size=5).map(
    lambda runs: [token for token, count in runs for _ in range(count)]
)
KEYS = st.sampled_from(
    [{}, {}, {}, {"salt": "a"}, {"adapter": "a"}, {"salt": "a", "adapter": "a"}, {"salt": b"aa"}]
)
ITEMS = st.sampled_from(
    [(), (), (), (MultimodalItem(1, 4, "cat"),), (MultimodalItem(1, 4, "dog"),)]
)


class Calls(ManagerMachine):
    # --- new sequences ---

    @rule(prompt=PROMPTS, keys=KEYS, items=ITEMS, num_new=st.sampled_from([None, None, 0, 3]))
    def allocate(
        self, prompt: list[int], keys: dict[str, Any], items: tuple[Any, ...], num_new: int | None
    ) -> None:
        new, model, manager = self.new_id(), self.model, self.manager
        arguments = {**keys, "multimodal": items}
        if any(item.start + item.num_tokens > len(prompt) for item in items):
            self.refused(
                kv_cache.InvalidArgument, lambda: manager.allocate(new, prompt, **arguments)
            )
            return
        sequence = Sequence([], [], (tuple(sorted(keys.items())),), 0)
        numbers = model.number_prompt(sequence, prompt, items)
        cached, needed = model.needed_to_allocate(numbers, MANY if num_new is None else num_new)
        assert manager.match(prompt, **arguments) == cached
        _, needed_for_all = model.needed_to_allocate(numbers, MANY)
        fits = needed_for_all <= manager.num_free_blocks
        assert manager.can_allocate(prompt, **arguments) == fits
        call = lambda: manager.allocate(new, prompt, num_new=num_new, **arguments)  # noqa: E731
        if needed > manager.num_free_blocks:
            self.out_of_blocks(call, needed, manager.num_free_blocks)
            return
        before = manager.statistics()
        assert call() == cached
        after = manager.statistics()
        if model.caching:
            assert after.queried_tokens == before.queried_tokens + len(prompt)
            assert after.hit_tokens == before.hit_tokens + cached
        length = min(len(prompt), cached + (MANY if num_new is None else num_new))
        sequence.tokens, sequence.numbers = prompt[:length], numbers[:length]
        sequence.known = length if model.caching else None
        self.sequences[new] = sequence
        model.write(new, cached)
        model.follow_events()

    @rule(counts=st.lists(st.integers(0, 12), max_size=5), data=st.data())
    def allocate_batch(self, counts: list[int], data: st.DataObject) -> None:
        ids = [self.new_id() for _ in counts]
        needed = sum(map(self.model.blocks_for, counts)) * self.manager.num_groups
        needed += self.model.watermark if needed else 0
        free = self.manager.num_free_blocks
        call = lambda ids=ids: self.manager.allocate_batch(ids, counts)  # noqa: E731
        if len(counts) == 1:
            assert self.manager.can_allocate(counts[0]) == (needed <= free)
        if needed > free:
            self.out_of_blocks(call, needed, free)
            return
        if len(ids) > 1 and data.draw(st.booleans(), "twice"):
            self.refused(kv_cache.DuplicateSequence, lambda: call([ids[0], *ids[:-1]]))
        call()
        for i, count in zip(ids, counts, strict=True):
            known = 0 if self.model.caching else None
            self.sequences[i] = Sequence([], [], ((),), known)
            self.model.new_tokens(i, self.draw_tokens(data, count))
            self.model.write(i, 0)
        self.model.follow_events()

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.any_id(data, "parent"), self.new_id()
        references = self.model.references()
        used = self.model.blocks_for(len(self.sequences[parent].tokens))
        shared = {
            block
            for group in range(self.manager.num_groups)
            for block in self.model.table(parent, group)[:used]
            if block != self.model.null
        }
        if any(references[block] >= self.model.max_references for block in shared):
            self.refused(kv_cache.ReferenceOverflow, lambda: self.manager.fork(parent, child))
            return
        self.manager.fork(parent, child)
        self.sequences[child] = self.sequences[parent].copy()
        full = len(self.sequences[child].tokens) // self.block_size
        assert self.manager.num_common_prefix_blocks([parent, child]) == full * (
            self.model.null not in self.model.table(child)[:full]
        )

    # --- more tokens ---

    def append_to(
        self,
        data: st.DataObject,
        ids: list[int],
        counts: list[int],
        call: Callable[..., np.ndarray],
    ) -> bool:
        """Appends with or without their tokens; True if there was room."""
        model = self.model
        lookahead = data.draw(st.sampled_from([0, 0, 0, 2]), "lookahead")
        tokens = [self.draw_tokens(data, count) for count in counts]
        flat = [token for some in tokens for token in some]
        told = data.draw(st.booleans(), "told")
        given: dict[str, Any] = {"lookahead": lookahead}
        if told:
            given["tokens"] = data.draw(
                st.sampled_from([flat, np.array(flat, np.int32), torch.tensor(flat).long()])
            )
            behind = [
                i
                for i, count in zip(ids, counts, strict=True)
                if count and self.sequences[i].known not in (None, len(self.sequences[i].tokens))
            ]
            self.refused(kv_cache.InvalidArgument, lambda: call(**{**given, "tokens": [*flat, 1]}))
            if behind:
                self.refused(kv_cache.InvalidArgument, lambda: call(**given))
                return False
        needed, copies, freed = model.needed_to_append(ids, counts, lookahead)
        free = self.manager.num_free_blocks + freed
        if needed > free:
            self.out_of_blocks(lambda: call(**given), needed, free)
            return False
        pairs = call(**given)
        assert len(pairs) == copies if model.null is None else len(pairs) <= copies
        assert set(pairs[:, 0].tolist()).isdisjoint(pairs[:, 1].tolist())
        model.copy_blocks(pairs, model.shadow, model.shadow)
        self.num_copies += len(pairs)
        for i, some in zip(ids, tokens, strict=True):
            start = len(self.sequences[i].tokens)
            model.new_tokens(i, some)
            model.write(i, start)
            if told and some and self.sequences[i].known is not None:
                self.sequences[i].known = start + len(some)
            wanted = model.blocks_for(start + len(some) + lookahead)
            if some or lookahead:
                assert len(model.table(i)) >= wanted
        model.follow_events()
        return True

    @precondition(lambda self: self.on_device())
    @rule(data=st.data(), count=st.integers(0, 9))
    def append(self, data: st.DataObject, count: int) -> None:
        i = self.any_id(data)
        self.append_to(data, [i], [count], lambda **given: self.manager.append(i, count, **given))

    @precondition(lambda self: self.on_device())
    @rule(data=st.data(), count=st.integers(0, 3))
    def append_batch(self, data: st.DataObject, count: int) -> None:
        ids = self.some_ids(data)
        array = np.array(ids, dtype=np.int64)
        call = lambda **given: self.manager.append_batch(array, count, **given)  # noqa: E731
        self.append_to(data, ids, [count] * len(ids), call)

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        counts = [data.draw(st.integers(0, 5), "count") for _ in ids]
        id_tensor = torch.tensor(ids, dtype=torch.int64)
        count_tensor = torch.tensor(counts, dtype=torch.int32)
        call = lambda **given: self.manager.step(  # noqa: E731
            id_tensor, count_tensor, self.buffers, **given
        )
        if self.append_to(data, ids, counts, call):
            self.check_buffers(ids, counts)

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def build(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        lengths = [len(self.sequences[i].tokens) for i in ids]
        counts = [data.draw(st.integers(0, min(6, length)), "count") for length in lengths]
        assert self.manager.build(ids, counts, self.buffers) == sum(counts)
        self.check_buffers(ids, counts)
        if data.draw(st.booleans(), "invalidate"):
            for buffers in self.buffers:
                buffers.block_tables.fill_(99)
                buffers.slot_mapping.fill_(99)
                buffers.invalidate()
            self.manager.build(ids, counts, self.buffers)
            self.check_buffers(ids, counts)
            assert self.buffers[0].changed_rows.tolist() == list(range(len(ids)))

    def check_buffers(self, ids: list[int], counts: list[int]) -> None:
        total = sum(counts)
        for group, buffers in enumerate(self.buffers):
            starts = buffers.query_start_loc.tolist()
            slots = buffers.slot_mapping.tolist()
            positions = buffers.positions.tolist()
            for row, (i, count) in enumerate(zip(ids, counts, strict=True)):
                table = self.model.table(i, group)
                assert buffers.block_tables[row, : len(table)].tolist() == table
                length = self.manager.num_tokens(i)
                assert buffers.seq_lens[row] == length
                begin, end = starts[row], starts[row + 1]
                assert end - begin == count
                assert positions[begin:end] == list(range(length - count, length))
                wanted = self.manager.slot_mapping(i, length - count, group=group).tolist()
                assert slots[begin:end] == wanted
            assert buffers.seq_lens[len(ids) :].count_nonzero() == 0
            assert all(start == total for start in starts[len(ids) :])
            assert all(slot == -1 for slot in slots[total:])
            assert not any(positions[total:])

    @precondition(lambda self: self.on_device() and self.model.caching)
    @rule(data=st.data())
    def record_tokens(self, data: st.DataObject) -> None:
        i = self.any_id(data)
        sequence = self.sequences[i]
        if sequence.known is None:
            return
        unknown = len(sequence.tokens) - sequence.known
        self.refused(
            kv_cache.InvalidArgument,
            lambda: self.manager.record_tokens([i], unknown + 1, [0] * (unknown + 1)),
        )
        count = data.draw(st.integers(0, unknown), "count")
        told = sequence.tokens[sequence.known : sequence.known + count]
        self.manager.record_tokens([i], count, told)
        sequence.known += count
        self.model.follow_events()

    # --- fewer tokens ---

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def truncate_batch(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        keep = [data.draw(st.integers(0, len(self.sequences[i].tokens)), "keep") for i in ids]
        call = lambda: self.manager.truncate_batch(ids, keep)  # noqa: E731
        for i, length in zip(ids, keep, strict=True):
            for group, window in enumerate(self.manager.windows):
                seen = self.model.table(i, group)[: self.model.blocks_for(length)]
                if self.model.null in seen[self.model.first_visible(length, window) :]:
                    self.refused(kv_cache.InvalidArgument, call)
                    return
        call()
        for i, length in zip(ids, keep, strict=True):
            sequence = self.sequences[i]
            del sequence.tokens[length:], sequence.numbers[length:]
            if sequence.known is not None:
                sequence.known = min(sequence.known, length)
            assert len(self.model.table(i)) == self.model.blocks_for(length)
        self.model.follow_events()

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def truncate_too_little(self, data: st.DataObject) -> None:
        i = self.any_id(data)
        length = len(self.sequences[i].tokens)
        self.refused(kv_cache.InvalidArgument, lambda: self.manager.truncate(i, length + 1))

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        parents = [self.any_id(data, "parent") for _ in ids]
        groups = range(self.manager.num_groups)
        used = {i: self.model.blocks_for(len(self.sequences[i].tokens)) for i in self.on_device()}
        tables = {i: [self.model.table(i, g)[: used[i]] for g in groups] for i in used}
        references = self.model.references()
        for i, parent in zip(ids, parents, strict=True):
            if parent != i:
                for table in tables[parent]:
                    references.update(block for block in table if block != self.model.null)
        if max(references.values(), default=0) > self.model.max_references:
            self.refused(kv_cache.ReferenceOverflow, lambda: self.manager.reorder(ids, parents))
            return
        self.manager.reorder(ids, parents)
        before = dict(self.sequences)
        for i, parent in zip(ids, parents, strict=True):
            self.sequences[i] = before[parent].copy()
            if parent != i:
                assert [self.model.table(i, group) for group in groups] == tables[parent]
        self.model.follow_events()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.sequences)), "id")
        self.manager.free(i)
        del self.sequences[i]
        self.refused(kv_cache.UnknownSequence, lambda: self.manager.free(i))

    @precondition(lambda self: self.on_device())
    @rule(data=st.data())
    def free_batch(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        call = self.manager.free_batch
        if ids:
            self.refused(kv_cache.DuplicateSequence, lambda: call([*ids, ids[0]]))
        self.refused(kv_cache.UnknownSequence, lambda: call([*ids, MANY]))
        call(ids)
        for i in ids:
            del self.sequences[i]

    # --- host blocks ---

    @precondition(lambda self: self.on_device() and self.manager.num_host_blocks)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        ids, model = self.some_ids(data), self.model
        blocks = {
            block
            for i in ids
            for group in range(self.manager.num_groups)
            for block in model.table(i, group)[: model.blocks_for(len(self.sequences[i].tokens))]
            if block != model.null
        }
        free = self.manager.num_free_host_blocks
        assert self.manager.can_swap_out(ids) == (len(blocks) <= free)
        if len(blocks) > free:
            self.out_of_blocks(lambda: self.manager.swap_out(ids), len(blocks), free)
            return
        pairs = self.manager.swap_out(ids)
        assert sorted(pairs[:, 0].tolist()) == sorted(blocks)
        model.copy_blocks(pairs, model.shadow, model.host)
        for i in ids:
            assert self.manager.is_swapped(i)
            self.sequences[i].swapped = True
            self.refused(kv_cache.InvalidArgument, lambda i=i: self.manager.append(i))
            self.refused(kv_cache.InvalidArgument, lambda i=i: self.manager.swap_out([i]))
        model.follow_events()

    @precondition(lambda self: any(sequence.swapped for sequence in self.sequences.values()))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        model = self.model
        swapped = sorted(i for i, sequence in self.sequences.items() if sequence.swapped)
        ids = data.draw(st.lists(st.sampled_from(swapped), unique=True), "ids")
        needed, free = model.needed_to_swap_in(ids), self.manager.num_free_blocks
        assert self.manager.can_swap_in(ids) == (needed <= free)
        if needed > free:
            self.out_of_blocks(lambda: self.manager.swap_in(ids), needed, free)
            return
        pairs = self.manager.swap_in(ids)
        model.copy_blocks(pairs, model.host, model.shadow)
        for i in ids:
            assert not self.manager.is_swapped(i)
            self.sequences[i].swapped = False
        model.follow_events()

    # --- the whole cache ---

    @rule(data=st.data())
    def evict_blocks(self, data: st.DataObject) -> None:
        first = int(self.model.null is not None)
        blocks = data.draw(
            st.lists(st.integers(first, self.manager.num_blocks - 1), max_size=4), "blocks"
        )
        self.refused(
            kv_cache.InvalidArgument,
            lambda: self.manager.evict_blocks([*blocks, self.manager.num_blocks]),
        )
        self.manager.evict_blocks(blocks)
        self.model.follow_events()
        assert not self.model.findable.keys() & set(blocks)

    @precondition(lambda self: len(self.sequences) > 5)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()
        self.model.follow_events()
        assert not self.model.findable
        for sequence in self.sequences.values():
            sequence.known = None

    @precondition(lambda self: len(self.sequences) > 6)
    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.sequences.clear()
        self.model.follow_events()
        assert not self.model.findable
        self.num_copies = self.peak = 0


TestStateMachine = Calls.TestCase
TestStateMachine.settings = settings(
    max_examples=int(os.environ.get("KV_CACHE_EXAMPLES", "60")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
