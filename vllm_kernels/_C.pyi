"""The compiled module."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_Buffer: TypeAlias = torch.Tensor | npt.NDArray[Any]
_Integers: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]

# --- build information ---

version: str
built_with_torch: str
cuda_build: str
paged_attention_workspace_bytes: int

def cpu_level() -> str: ...

# --- the KV-cache manager; vllm_kernels.kv_cache has the documented wrapper ---

class KVCacheError(RuntimeError): ...
class InvalidArgument(KVCacheError, ValueError): ...
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
        """Blocks of the pool."""
    @property
    def free_blocks(self) -> int:
        """Blocks that nothing holds."""
    @property
    def used_blocks(self) -> int:
        """total_blocks - free_blocks."""
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
    def num_tokens(self) -> int:
        """Tokens of all sequences; a shared one counts once a sequence."""
    @property
    def table_entries(self) -> int:
        """Blocks of all sequences, shared ones once each: what would be used unshared."""
    @property
    def waste_slots(self) -> int:
        """Slots of used blocks that hold no token of any sequence."""
    @property
    def num_copies(self) -> int:
        """Copy-on-write pairs returned since construction or reset()."""

class BatchBuffers:
    def __init__(
        self,
        block_tables: _Buffer,
        seq_lens: _Buffer,
        query_start_loc: _Buffer,
        slot_mapping: _Buffer,
        positions: _Buffer | None = None,
    ) -> None: ...

class KVCacheManager:
    def __init__(
        self, num_blocks: int, block_size: int, max_references: int = 2147483647
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_sequences(self) -> int:
        """Sequences."""
    def __contains__(self, sequence_id: int) -> bool: ...
    def __reduce__(self) -> Any: ...
    def can_allocate(self, num_tokens: int) -> bool: ...
    def allocate(self, sequence_id: int, num_tokens: int) -> None: ...
    def append(self, sequence_id: int, num_tokens: int = 1) -> npt.NDArray[np.int64]: ...
    def fork(self, parent_id: int, child_id: int) -> None: ...
    def free(self, sequence_id: int) -> None: ...
    def truncate(self, sequence_id: int, num_tokens: int) -> None: ...
    def num_tokens(self, sequence_id: int) -> int: ...
    def block_table(self, sequence_id: int) -> npt.NDArray[np.int32]: ...
    def slot_mapping(
        self, sequence_id: int, start: int = 0, num_tokens: int | None = None
    ) -> npt.NDArray[np.int64]: ...
    def sequence_ids(self) -> list[int]: ...
    def allocate_batch(self, sequence_ids: _Integers, num_tokens: _Integers | int) -> None: ...
    def append_batch(
        self, sequence_ids: _Integers, num_tokens: _Integers | int = 1
    ) -> npt.NDArray[np.int64]: ...
    def free_batch(self, sequence_ids: _Integers) -> None: ...
    def truncate_batch(self, sequence_ids: _Integers, num_tokens: _Integers | int) -> None: ...
    def reorder(self, sequence_ids: _Integers, parent_ids: _Integers) -> None: ...
    def build(
        self,
        sequence_ids: _Integers,
        num_query_tokens: _Integers | int,
        buffers: BatchBuffers,
    ) -> None: ...
    def step(
        self, sequence_ids: _Integers, num_tokens: _Integers | int, buffers: BatchBuffers
    ) -> npt.NDArray[np.int64]: ...
    def reset(self) -> None: ...
    def statistics(self) -> Statistics: ...
    def check_integrity(self) -> None: ...
