"""PagedBatch without a model: what it holds after a call that failed is what it held before."""

from __future__ import annotations

import pytest
import torch

from vllm_kernels.integrations.paged_batch import PagedBatch
from vllm_kernels.kv_cache import OutOfBlocks
from vllm_kernels.kv_tensors import KVShape


def small_batch(num_blocks: int) -> PagedBatch:
    return PagedBatch(KVShape(1, 1, 32, torch.float32, 8), num_blocks, torch.device("cpu"))


def test_first_pass_that_does_not_fit_changes_nothing() -> None:
    batch = small_batch(num_blocks=3)
    with pytest.raises(OutOfBlocks):
        batch.begin(2, 16, None)
    assert len(batch) == 0 and batch.length == 0
    assert batch.manager.num_sequences == 0 and batch.manager.num_free_blocks == 3
    batch.begin(3, 8, None)  # of another size: nothing holds it back
    assert len(batch) == 3 and batch.length == 8


def test_later_pass_that_does_not_fit_changes_nothing() -> None:
    batch = small_batch(num_blocks=3)
    batch.begin(2, 8, None)
    with pytest.raises(OutOfBlocks):
        batch.begin(2, 1, None)
    assert len(batch) == 2 and batch.length == 8 and batch.manager.num_free_blocks == 1


@pytest.mark.parametrize("name", ["select", "reorder"])
def test_row_that_is_not_there_changes_nothing(name: str) -> None:
    batch = small_batch(num_blocks=4)
    batch.begin(2, 8, None)
    before = batch.manager.sequence_ids()
    with pytest.raises(IndexError):
        getattr(batch, name)(torch.tensor([0, 7]))
    assert batch.manager.sequence_ids() == before and len(batch) == 2
    batch.manager.check_integrity()
    batch.reset()
    assert batch.manager.num_sequences == 0 and batch.manager.num_free_blocks == 4
