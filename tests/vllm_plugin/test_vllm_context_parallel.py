"""Decode context parallelism: ranks that hold a part of each sequence, a thread each."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import Ranks
from test_backend import BATCHES, SCALES, batch, close

from vllm_kernels import reference

HEADS, SIZE, BLOCK, BLOCKS = 8, 32, 16, 12  # heads of all ranks; one KV head, which all have


@pytest.fixture
def start(vllm, monkeypatch):
    """The backend on GPUs of which each is a thread here."""

    def start(world_size: int) -> tuple[Any, Ranks]:
        ranks = Ranks(world_size)
        vllm.install(on_cpu=False, ranks=ranks)
        backend = importlib.import_module("vllm_kernels.integrations.vllm.backend")
        monkeypatch.setattr(backend.Impl, "dcp_world_size", world_size)
        return backend, ranks

    return start


def make_layer(backend: Any, rank: int, heads: int, **settings: Any) -> Any:
    layer = backend.Impl(heads, SIZE, SIZE**-0.5, 1, **settings)
    layer.dcp_rank = rank
    return layer


def config(layer: Any, collective: str, interleave: int) -> SimpleNamespace:
    return SimpleNamespace(
        layers={"0": SimpleNamespace(impl=layer)},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=interleave, dcp_comm_backend=collective
        ),
    )


def slots(common: Any, rank: int, ranks: int, interleave: int) -> torch.Tensor:
    """Where this rank puts the new tokens; -1: another has them."""
    places = []
    lens, starts = common.seq_lens.tolist(), common.query_start_loc.tolist()
    for row, length in enumerate(lens):
        for at in range(length - (starts[row + 1] - starts[row]), length):
            turn, offset = divmod(at, interleave)
            slot = turn // ranks * interleave + offset
            block = common.block_table_tensor[row, slot // BLOCK]
            mine = turn % ranks == rank
            places.append(int(block) * BLOCK + slot % BLOCK if mine else -1)
    return torch.tensor(places)


@pytest.mark.parametrize("option", ["", "sinks", "window", "ALiBi"])
@pytest.mark.parametrize("collective", ["ag_rs", "a2a"])
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_attend_to_all(start, world_size, interleave, collective, option):
    """Prompts go in, then a mixed batch continues them; one sequence is new."""
    backend, ranks = start(world_size)
    heads = HEADS // world_size
    new = batch(BATCHES["mixed"])
    contexts = new.seq_lens - new.query_start_loc.diff()
    old = batch([(int(n), int(n)) for n in contexts.clamp_min(1)])  # the new one is overwritten
    old.block_table_tensor = new.block_table_tensor
    rows = [torch.randn(int(common.num_actual_tokens), HEADS + 2, SIZE) for common in (old, new)]
    sinks = torch.randn(HEADS) if option == "sinks" else None
    slopes = torch.rand(HEADS) if option == "ALiBi" else None
    window = 9 if option == "window" else 0

    def run(rank: int) -> torch.Tensor:
        ranks.own.rank = rank
        cache = torch.full((BLOCKS, 1, BLOCK, 2 * SIZE), 1e4)
        mine = slice(rank * heads, (rank + 1) * heads)
        layer = make_layer(
            backend, rank, heads, sinks=None if sinks is None else sinks[mine],
            alibi_slopes=None if slopes is None else slopes[mine].tolist(),
            sliding_window=window or None,
        )  # fmt: skip
        settings = config(layer, collective, interleave)
        builder = backend.Builder(SimpleNamespace(), ["0"], settings, torch.device("cpu"))
        for common, tokens in zip((old, new), rows):
            query, key, value = tokens.split([HEADS, 1, 1], dim=1)
            places = slots(common, rank, world_size, interleave)
            layer.do_kv_cache_update(SCALES, key, value, cache, places)
            out = torch.empty_like(query[:, mine])
            metadata = builder.build(0, common)
            layer.forward(SCALES, query[:, mine], key, value, cache, metadata, out)
        return out

    with ThreadPoolExecutor(world_size) as threads:
        got = torch.cat(list(threads.map(run, range(world_size))), dim=1)
    assert ranks.used == ("dcp_a2a_lse_reduce" if collective == "a2a" else "cp_lse_ag_out_rs")
    query = rows[1][:, :HEADS]
    pages = torch.zeros(2, BLOCKS, BLOCK, 1, SIZE)
    for common, tokens in zip((old, new), rows):
        places = slots(common, 0, 1, interleave)
        pages[:, places // BLOCK, places % BLOCK] = tokens[:, HEADS:].transpose(0, 1)[:, :, None]
    want = reference.paged_attention(
        query, pages[0], pages[1], new.block_table_tensor, new.seq_lens,
        query_start_loc=new.query_start_loc, layout="NHD", sinks=sinks, alibi_slopes=slopes,
        sliding_window=window,
    )[0]  # fmt: skip
    close(got, want)


def test_what_the_class_says(start):
    backend, _ = start(2)
    assert backend.Impl.supports_dcp and backend.Impl.can_return_lse_for_decode
    assert backend.Impl.lse_base_on_e  # natural logarithm
    assert not make_layer(backend, 0, 4).fused_rope_kvcache_supported()
