"""KVCacheManager in the shape that shared/peers/cpu/kv_trace.py drives (and vLLM's, beside it):
``PYTHONPATH=benchmarks python kv_trace.py kv_trace_adapter:Manager``."""

from __future__ import annotations

import numpy as np

from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

BLOCK_SIZE = 16
MAX_TOKENS = 1024 + 512  # of a sequence in the trace


class Manager:
    """Rows of the trace are both the sequence ids and the rows of the block tables."""

    def __init__(self, num_blocks: int, max_rows: int) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE)
        self.buffers = BatchBuffers.zeros(
            max_rows, MAX_TOKENS // BLOCK_SIZE + 1, max_rows * MAX_TOKENS
        )
        self.block_tables: np.ndarray = self.buffers.block_tables.numpy()
        self.slot_mapping: np.ndarray = self.buffers.slot_mapping.numpy()
        self.sub: dict[str, float] = {}  # kv_trace.py's extra timers

    def allocate(self, row: int, sequence_id: int, tokens: list[int]) -> int:
        return self.manager.allocate(row, tokens)

    def append(self, rows: list[int], tokens: list[int]) -> None:
        self.manager.append_batch(rows, 1, tokens=tokens)

    def free(self, row: int) -> None:
        self.manager.free(row)

    def build(
        self, rows: np.ndarray, start: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        num_tokens = self.manager.build(rows, count, self.buffers)
        return self.block_tables, self.slot_mapping[:num_tokens]
