"""What KVCacheManager and BatchBuffers refuse, and how they say it."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from kv_cache_manager_cases import make_buffers

from vllm_kernels import kv_cache
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


SLOTS = torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_tables": torch.zeros(4, 3, dtype=torch.int64)},
            r"buffers: block_tables: expected int32 of 2 dimensions, got int64 of shape \[4, 3\]",
        ),
        (
            {"block_tables": torch.zeros(12, dtype=torch.int32)},
            r"block_tables: expected int32 of 2 dimensions, got int32 of shape \[12\]",
        ),
        (
            {"block_tables": torch.zeros(3, 4, dtype=torch.int32).T},
            "block_tables: expected a contiguous last dimension, got strides of 16 bytes",
        ),
        (
            {"block_tables": torch.zeros(1, 3, dtype=torch.int32).expand(4, 3)},
            r"block_tables: expected rows .* do not overlap, got shape \[4, 3\] with row stride 0",
        ),
        (
            {"seq_lens": torch.zeros(3, dtype=torch.int32)},
            r"seq_lens: expected 4 elements \(rows of block_tables\), got 3",
        ),
        (
            {"seq_lens": torch.zeros(8, dtype=torch.int32)[::2]},
            "seq_lens: expected a contiguous last dimension",
        ),
        ({"seq_lens": [0, 0, 0, 0]}, "seq_lens: expected a numpy array or a CPU tensor, got list"),
        (
            {"seq_lens": torch.zeros(4, dtype=torch.int32, device="meta")},
            "seq_lens: expected a numpy array or a CPU tensor, got Tensor: can't convert meta",
        ),
        (
            {"query_start_loc": torch.zeros(4, dtype=torch.int32)},
            r"query_start_loc: expected 5 elements \(rows of block_tables \+ 1\), got 4",
        ),
        ({"slot_mapping": None}, "slot_mapping: expected a numpy array .*, got NoneType"),
        ({"slot_mapping": np.zeros(8, np.int32)}, "slot_mapping: expected int64"),
        (
            {"slot_mapping": read_only(np.zeros(8, np.int64))},
            "slot_mapping: expected writable memory, got read-only",
        ),
        (
            {"positions": torch.zeros(7, dtype=torch.int64)},
            r"positions: expected 8 elements \(as slot_mapping\), got 7",
        ),
        (
            {"slot_mapping": SLOTS, "positions": SLOTS},
            "positions: expected memory of its own, got memory that overlaps slot_mapping",
        ),
    ],
)
def test_buffers_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(kv_cache.InvalidArgument, match=message):
        BatchBuffers(**make_buffers(**changes))


def test_what_are_no_buffers_is_refused() -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(1, 3)
    message = "buffers: expected BatchBuffers, or a list of them, one a group of layers, got"
    for buffers, got in (
        (torch.zeros(3, 2), "Tensor"), (None, "NoneType"), ([None], "list of NoneType")
    ):  # fmt: skip
        for call in (manager.step, manager.build):
            text = f"^{call.__name__}: {message} {got}$"
            with pytest.raises(kv_cache.InvalidArgument, match=text):
                call([1], 1, buffers)
    assert manager.num_tokens(1) == 3
    for name, size in (("max_sequences", 0), ("max_blocks", -1), ("max_tokens", 1.5)):
        sizes = {"max_sequences": 1, "max_blocks": 1, "max_tokens": 1, name: size}
        with pytest.raises(kv_cache.InvalidArgument, match=f"{name}: .* at least 1, got {size}"):
            BatchBuffers.zeros(**sizes)


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        (np.array([1.0]), 1, r"append: sequence_ids: expected int64 or int32 .* float64"),
        (np.array([True]), 1, r"append: sequence_ids: expected int64 or int32 .* bool"),
        (np.array([1], np.uint64), 1, r"append: sequence_ids: expected int64 or int32 .* uint64"),
        (torch.ones(1, 1, dtype=torch.int64), 1, r"got int64 of shape \[1, 1\]"),
        (torch.ones(1, dtype=torch.int64, device="meta"), 1, "sequence_ids: .* got Tensor: can't"),
        ([[1], [1, 2]], 1, "append: sequence_ids: expected"),
        (None, 1, "append: sequence_ids: expected"),
        ("1", 1, "append: sequence_ids: expected"),
        ([2**70], 1, "append: sequence_ids: expected"),
        ([1], 2**70, "append: num_tokens: expected an int64"),
        ([1], True, "append: num_tokens: expected int64 or int32 .* bool"),
        ([1], 1.5, "append: num_tokens: expected"),
        ([1], [1, 1], r"append: num_tokens: expected 1 elements \(as sequence_ids\), got 2"),
        ([1], -1, "append: num_tokens: expected >= 0, got -1 at index 0"),
    ],
)
def test_integers_that_are_none_are_refused(ids: Any, counts: Any, message: str) -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(1, 3)
    with pytest.raises(kv_cache.InvalidArgument, match=message):
        manager.append_batch(ids, counts)
    assert manager.num_tokens(1) == 3


@pytest.mark.parametrize(
    ("num_blocks", "block_size"),
    [(0, 16), (-1, 16), (16, 0), (16, -1), (2**31 - 1, 16), (16, 2**60), (2**63 - 1, 2**63 - 1)],
)
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(kv_cache.InvalidArgument, match=r"^KVCacheManager: .*expected .* got"):
        KVCacheManager(num_blocks, block_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": "a"}, "num_blocks: expected an integer of 64 bits, got 'a'"),
        ({"num_blocks": 2**63}, f"num_blocks: expected an integer of 64 bits, got {2**63}"),
        ({"block_size": 4.0}, r"block_size: expected an integer of 64 bits, got 4\.0"),
        ({"watermark_blocks": None}, "watermark_blocks: expected an integer of 64 bits, got None"),
        ({"shards": 1.5}, r"shards: expected an integer of 64 bits, got 1\.5"),
        ({"shard": "0"}, "shard: expected an integer of 64 bits, got '0'"),
        ({"shards": 2, "shard": 2}, "shard: expected 0 to 1, got 2"),
        ({"shards": 2}, "shard: expected 0 to 1 with shards=2, got None"),
        ({"interleave": 3}, "interleave: expected a divisor of block_size = 4, got 3"),
        ({"windows": 5}, "windows: expected a list of integers of 64 bits or None, .* got 5"),
        ({"windows": [2**63]}, r"windows: expected a list of integers of 64 bits .* got \[9223.*"),
        ({"windows": ("a", None)}, r"windows: expected a list .* got \('a', None\)"),
    ],
)
def test_sizes_that_are_no_integers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(kv_cache.InvalidArgument, match=f"^KVCacheManager: {message}$"):
        KVCacheManager(**{"num_blocks": 8, "block_size": 4, **arguments})


def test_a_watermark_of_the_whole_pool_is_refused() -> None:
    for options, pool in (({}, 8), ({"null_block": True}, 7)):
        KVCacheManager(8, 4, watermark_blocks=pool - 1, **options)
        message = f"watermark_blocks: expected fewer than the {pool} blocks of the pool, got {pool}"
        with pytest.raises(kv_cache.InvalidArgument, match=message):
            KVCacheManager(8, 4, watermark_blocks=pool, **options)


def test_errors_have_the_documented_bases() -> None:
    for name in (
        "InvalidArgument",
        "UnknownSequence",
        "DuplicateSequence",
        "OutOfBlocks",
        "ReferenceOverflow",
        "IntegrityError",
    ):
        assert issubclass(getattr(kv_cache, name), kv_cache.KVCacheError)
    assert issubclass(kv_cache.KVCacheError, RuntimeError)
    assert issubclass(kv_cache.InvalidArgument, ValueError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2**31]}, "allocate: tokens: expected values of int32, got 2147483648"),
        ({"tokens": np.array([1.0])}, "allocate: tokens: expected int64 or int32 .* float64"),
        ({"tokens": "1"}, "allocate: tokens: expected"),
        ({"tokens": None}, "allocate: tokens: expected"),
        ({"tokens": [[1]]}, r"allocate: tokens: expected .* of shape \[1, 1\]"),
        ({"tokens": 4, "num_new": 2}, "num_new: expected None with a number of tokens"),
        ({"tokens": -4}, "num_tokens: expected 0 to"),
        ({"tokens": 2**70}, "allocate: tokens: expected an int64"),
        ({"tokens": True}, "allocate: tokens: expected int64 or int32 .* bool"),
        ({"tokens": [1], "salt": "\ud800"}, "salt: expected text that UTF-8 has"),
        ({"tokens": [1], "multimodal": [(0, 2, "x")]}, "multimodal: expected items .* 1 tokens"),
        ({"tokens": [1], "num_new": -1}, "num_new: expected >= 0, got -1"),
        ({"tokens": [1], "salt": 5}, "salt: expected bytes, str or None, got int"),
        ({"tokens": [1], "multimodal": [(0, 0, "x")]}, "multimodal: expected items of at least"),
        ({"tokens": [1], "multimodal": [(0, 1)]}, "multimodal: expected items of .start"),
    ],
)
def test_bad_prompts_are_refused(arguments: dict[str, Any], message: str) -> None:
    manager = KVCacheManager(8, 4)
    with pytest.raises(kv_cache.InvalidArgument, match=message):
        manager.allocate(1, **arguments)
    assert 1 not in manager and manager.num_free_blocks == 8


@pytest.mark.parametrize("wrong", ["req-1", None, [1], 1.0, True])
def test_ids_that_are_no_integers_are_refused(wrong: Any) -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(np.int64(1), 3)
    for call, name in (
        (lambda: manager.allocate(wrong, 3), "allocate: sequence_id"),
        (lambda: manager.fork(wrong, 2), "fork: parent_id"),
        (lambda: manager.fork(1, wrong), "fork: child_id"),
    ):
        with pytest.raises(kv_cache.InvalidArgument, match=f"^{name}: expected an integer of yo"):
            call()
    assert manager.sequence_ids() == [1]


def test_an_item_without_a_digest_is_refused() -> None:
    manager = KVCacheManager(16, 4)
    with pytest.raises(kv_cache.InvalidArgument, match="multimodal: digest: expected bytes or str"):
        manager.allocate(1, list(range(9)), multimodal=[(0, 4, None)])
    assert 1 not in manager


def test_a_range_far_outside_a_sequence_is_refused() -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(1, 3)
    for start in (-(2**63), 2**63 - 1):
        with pytest.raises(kv_cache.InvalidArgument, match="expected a range within 3 tokens"):
            manager.slot_mapping(1, start)
    with pytest.raises(kv_cache.InvalidArgument, match="num_tokens: expected at most"):
        manager.append(1, 2**63 - 1, lookahead=9)


def test_pickle_and_copy_are_refused() -> None:
    manager = KVCacheManager(8, 4)
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            call(manager)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork() beside torch's threads
def test_a_fork_of_the_process_is_refused() -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(1, 3)
    child = os.fork()
    if child == 0:
        try:
            manager.append(1)
        except kv_cache.KVCacheError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    manager.append(1)
