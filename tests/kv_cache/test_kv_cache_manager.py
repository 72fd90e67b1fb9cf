"""KVCacheManager from Python: what it takes, and who owns what."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from kv_cache_manager_cases import make_buffers

from vllm_kernels import kv_cache
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager


@pytest.mark.parametrize("kind", ["torch", "numpy", "strided rows", "no positions"])
def test_step_writes_into_the_callers_memory(kind: str) -> None:
    arguments = make_buffers()
    if kind == "numpy":
        arguments = {name: tensor.numpy() for name, tensor in arguments.items()}
    elif kind == "strided rows":
        arguments["block_tables"] = torch.zeros(4, 9, dtype=torch.int32)[:, 2:5]
    elif kind == "no positions":
        arguments["positions"] = None
    buffers = BatchBuffers(**arguments)
    manager = KVCacheManager(8, 4)
    manager.allocate_batch([5, 6], [6, 4])
    pairs = manager.step([6, 5], [1, 2], buffers)
    assert pairs.shape == (0, 2) and pairs.dtype == np.int64
    assert buffers.block_tables is arguments["block_tables"]
    assert buffers.block_tables.tolist() == [[2, 3, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert buffers.seq_lens.tolist() == [5, 8, 0, 0]
    assert buffers.query_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert buffers.slot_mapping.tolist() == [12, 6, 7, -1, -1, -1, -1, -1]
    if kind != "no positions":
        assert buffers.positions.tolist() == [4, 6, 7, 0, 0, 0, 0, 0]


def test_buffers_keep_their_memory_alive() -> None:
    arrays = {name: tensor.numpy().copy() for name, tensor in make_buffers().items()}
    alive = [weakref.ref(array) for array in arrays.values()]
    native = BatchBuffers(**arrays)._native
    arrays.clear()
    assert all(array() is not None for array in alive)
    manager = KVCacheManager(64, 4)
    manager.allocate(1, 5)
    manager._native.build([1], [5], [native])
    del native
    assert all(array() is None for array in alive)


@pytest.mark.parametrize(
    "ids",
    [
        [3, -9],
        (3, -9),
        np.array([3, -9]),
        np.array([3, -9], dtype=np.int32),
        np.array([3, -9], dtype=">i8"),
        np.array([3, 0, -9, 0])[::2],
        torch.tensor([3, -9]),
        torch.tensor([3, -9], dtype=torch.int32),
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
)
@pytest.mark.parametrize("count", [2, np.int64(2), [2, 2], np.array([2, 2], dtype=np.int32)])
def test_integers_come_as_lists_arrays_or_tensors(ids: Any, count: Any) -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate_batch(ids, count)
    manager.append_batch(ids, count)
    assert manager.num_tokens(3) == manager.num_tokens(-9) == 4
    manager.truncate_batch(ids, count)
    manager.reorder(ids, ids)
    manager.free_batch(ids)
    assert manager.num_sequences == 0


def test_empty_batches_do_nothing() -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate_batch([], [])
    assert manager.append_batch([], []).shape == (0, 2)
    manager.free_batch(np.array([], dtype=np.int64))
    manager.free_batch(())
    manager.allocate_batch(range(0), 0)
    assert manager.append_batch((), range(0)).shape == (0, 2)
    for untyped in (np.array([]), torch.empty(0)):
        with pytest.raises(ValueError, match=r"int64 or int32 values of shape .* got float"):
            manager.free_batch(untyped)
    manager.reorder([], [])
    buffers = BatchBuffers(**make_buffers())
    assert manager.step([], 1, buffers).shape == (0, 2)
    assert buffers.slot_mapping.tolist() == [-1] * 8


def test_pairs_are_copy_blocks_block_mapping() -> None:
    manager = KVCacheManager(16, 4)
    manager.allocate(0, 6)
    for child in (1, 2, 3):
        manager.fork(0, child)
    pairs = manager.append_batch([0, 1, 2, 3])
    assert pairs.tolist() == [[1, 2], [1, 3], [1, 4]]
    mapping = torch.from_numpy(pairs)
    assert mapping.dtype == torch.int64 and mapping.is_contiguous()
    assert pairs.flags.owndata and pairs.nbytes == 48


def test_statistics_show_their_values() -> None:
    manager = KVCacheManager(8, 4)
    manager.allocate(1, range(9))
    manager.allocate(2, range(9))
    statistics = manager.statistics()
    shown = repr(statistics)
    fields = dict(re.findall(r"(\w+)=([^,)]+)", shown))
    assert shown.startswith("Statistics(total_blocks=8, used_blocks=4, ")
    assert fields == {name: f"{getattr(statistics, name):g}" for name in fields}
    assert fields.keys() == {name for name in dir(statistics) if not name.startswith("_")}


def test_interpreter_shutdown_is_quiet() -> None:
    program = """if True:
        import threading, time
        from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager
        manager = KVCacheManager(4096, 4, events=True)
        buffers = BatchBuffers.zeros(8, 64, 64)
        manager.allocate(1, list(range(100)))

        def work():
            while True:
                manager.step([1], 1, buffers)
                manager.truncate(1, 100)

        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.05)
    """
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_tokens_come_as_lists_arrays_or_tensors() -> None:
    manager = KVCacheManager(64, 4, hash_key=bytes(16))
    prompt = list(range(1, 11))
    arrays = [
        np.array(prompt, np.int32),
        np.array(prompt, np.int64),
        np.array(prompt, ">i4"),
        np.array([prompt, prompt]).T[:, 0],
        np.frombuffer(b"x" + np.array(prompt, np.int32).tobytes(), np.int32, offset=1, count=10),
        torch.tensor(prompt),
        torch.tensor(prompt, dtype=torch.int32),
        tuple(prompt),
        range(1, 11),
    ]
    assert manager.allocate(0, prompt) == 0
    for i, tokens in enumerate(arrays, 1):
        assert manager.match(tokens) == 8
        assert manager.allocate(i, tokens) == 8
    assert manager.allocate(50, np.int64(3)) == 0 and manager.num_tokens(50) == 3
    assert manager.allocate(51, []) == 0 and manager.num_tokens(51) == 0


def test_the_null_block_and_the_groups_are_told() -> None:
    assert KVCacheManager(8, 4).null_block is None
    assert KVCacheManager(8, 4, null_block=True).null_block == 0
    manager = KVCacheManager(8, 4, windows=[None, 16])
    assert (manager.null_block, manager.num_groups, manager.windows) == (0, 2, (0, 16))
    assert manager.num_free_blocks == 7
    with pytest.raises(kv_cache.InvalidArgument, match="null_block: expected None or True"):
        KVCacheManager(8, 4, windows=[16], null_block=False)
    with pytest.raises(kv_cache.InvalidArgument, match="hash_key: expected 16 bytes, got 3"):
        KVCacheManager(8, 4, hash_key=b"abc")
    manager.allocate(1, 5)
    buffers = BatchBuffers.zeros(4, 4, 8)
    with pytest.raises(kv_cache.InvalidArgument, match=r"buffers: expected 2 \(one a group"):
        manager.build([1], 1, buffers)
    with pytest.raises(kv_cache.InvalidArgument, match="group: expected 0 to 1, got 2"):
        manager.block_table(1, group=2)


def test_events_are_named() -> None:
    manager = KVCacheManager(2, 2, events=True)
    manager.allocate(1, [5, 6, 7])
    (stored,) = manager.take_events()
    assert isinstance(stored, kv_cache.BlockStored)
    assert (stored.block, stored.group, stored.tokens) == (0, 0, [5, 6])
    assert len(stored.block_hash) == len(stored.parent_hash) == 16
    manager.free(1)
    manager.allocate(2, 4)
    assert manager.take_events() == [kv_cache.BlockRemoved(0, 0, stored.block_hash)]
    manager.reset_prefix_cache()
    assert manager.take_events() == [kv_cache.AllBlocksCleared()]


def test_threads_share_one_manager() -> None:
    manager = KVCacheManager(4096, 4)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            ids = np.arange(first, first + 50)
            buffers = BatchBuffers.zeros(50, 16, 200)
            for _ in range(40):
                manager.allocate_batch(ids, 3)
                for _ in range(4):
                    manager.step(ids, 2, buffers)
                assert (buffers.seq_lens == 11).all()
                manager.free_batch(ids)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    manager.check_integrity()
    assert manager.num_free_blocks == 4096


# --- keys, items and groups ---


def test_a_number_of_tokens_keeps_its_keys() -> None:
    manager = KVCacheManager(64, 4)
    keys: dict[str, Any] = {
        "salt": "tenant",
        "adapter": "lora",
        "cache_dtype": "fp8",
        "multimodal": [(1, 3, "cat")],
    }
    manager.allocate(1, 9, **keys)
    manager.record_tokens([1], [9], list(range(9)))
    assert manager.match(list(range(9))) == 0
    assert manager.match(list(range(9)), **keys) == 8
    for name, other in {**dict.fromkeys(keys, "x"), "multimodal": [(1, 3, "dog")]}.items():
        assert manager.match(list(range(9)), **{**keys, name: other}) == 0
    with pytest.raises(kv_cache.InvalidArgument, match="salt: expected bytes, str or None"):
        manager.can_allocate(4, salt=5)
    manager.check_integrity()


@pytest.mark.parametrize("windows", [(1,), (1, 1)])
def test_a_hit_that_needs_no_block_outlives_its_blocks(windows: tuple[int, ...]) -> None:
    manager = KVCacheManager(1 + 3 * len(windows), 2, windows=windows)
    manager.allocate(1, [0] * 6)
    manager.free(1)
    assert manager.allocate(2, [0] * 6 + [1] * 5) == 6
    manager.check_integrity()


def test_multimodal_items_may_be_made_on_the_way() -> None:
    class Items:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> tuple[int, int, bytes]:
            if i >= 3:
                raise IndexError(i)
            return (2 * i, 1, b"digest %d" % i * 10)

    manager = KVCacheManager(16, 4)
    tokens = list(range(9))
    manager.allocate(1, tokens, multimodal=Items())
    assert manager.match(tokens, multimodal=list(Items())) == 8
    assert manager.match(tokens) == 0


def test_groups_do_not_write_over_each_other() -> None:
    manager = KVCacheManager(64, 4, windows=(None, 8))
    manager.allocate(1, 5)
    first, second = make_buffers(), make_buffers()
    shared = {name: first[name] for name in ("seq_lens", "query_start_loc", "positions")}
    groups = [BatchBuffers(**first), BatchBuffers(**{**second, **shared})]
    assert manager.build([1], 5, groups) == 5  # these three are the same for all groups
    assert groups[0].block_tables[0, :2].tolist() == manager.block_table(1).tolist()
    assert groups[1].block_tables[0, :2].tolist() == manager.block_table(1, group=1).tolist()
    for group in (
        groups[0],
        BatchBuffers(**{**second, "block_tables": first["block_tables"]}),
        BatchBuffers(**{**second, "slot_mapping": first["slot_mapping"]}),
        BatchBuffers(**{**second, "positions": first["slot_mapping"]}),
    ):
        with pytest.raises(kv_cache.InvalidArgument, match=r"buffers: .* of another group"):
            manager.build([1], 5, [groups[0], group])
        with pytest.raises(kv_cache.InvalidArgument, match=r"buffers: .* of another group"):
            manager.step([1], 1, [groups[0], group])
    assert manager.num_tokens(1) == 5


def test_blocks_that_were_never_computed_are_not_found() -> None:
    manager = KVCacheManager(64, 4, num_host_blocks=8, events=True)
    prompt = list(range(17))
    for swapped in (False, True):
        manager.allocate(1, prompt)
        if swapped:
            manager.swap_out([1])
        with pytest.raises(kv_cache.InvalidArgument, match="num_computed: expected >= 0"):
            manager.free(1, num_computed=-1)
        manager.take_events()
        manager.free(1, num_computed=9)
        assert [type(event) for event in manager.take_events()] == [kv_cache.BlockRemoved] * 2
        assert manager.match(prompt) == 8
        manager.check_integrity()
    manager.allocate(1, prompt)
    manager.truncate(1, 12, num_computed=9)
    assert manager.match(prompt) == 8
    manager.free_batch([1], num_computed=4)
    assert manager.match(prompt) == 4
    manager.allocate(1, prompt)
    manager.truncate_batch([1], 0, num_computed=[0])
    assert manager.match(prompt) == 0
    manager.free(1)
    manager.allocate(1, prompt)
    manager.free_batch([1])
    assert manager.match(prompt) == 16


def test_a_sequence_that_outgrew_the_watermark_comes_back() -> None:
    manager = KVCacheManager(8, 4, num_host_blocks=8, watermark_blocks=2, prefix_caching=False)
    manager.allocate(1, 24)
    manager.append(1, 8)
    manager.swap_out([1])
    manager.allocate(2, 0)
    assert not manager.can_swap_in([1])
    manager.free(2)
    assert manager.can_swap_in([1])
    assert len(manager.swap_in([1])) == 8


def test_sharers_give_back_what_is_behind_their_windows() -> None:
    manager = KVCacheManager(4, 4, windows=(4,))
    manager.allocate(1, 12)
    manager.fork(1, 2)
    with pytest.raises(kv_cache.OutOfBlocks):
        manager.append(1)  # the other one still holds the blocks
    assert manager.append_batch([1, 2]).tolist() == []
    manager.check_integrity()


def test_common_prefix_blocks_are_full() -> None:
    manager = KVCacheManager(16, 4)
    manager.allocate(1, 6)
    manager.append(1, 0, lookahead=8)
    assert manager.num_common_prefix_blocks([1, 1]) == 1
    manager.fork(1, 2)
    assert manager.num_common_prefix_blocks([1, 2]) == 1


def test_events_that_cannot_be_named_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = KVCacheManager(8, 2, events=True)
    manager.allocate(1, [5, 6, 7])
    with monkeypatch.context() as patch:
        patch.setattr("vllm_kernels.kv_cache.manager.BlockStored", None)
        with pytest.raises(TypeError):
            manager.take_events()
    (stored,) = manager.take_events()
    assert isinstance(stored, kv_cache.BlockStored) and manager.take_events() == []


def test_buffers_are_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        buffers = BatchBuffers.zeros(max_sequences=2, max_blocks=3, max_tokens=4)
    assert buffers.block_tables.device.type == "cpu"
