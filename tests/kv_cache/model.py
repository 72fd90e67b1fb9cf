"""A plain model of KVCacheManager: what every sequence holds, and what a reader of the cache sees.

The keys and values of a token depend on all tokens before it and on the prefix keys, so the model
numbers every such history, and the shadow cache has the number of a history in every slot. A reader
that goes through a block table must find the numbers of its sequence's own tokens: a wrong prefix
hit, a missed copy or a write into a shared block shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_kernels.kv_cache import BlockRemoved, BlockStored, KVCacheManager, MultimodalItem

NOTHING = -1


class Histories:
    """Numbers for (number of what came before, token); equal numbers mean equal histories."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self.before: list[object] = []
        """Of each number, what came before its last token."""

    def extend(
        self,
        before: object,
        tokens: list[int],
        start: int,
        block_size: int,
        items: dict[int, MultimodalItem],
    ) -> list[int]:
        """Of ``tokens`` from position ``start`` on. ``items`` of blocks: what else, beside the
        tokens, a whole block's keys and values depend on."""
        numbers = []
        for position, token in enumerate(tokens, start):
            step = (before, token, items.get(position // block_size))
            if step not in self._numbers:
                self._numbers[step] = len(self._numbers)
                self.before.append(before)
            before = self._numbers[step]
            numbers.append(before)
        return numbers


@dataclass
class Sequence:
    """What the model knows of one sequence."""

    tokens: list[int]
    numbers: list[int]
    """Of the history at each token."""
    keys: tuple[object, ...]
    known: int | None
    """Leading tokens whose ids the manager was told, None: it does not follow them any more."""
    swapped: bool = False
    items: dict[int, MultimodalItem] = field(default_factory=dict)
    """block -> the item that reaches into it."""

    def copy(self) -> Sequence:
        return replace(self, tokens=list(self.tokens), numbers=list(self.numbers))

    def before(self, position: int) -> object:
        return self.numbers[position - 1] if position else self.keys


@dataclass
class Model:
    """Sequences, a shadow of every slot on the device and the host, and the findable blocks."""

    manager: KVCacheManager
    caching: bool
    watermark: int
    max_references: int
    histories: Histories = field(default_factory=Histories)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    findable: dict[int, tuple[int, int]] = field(default_factory=dict)
    """block -> (group, number of the history at its end)."""

    def __post_init__(self) -> None:
        self.block_size = self.manager.block_size
        self.windows = self.manager.windows
        self.null = self.manager.null_block
        shape = (self.manager.num_blocks, self.block_size)
        self.shadow = np.full(shape, NOTHING)
        self.host = np.full((self.manager.num_host_blocks, self.block_size), NOTHING)

    # --- what the manager says ---

    def table(self, i: int, group: int = 0) -> list[int]:
        return self.manager.block_table(i, group=group).tolist()

    def references(self) -> Counter[int]:
        """How many tables hold each block."""
        return Counter(
            block
            for i, sequence in self.sequences.items()
            if not sequence.swapped
            for group in range(len(self.windows))
            for block in self.table(i, group)
            if block != self.null
        )

    def follow_events(self) -> None:
        """Applies what became findable or no longer is."""
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                assert event.block not in self.findable and len(event.tokens) == self.block_size
                number = self.shadow[event.block][-1] if event.block != self.null else NOTHING
                self.findable[event.block] = (event.group, int(number))
            elif isinstance(event, BlockRemoved):
                assert self.findable.pop(event.block)[0] == event.group
            else:
                self.findable.clear()

    # --- what it ought to do ---

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def first_visible(self, position: int, window: int) -> int:
        """First block that a token at ``position`` sees."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def hits(self, numbers: list[int]) -> tuple[int, int]:
        """(blocks of the longest prefix that every group has, of them those without references)."""
        if not self.caching:
            return 0, 0
        references = self.references()
        blocks: dict[tuple[int, int], int] = {}
        for block, content in self.findable.items():
            if references[block] < self.max_references:
                blocks[content] = block
        for count in range(max(0, (len(numbers) - 1) // self.block_size), -1, -1):
            seen = []
            for group, window in enumerate(self.windows):
                for i in range(self.first_visible(count * self.block_size, window), count):
                    seen.append(blocks.get((group, numbers[(i + 1) * self.block_size - 1])))
            followed = seen or not count or numbers[count * self.block_size - 1] in self.followed()
            if None not in seen and followed:
                return count, sum(references[block] == 0 for block in seen)
        raise AssertionError("no prefix is always there")

    def followed(self) -> set[object]:
        """Histories at the ends of blocks that the manager still knows: of a block that is findable
        or of a sequence, and those before. A window of one token makes them hits without a block.
        """
        ends: list[object] = [number for _, number in self.findable.values()]
        for sequence in self.sequences.values():
            if full := (sequence.known or 0) // self.block_size:
                ends.append(sequence.numbers[full * self.block_size - 1])
        known: set[object] = set()
        for end in ends:
            while isinstance(end, int) and end not in known:
                known.add(end)
                for _ in range(self.block_size):
                    end = self.histories.before[end]
        return known

    def number_prompt(
        self, sequence: Sequence, prompt: list[int], items: tuple[MultimodalItem, ...]
    ) -> list[int]:
        """Histories of a prompt whose placeholder tokens stand for ``items``; these belong to the
        sequence's own history from the first block on that one of them reaches into."""
        sequence.items = {
            token // self.block_size: item
            for item in items
            for token in range(item.start, item.start + item.num_tokens)
        }
        return self.histories.extend(sequence.keys, prompt, 0, self.block_size, sequence.items)

    def needed_to_allocate(self, numbers: list[int], num_new: int) -> tuple[int, int]:
        """(cached tokens, blocks that leave the free lists, the watermark included)."""
        hits, revived = self.hits(numbers)
        total = min(len(numbers), hits * self.block_size + num_new)
        needed = (self.blocks_for(total) - hits) * len(self.windows) + revived
        return hits * self.block_size, needed + (self.watermark if needed else 0)

    def needed_to_append(
        self, ids: list[int], counts: list[int], lookahead: int
    ) -> tuple[int, int, int]:
        """(blocks to take, of them for copies, blocks that windows give back)."""
        references = self.references()
        sharers = Counter(references)
        gone: Counter[int] = Counter()
        blocks = copies = 0
        for i, count in zip(ids, counts, strict=True):
            if count + lookahead == 0:
                continue
            have = len(self.sequences[i].tokens)
            entries = len(self.table(i))
            after = self.blocks_for(have + count + lookahead)
            blocks += max(0, after - entries) * len(self.windows)
            for group, window in enumerate(self.windows):
                table = self.table(i, group)
                gone.update(b for b in table[: self.first_visible(have, window)] if b != self.null)
                if have % self.block_size and sharers[table[have // self.block_size]] > 1:
                    sharers[table[have // self.block_size]] -= 1
                    copies += 1
        freed = sum(references[block] == count for block, count in gone.items())
        return blocks + copies, copies, freed

    def needed_to_swap_in(self, ids: list[int]) -> int:
        """Blocks that leave the free lists, the watermark included where some sequence runs."""
        references = self.references()
        cached = {content: block for block, content in self.findable.items()}
        held: dict[int, int | None] = {}  # host block -> the block that holds the same, if any
        for i in ids:
            sequence = self.sequences[i]
            for group in range(len(self.windows)):
                for index, host_block in enumerate(self.table(i, group)):
                    end = (index + 1) * self.block_size
                    if host_block == NOTHING:
                        continue
                    found = None
                    if end <= (sequence.known or 0):
                        found = cached.get((group, sequence.numbers[end - 1]))
                    if found is not None and references[found] > self.max_references - len(ids):
                        found = None
                    held[host_block] = held.get(host_block) if found is None else found
        needed = sum(block is None for block in held.values())
        needed += sum(block is not None and not references[block] for block in set(held.values()))
        runs = any(not sequence.swapped for sequence in self.sequences.values())
        return needed + (self.watermark if needed and runs else 0)

    # --- what happens in the cache ---

    def new_tokens(self, i: int, tokens: list[int]) -> None:
        """Tokens at the end of sequence ``i``, which has slots for them already."""
        sequence = self.sequences[i]
        start = len(sequence.tokens)
        sequence.numbers += self.histories.extend(
            sequence.before(start), tokens, start, self.block_size, sequence.items
        )
        sequence.tokens += tokens

    def write(self, i: int, start: int) -> None:
        """The forward pass over the tokens from ``start`` on: only into blocks of one owner."""
        sequence, references = self.sequences[i], self.references()
        for group in range(len(self.windows)):
            slots = self.manager.slot_mapping(i, start, group=group).tolist()
            for slot, number in zip(slots, sequence.numbers[start:], strict=True):
                if slot < 0:
                    assert self.null is not None
                    continue
                block, offset = divmod(slot, self.block_size)
                assert references[block] == 1 and block != self.null
                self.shadow[block, offset] = number

    def copy_blocks(self, pairs: np.ndarray, source: np.ndarray, destination: np.ndarray) -> None:
        assert pairs.dtype == np.int64 and pairs.ndim == 2 and pairs.shape[1] == 2
        assert len(set(pairs[:, 1].tolist())) == len(pairs)
        destination[pairs[:, 1]] = source[pairs[:, 0]]

    def check_readers(self) -> None:
        """Every token that the next one sees is where its block table says."""
        for i, sequence in self.sequences.items():
            length = len(sequence.tokens)
            cache = self.host if sequence.swapped else self.shadow
            for group, window in enumerate(self.windows):
                table = self.table(i, group)
                first = self.first_visible(length, window)
                for index in range(self.blocks_for(length)):
                    numbers = sequence.numbers[
                        index * self.block_size : (index + 1) * self.block_size
                    ]
                    if table[index] == (NOTHING if sequence.swapped else self.null):
                        assert index < first
                    else:
                        assert cache[table[index], : len(numbers)].tolist() == numbers
