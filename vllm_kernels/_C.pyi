"""The compiled module."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm_kernels import errors

_Buffer: TypeAlias = torch.Tensor | npt.NDArray[Any]
_Integers: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]

# --- build information ---

version: str
built_with_torch: str
cuda_build: str
paged_attention_workspace_bytes: int

def cpu_level() -> str: ...

# --- the KV-cache manager; vllm_kernels.kv_cache has the documented wrapper ---

class KVCacheError(errors.Error): ...
class InvalidArgument(KVCacheError, errors.InvalidArgument): ...
class UnknownSequence(KVCacheError): ...
class DuplicateSequence(KVCacheError): ...
class ReferenceOverflow(KVCacheError): ...
class IntegrityError(KVCacheError): ...

class OutOfBlocks(KVCacheError):
    needed: int
    free: int

class Statistics:
    @property
    def total_blocks(self) -> int:
        """used_blocks + held_blocks + cached_blocks + free_blocks: those of the pool but for the
        null block."""
    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold."""
    @property
    def held_blocks(self) -> int:
        """Blocks that a Ledger has: lent to other instances, or for sequences that borrow."""
    @property
    def cached_blocks(self) -> int:
        """Blocks that no sequence holds, with tokens that a new one may find."""
    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds, empty."""
    @property
    def shared_blocks(self) -> int:
        """Used blocks that two or more sequences hold."""
    @property
    def peak_used_blocks(self) -> int:
        """The most used at any time."""
    @property
    def num_sequences(self) -> int:
        """Sequences."""
    @property
    def num_swapped_sequences(self) -> int:
        """Of them, those in host blocks."""
    @property
    def total_host_blocks(self) -> int:
        """Host blocks."""
    @property
    def used_host_blocks(self) -> int:
        """Host blocks that sequences hold."""
    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences that are not swapped; a shared one counts once a sequence. With
        shards: of this rank."""
    @property
    def table_entries(self) -> int:
        """Blocks of these sequences, shared ones once each: what would be used unshared."""
    @property
    def waste_slots(self) -> int:
        """Slots of used blocks that hold no token of any sequence."""
    @property
    def num_copies(self) -> int:
        """Copy-on-write pairs returned since construction or reset()."""
    @property
    def num_evictions(self) -> int:
        """Cached blocks given out anew since construction or reset()."""
    @property
    def queried_tokens(self) -> int:
        """Tokens that allocate() looked up since construction or reset()."""
    @property
    def hit_tokens(self) -> int:
        """Of them, those that were cached."""
    @property
    def hit_rate(self) -> float:
        """hit_tokens / queried_tokens, 0 where there were none."""
    def __repr__(self) -> str: ...

class BatchBuffers:
    def __init__(
        self,
        block_tables: _Buffer,
        seq_lens: _Buffer,
        query_start_loc: _Buffer,
        slot_mapping: _Buffer,
        positions: _Buffer | None = None,
    ) -> None: ...
    @property
    def changed_rows(self) -> npt.NDArray[np.int32]: ...
    def invalidate(self) -> None: ...

class KVCacheManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        shards: int = 1,
        shard: int = 0,
        interleave: int = 1,
        num_host_blocks: int = 0,
        watermark_blocks: int = 0,
        windows: Sequence[int] = (0,),
        prefix_caching: bool = True,
        null_block: bool = False,
        events: bool = False,
        max_references: int = 2147483647,
        hash_key: bytes | None = None,
        hash_bits: int = 128,
    ) -> None: ...
    @property
    def has_null_block(self) -> bool: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_free_host_blocks(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    def __contains__(self, sequence_id: int) -> bool: ...
    def __reduce__(self) -> Any: ...
    def match(
        self,
        tokens: _Integers,
        salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
        cache_dtype: bytes | str | None = None,
        multimodal: Sequence[tuple[int, int, bytes | str]] = (),
    ) -> int: ...
    def can_allocate(
        self,
        tokens: int | _Integers,
        salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
        cache_dtype: bytes | str | None = None,
        multimodal: Sequence[tuple[int, int, bytes | str]] = (),
    ) -> bool: ...
    def allocate(
        self,
        sequence_id: int,
        tokens: int | _Integers,
        num_new: int | None = None,
        salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
        cache_dtype: bytes | str | None = None,
        multimodal: Sequence[tuple[int, int, bytes | str]] = (),
    ) -> int: ...
    def append(
        self,
        sequence_id: int,
        num_tokens: int = 1,
        tokens: _Integers | None = None,
        lookahead: int = 0,
    ) -> npt.NDArray[np.int64]: ...
    def fork(self, parent_id: int, child_id: int) -> None: ...
    def free(self, sequence_id: int, num_computed: int | None = None) -> None: ...
    def truncate(
        self, sequence_id: int, num_tokens: int, num_computed: int | None = None
    ) -> None: ...
    def num_tokens(self, sequence_id: int) -> int: ...
    def num_local_tokens(self, sequence_id: int) -> int: ...
    def num_known_tokens(self, sequence_id: int) -> int: ...
    def is_swapped(self, sequence_id: int) -> bool: ...
    def block_table(self, sequence_id: int, group: int = 0) -> npt.NDArray[np.int32]: ...
    def slot_mapping(
        self, sequence_id: int, start: int = 0, num_tokens: int | None = None, group: int = 0
    ) -> npt.NDArray[np.int64]: ...
    def sequence_ids(self) -> list[int]: ...
    def allocate_batch(self, sequence_ids: _Integers, num_tokens: _Integers | int) -> None: ...
    def append_batch(
        self,
        sequence_ids: _Integers,
        num_tokens: _Integers | int = 1,
        tokens: _Integers | None = None,
        lookahead: int = 0,
    ) -> npt.NDArray[np.int64]: ...
    def record_tokens(
        self, sequence_ids: _Integers, num_tokens: _Integers | int, tokens: _Integers
    ) -> None: ...
    def free_batch(
        self, sequence_ids: _Integers, num_computed: _Integers | int | None = None
    ) -> None: ...
    def truncate_batch(
        self,
        sequence_ids: _Integers,
        num_tokens: _Integers | int,
        num_computed: _Integers | int | None = None,
    ) -> None: ...
    def reorder(self, sequence_ids: _Integers, parent_ids: _Integers) -> None: ...
    def build(
        self,
        sequence_ids: _Integers,
        num_query_tokens: _Integers | int,
        buffers: Sequence[BatchBuffers],
    ) -> int: ...
    def step(
        self,
        sequence_ids: _Integers,
        num_tokens: _Integers | int,
        buffers: Sequence[BatchBuffers],
        tokens: _Integers | None = None,
        lookahead: int = 0,
    ) -> npt.NDArray[np.int64]: ...
    def can_swap_out(self, sequence_ids: _Integers) -> bool: ...
    def can_swap_in(self, sequence_ids: _Integers) -> bool: ...
    def swap_out(self, sequence_ids: _Integers) -> npt.NDArray[np.int64]: ...
    def swap_in(self, sequence_ids: _Integers) -> npt.NDArray[np.int64]: ...
    def num_common_prefix_blocks(self, sequence_ids: _Integers, group: int = 0) -> int: ...
    def evict_blocks(self, blocks: _Integers) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def peek_events(self) -> list[tuple[Any, ...]]: ...
    def drop_events(self, count: int) -> None: ...
    def reset(self) -> None: ...
    def statistics(self) -> Statistics: ...
    def check_integrity(self) -> None: ...

# --- loans between instances; vllm_kernels.distributed has the documented wrapper ---

class Ledger:
    def __init__(self, managers: tuple[KVCacheManager, ...]) -> None: ...
    def __reduce__(self) -> Any: ...
    def set_reserve(self, instance: int, num_blocks: int) -> None: ...
    def lend(
        self, lender: int | None, borrower: int, sequence_id: int, num_blocks: int
    ) -> npt.NDArray[np.int32]: ...
    def give_back(self, sequence_id: int, num_blocks: int) -> None: ...
    def free(self, sequence_id: int) -> None: ...
    def recall(self, lender: int, num_blocks: int) -> npt.NDArray[np.int64]: ...
    def instance_lost(self, instance: int) -> list[int]: ...
    def instance_back(self, instance: int) -> None: ...
    def __contains__(self, sequence_id: int) -> bool: ...
    def blocks(self, sequence_id: int) -> npt.NDArray[np.int32]: ...
    def owed(self, borrower: int, lender: int) -> int: ...
    def counts(self, instance: int) -> tuple[int, int, int, int, int, int, bool]: ...
    def check_integrity(self) -> None: ...
