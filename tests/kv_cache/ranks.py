"""All ranks that hold sequences together, behind the interface of one manager.

Each call is made on every rank, and all ranks must answer alike: the same tables, pairs, counts and
errors. What differs is merged: each token has a slot on one rank, which is the slot of a manager
without shards and with blocks of ``shards * block_size`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

SUMS = {"num_tokens", "waste_slots"}
"""Statistics of a rank's own tokens."""


def plain(value: Any) -> Any:
    """A result as it can be compared: hashes have a key of their own on each rank."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(one) for one in value]
    if type(value).__name__ in ("BlockStored", "BlockRemoved"):
        fields = value._asdict().items()
        return {name: field for name, field in fields if "hash" not in name}
    return value


class AllRanks:
    def __init__(
        self, num_blocks: int, block_size: int, *, shards: int, interleave: int, **options: Any
    ) -> None:
        self.ranks = [
            KVCacheManager(
                num_blocks, block_size, shards=shards, shard=rank, interleave=interleave, **options
            )
            for rank in range(shards)
        ]
        self.rank_block_size, self.shards, self.interleave = block_size, shards, interleave
        self.block_size = shards * block_size
        self.rank_buffers: list[list[BatchBuffers]] = []

    def on_all(self, call: Callable[[int, KVCacheManager], Any]) -> Any:
        """What ``call(rank, manager)`` gives or raises, alike on all ranks."""
        outcomes: list[tuple[Exception | None, Any]] = []
        for rank, manager in enumerate(self.ranks):
            try:
                outcomes.append((None, call(rank, manager)))
            except Exception as error:
                outcomes.append((error, None))
        first_error, first = outcomes[0]
        for error, result in outcomes[1:]:
            assert (type(error), str(error)) == (type(first_error), str(first_error))
            assert plain(result) == plain(first)
        if first_error is not None:
            raise first_error
        return first

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(KVCacheManager, name)):
            return self.on_all(lambda _, manager: getattr(manager, name))
        return lambda *arguments, **options: self.on_all(
            lambda _, manager: getattr(manager, name)(*arguments, **options)
        )

    def __contains__(self, sequence_id: int) -> bool:
        return self.on_all(lambda _, manager: sequence_id in manager)

    # --- what differs from rank to rank ---

    def merge_slots(self, slots: list[list[int]]) -> list[int]:
        """One slot a token, from the slots of each rank."""
        merged = []
        for token in zip(*slots, strict=True):
            owners = [rank for rank, slot in enumerate(token) if slot >= 0]
            assert len(owners) <= 1
            if not owners:
                merged.append(-1)
                continue
            (rank,) = owners
            block, local = divmod(token[rank], self.rank_block_size)
            row, offset = divmod(local, self.interleave)
            place = (row * self.shards + rank) * self.interleave + offset
            merged.append(block * self.block_size + place)
        return merged

    def slot_mapping(self, *arguments: Any, **options: Any) -> np.ndarray:
        slots = [rank.slot_mapping(*arguments, **options).tolist() for rank in self.ranks]
        return np.array(self.merge_slots(slots), np.int64)

    def num_tokens(self, sequence_id: int) -> int:
        length = self.on_all(lambda _, manager: manager.num_tokens(sequence_id))
        assert [rank.num_local_tokens(sequence_id) for rank in self.ranks] == self.lengths(length)
        return length

    def lengths(self, length: int) -> list[int]:
        """Of each rank, token by token."""
        owners = [token // self.interleave % self.shards for token in range(length)]
        return [owners.count(rank) for rank in range(self.shards)]

    def statistics(self) -> SimpleNamespace:
        of_ranks = [rank.statistics() for rank in self.ranks]
        merged = SimpleNamespace()
        for name in (name for name in dir(of_ranks[0]) if not name.startswith("_")):
            values = [getattr(one, name) for one in of_ranks]
            assert name in SUMS or len(set(values)) == 1, name
            setattr(merged, name, sum(values) if name in SUMS else values[0])
        return merged

    def step(
        self, ids: Any, counts: Any, buffers: list[BatchBuffers], **options: Any
    ) -> np.ndarray:
        return self.fill("step", ids, counts, buffers, **options)

    def build(self, ids: Any, counts: Any, buffers: list[BatchBuffers]) -> int:
        return self.fill("build", ids, counts, buffers)

    def fill(
        self, name: str, ids: Any, counts: Any, buffers: list[BatchBuffers], **options: Any
    ) -> Any:
        """The first rank fills ``buffers``; then the merged slots and lengths take the place of its
        own. The next call writes them again, so that padding stays right."""
        if not self.rank_buffers:
            self.rank_buffers = [buffers] + [
                [
                    BatchBuffers.zeros(*one.block_tables.shape, len(one.slot_mapping))
                    for one in buffers
                ]
                for _ in self.ranks[1:]
            ]
        result = self.on_all(
            lambda rank, manager: getattr(manager, name)(
                ids, counts, self.rank_buffers[rank], **options
            )
        )
        total = sum(np.asarray(counts).tolist())
        for group, merged in enumerate(buffers):
            of_ranks = [of_rank[group] for of_rank in self.rank_buffers]
            for other in of_ranks[1:]:
                assert torch.equal(other.query_start_loc, merged.query_start_loc)
                assert torch.equal(other.positions, merged.positions)
            slots = [one.slot_mapping[:total].tolist() for one in of_ranks]
            lengths = torch.stack([one.seq_lens for one in of_ranks])
            for i, sequence in enumerate(np.asarray(ids).tolist()):
                assert lengths[:, i].tolist() == self.lengths(self.num_tokens(sequence))
                blocks = len(self.ranks[0].block_table(sequence, group=group))
                for other in of_ranks[1:]:
                    assert torch.equal(
                        other.block_tables[i, :blocks], merged.block_tables[i, :blocks]
                    )
            assert all((one.slot_mapping[total:] == -1).all() for one in of_ranks)
            merged.slot_mapping[:total] = torch.tensor(self.merge_slots(slots))
            merged.seq_lens.copy_(lengths.sum(0))
        return result
