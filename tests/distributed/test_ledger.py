"""The ledger of loans: random traces, and a long sequence in the caches of two instances.

VLLM_KERNELS_FUZZ=600 runs the random traces for so many seconds. A seed that fails is printed.
"""

from __future__ import annotations

import copy
import doctest
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ledger_traces import run

import vllm_kernels as vk
from vllm_kernels.distributed import Ledger, ledger
from vllm_kernels.kv_cache import InvalidArgument, KVCacheManager, OutOfBlocks

FUZZ_SECONDS = float(os.environ.get("VLLM_KERNELS_FUZZ", 0))
FOLDER = Path(__file__).parent
CSRC = FOLDER.parent / "csrc"


def test_random_traces_match_the_model() -> None:
    happened = run(FUZZ_SECONDS or 3, seed=0)
    assert min(happened[name] for name in ("lent", "recalled", "lost", "OutOfBlocks")) > 0


def test_random_traces_with_failing_allocations(tmp_path: Path) -> None:
    if shutil.which("g++") is None or "LD_PRELOAD" in os.environ:
        pytest.skip("needs g++, and no other library that is preloaded")
    library = tmp_path / "libfailing_allocations.so"
    sources = [FOLDER / "failing_allocations.cpp", CSRC / "kv_cache" / "failing_new.cpp"]
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", "-I", CSRC, *sources, "-o", library], check=True
    )
    done = subprocess.run(
        [sys.executable, FOLDER / "ledger_traces.py", "--allocations", library,
         "--seconds", str(FUZZ_SECONDS or 4), "--seed", "1000"],
        env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    happened = json.loads(done.stdout)
    assert happened["failed allocations"] > happened["steps"] / 2
    assert min(happened[name] for name in ("lent", "recalled", "lost", "OutOfBlocks")) > 0


# --- the trace of a long sequence ---

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 4, 4, 2, 32, 97


class Model:
    """One layer of attention with random weights: tokens in, the next token out."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.embedding = weights(VOCABULARY, HEADS * HEAD_SIZE)
        self.projection = weights(HEADS * HEAD_SIZE, (HEADS + 2 * KV_HEADS) * HEAD_SIZE) / 8
        self.position = weights(512, HEADS * HEAD_SIZE)

    def query_key_value(self, token: int, position: int) -> tuple[torch.Tensor, ...]:
        hidden = self.embedding[token] + self.position[position]
        rows = (hidden @ self.projection).view(1, -1, HEAD_SIZE)
        return rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)

    def next_token(self, out: torch.Tensor) -> int:
        return int((self.embedding @ out.flatten()).argmax())


class Pool:
    """The cache of an instance, full of NaN where nothing was written."""

    def __init__(self, num_blocks: int) -> None:
        shape = (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        self.key, self.value = torch.full((2, *shape), float("nan")).unbind()

    def write(self, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = torch.tensor([slot])
        one = torch.ones(1)
        vk.reshape_and_cache_flash(key, value, self.key, self.value, slots, "auto", one, one)

    def attend(
        self, query: torch.Tensor, table: list[int], length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return vk.paged_attention(
            query, self.key, self.value, torch.tensor([table], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32), layout="NHD", return_lse=True,
        )  # fmt: skip


def take_slot(cluster: Ledger, position: int) -> tuple[int, int]:
    """(instance, slot) of the next token of sequence 1, whose home is instance 0."""
    home = cluster.managers[0]
    if 1 not in cluster:
        try:
            home.append(1)
        except OutOfBlocks:
            assert home.num_free_blocks == 0
        else:
            return 0, home.slot_mapping(1, position).item()
    index, offset = divmod(position - home.num_tokens(1), BLOCK_SIZE)
    if offset == 0:
        cluster.lend(None, 0, 1, 1)
    instance, block = cluster.blocks(1)[index].tolist()
    return instance, block * BLOCK_SIZE + offset


def tables(cluster: Ledger, length: int) -> dict[int, tuple[list[int], int]]:
    """instance -> the block table of sequence 1 there, and its tokens in it."""
    home = cluster.managers[0]
    found = {0: (home.block_table(1).tolist(), home.num_tokens(1))}
    rest = length - home.num_tokens(1)
    for instance, block in cluster.blocks(1).tolist() if 1 in cluster else ():
        table, tokens = found.get(instance, ([], 0))
        found[instance] = ([*table, block], tokens + min(rest, BLOCK_SIZE))
        rest -= BLOCK_SIZE
    return found


def generate(
    model: Model, pools: list[Pool], cluster: Ledger, prompt: list[int], steps: int
) -> Iterator[list[int]]:
    """Greedy tokens of sequence 1, after each step."""
    cluster.managers[0].allocate(1, 0)
    tokens = list(prompt)
    for position in range(len(prompt) + steps - 1):
        query, key, value = model.query_key_value(tokens[position], position)
        instance, slot = take_slot(cluster, position)
        pools[instance].write(slot, key, value)
        partials = [
            pools[i].attend(query, table, length)
            for i, (table, length) in tables(cluster, position + 1).items()
        ]
        outs, lses = (torch.stack(column) for column in zip(*partials, strict=True))
        out = torch.empty_like(query)
        vk.combine_attn_partials(out, outs, lses)
        if position >= len(prompt) - 1:
            tokens.append(model.next_token(out))
        cluster.check_integrity()
        yield tokens[len(prompt) :]


def test_a_long_sequence_borrows_and_has_the_same_tokens() -> None:
    model, prompt, steps = Model(), [3, 1, 4, 1, 5], 60  # 64 tokens are written: 16 blocks
    alone = Ledger([KVCacheManager(16, BLOCK_SIZE)])
    (*_, expected) = generate(model, [Pool(16)], alone, prompt, steps)
    assert len(expected) == steps and len(set(expected)) > 5 and 1 not in alone

    managers = [KVCacheManager(6, BLOCK_SIZE), KVCacheManager(12, BLOCK_SIZE)]
    managers[0].allocate(2, 4)  # a neighbour
    cluster, pools = Ledger(managers), [Pool(6), Pool(12)]
    for tokens in generate(model, pools, cluster, prompt, steps):
        assert tokens == expected[: len(tokens)]
        counts = [cluster.counts(i) for i in (0, 1)]
        assert all(one.total == one.lent + one.used + one.free for one in counts)
        assert counts[0].borrowed == counts[1].lent == cluster.owed(0, 1)
    assert len(tokens) == steps
    assert counts[1].lent == 11 and counts[0].free == 0
    cluster.free(1)
    managers[0].free(1)
    assert [cluster.counts(i).free for i in (0, 1)] == [5, 12]
    cluster.check_integrity()


def test_a_sequence_goes_on_after_its_blocks_were_recalled() -> None:
    model, prompt, steps = Model(), [3, 1, 4, 1, 5], 60
    (*_, expected) = generate(
        model, [Pool(16)], Ledger([KVCacheManager(16, BLOCK_SIZE)]), prompt, steps
    )
    managers = [KVCacheManager(size, BLOCK_SIZE) for size in (6, 12, 12)]
    managers[0].allocate(2, 4)
    cluster, pools = Ledger(managers), [Pool(size) for size in (6, 12, 12)]
    for step, tokens in enumerate(generate(model, pools, cluster, prompt, steps)):
        assert tokens == expected[: len(tokens)]
        if step == 42:  # a block moves home, and the others to instance 2
            managers[0].free(2)
            moves = cluster.recall(1, cluster.owed(0, 1))
            assert {row[3] for row in moves.tolist()} == {0, 2}
            for _, source, source_block, destination, block in moves.tolist():
                for name in ("key", "value"):
                    cache = getattr(pools[source], name)
                    getattr(pools[destination], name)[block] = cache[source_block]
                    cache[source_block] = float("nan")
            cluster.check_integrity()
            assert cluster.counts(1).free == 12
    assert len(tokens) == steps
    assert cluster.owed(0, 2) > 0


# --- the Python class ---


def test_bad_managers_are_refused() -> None:
    with pytest.raises(InvalidArgument) as info:
        Ledger([])
    assert str(info.value) == "Ledger: managers (their number): expected 1 to 1024, got 0"
    with pytest.raises(InvalidArgument) as info:
        Ledger([3])  # type: ignore[list-item]
    assert str(info.value) == "Ledger: managers: expected KVCacheManager, got int"


def test_a_ledger_keeps_its_managers_alive() -> None:
    cluster = Ledger([KVCacheManager(4, 4), KVCacheManager(4, 4)])
    gc.collect()
    native = cluster._native
    del cluster
    gc.collect()
    assert native.lend(1, 0, 5, 2).tolist() == [[1, 0], [1, 1]]
    native.check_integrity()


def test_counts_out_of_range_name_their_call() -> None:
    cluster = Ledger([KVCacheManager(4, 4), KVCacheManager(4, 4)])
    cluster.lend(1, 0, 5, 2)
    for call, message in (
        (lambda: cluster.lend(1, 0, 5, -1), "lend: num_blocks: expected 1 to 2147483645, got -1"),
        (lambda: cluster.recall(7, 1), "recall: lender: expected 0 to 1, got 7"),
        (lambda: cluster.recall(1, 3), "recall: num_blocks: expected 0 to 2, got 3"),
        (lambda: cluster.recall(1, 2**62), f"recall: num_blocks: expected 0 to 2, got {2**62}"),
    ):
        with pytest.raises(InvalidArgument) as info:
            call()
        assert str(info.value) == message
    with pytest.raises(OutOfBlocks, match="needed 16777216, free 2"):
        cluster.lend(1, 0, 5, 2**24)


def test_pickle_and_copy_are_refused() -> None:
    cluster = Ledger([KVCacheManager(4, 4)])
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="Ledger cannot be pickled or copied"):
            refused(cluster)


def test_the_example_runs() -> None:
    assert doctest.testmod(ledger).failed == 0
    assert (ledger.Ledger.__doc__ or "").count(">>>") > 5
