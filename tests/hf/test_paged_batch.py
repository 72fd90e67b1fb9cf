"""PagedBatch without a model: what it holds after a call that failed is what it held before."""

from __future__ import annotations

import pytest
import torch

from vllm_kernels.hf.paged_batch import PagedBatch
from vllm_kernels.kv_cache import OutOfBlocks
from vllm_kernels.kv_cache.tensors import KVShape


def small_batch(num_blocks: int, layers: int = 1) -> PagedBatch:
    return PagedBatch(KVShape(layers, 1, 32, torch.float32, 8), num_blocks, torch.device("cpu"))


def write(batch: PagedBatch, layer: int, columns: int = 8) -> None:
    key = torch.zeros(2, 1, columns, 32)
    batch.write(layer, key, key)


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
    write(batch, 0)
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


def test_layer_that_attends_twice_is_refused() -> None:
    batch = small_batch(num_blocks=4, layers=2)
    batch.begin(2, 8, None)
    write(batch, 0)
    with pytest.raises(RuntimeError, match="layer 0 attends twice"):
        write(batch, 0)
    with pytest.raises(RuntimeError, match=r"1 of 2 layers .*layer 0 attends twice"):
        batch.begin(2, 8, None)
    assert batch.length == 8  # the pass counts once


def test_pass_that_failed_half_way_is_not_continued() -> None:
    batch = small_batch(num_blocks=4, layers=2)
    for _ in range(2):
        batch.begin(2, 7, None)
        write(batch, 0, 7)
        with pytest.raises(RuntimeError, match=r"1 of 2 layers .*reset\(\) it"):
            batch.begin(2, 1, None)
        batch.reset()
    batch.begin(2, 7, None)
    write(batch, 0, 7)
    write(batch, 1, 7)
    batch.begin(2, 1, None)
    assert batch.length == 8
