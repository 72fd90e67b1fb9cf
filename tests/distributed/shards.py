"""Cases of paged_attention whose tokens are dealt over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers import to_layout
from paged_attention_cases import Case, assert_near, make_case, quantized
from torch import Tensor

from vllm_kernels.distributed import ContextParallel

NAN = float("nan")


@dataclass
class Dealt:
    """A case, and the arguments of ContextParallel.attend that give its result."""

    case: Case
    key_caches: Tensor  # [shards, ...]
    value_caches: Tensor
    block_tables: Tensor  # [shards, num_seqs, blocks]
    local_lens: Tensor  # [shards, num_seqs]
    options: dict[str, Any]  # key, value and all that both ops have

    def arguments(self) -> tuple[Tensor, ...]:
        return self.key_caches, self.value_caches, self.block_tables, self.local_lens

    def check(self, got: Tensor, heads: slice = slice(None)) -> None:
        """Compares with the float64 reference of one rank."""
        query = self.case.query[:, heads]
        assert got.dtype == query.dtype
        want, spread, _ = self.case.naive_and_spread()
        scale = self.options.get("scale", query.shape[-1] ** -0.5)
        lens = self.case.seq_lens.tolist()
        assert_near(got, want[:, heads], spread[:, heads], query, scale, lens, None)


def rows_of(case: Case, kv_heads: int, seq: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a sequence, [length, kv_heads, head_size], as stored."""
    length, size = int(case.seq_lens[seq]), case.block_size
    table = case.block_tables[seq, : -(-length // size)].long()
    key, value = case.key_cache[table], case.value_cache[table]
    return key.flatten(0, 1)[:length], value.flatten(0, 1)[:length]


def dealt_case(
    parallel: ContextParallel,
    lens: list[int],
    queries: list[int] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
    layout: str = "NHD",
    all_stored: bool = False,
    **settings: Any,
) -> Dealt:
    """Makes a case and deals its tokens. ``parallel`` has all shards in this process.

    With ``queries`` the last tokens of each sequence are given as key and value, or stored, too.
    """
    case = make_case(device, dtype, lens, queries, kv_heads=kv_heads, layout="NHD", **settings)
    size, head_size = case.block_size, case.query.shape[-1]
    context = torch.tensor(lens) - torch.tensor((queries or [0]) if not all_stored else [0])
    local = parallel.local_lens(context)
    blocks = -(-local // size)
    width = int(blocks.max()) + 2
    pool = (parallel.size, int(blocks.sum(1).max()) + 3, size, kv_heads, head_size)
    empty = quantized(torch.full(pool, NAN), case.key_cache.dtype, None).to(device)
    keys, values = empty.clone(), empty.clone()
    tables = torch.full((parallel.size, len(lens), width), -1, dtype=torch.int32)
    new: list[tuple[Tensor, Tensor]] = []
    for rank in range(parallel.size):
        order = iter(torch.randperm(pool[1]).tolist())
        for seq in range(len(lens)):
            for column in range(int(blocks[rank, seq])):
                tables[rank, seq, column] = next(order)
    for seq, before in enumerate(context.tolist()):
        key, value = rows_of(case, kv_heads, seq)
        starts = torch.tensor([0, before], dtype=torch.int32)
        slots = parallel.slots(
            torch.arange(before), tables[:, seq : seq + 1], block_size=size, query_start_loc=starts
        )
        for rank, mine in enumerate(slots):
            is_mine = mine >= 0
            keys[rank].flatten(0, 1)[mine[is_mine]] = key[:before][is_mine]
            values[rank].flatten(0, 1)[mine[is_mine]] = value[:before][is_mine]
        new.append((key[before:], value[before:]))
    options = dict(case.options) | {"layout": layout}
    if queries is not None:
        options["max_query_len"] = max(queries)
    if queries is not None and not all_stored:
        for at, (name, scale) in enumerate((("key", "k_scale"), ("value", "v_scale"))):
            rows = torch.cat([both[at] for both in new])
            factor = options.get(scale)
            whole = rows.float() if factor is None else rows.float() * factor.reshape(-1, 1)
            options[name] = whole.to(dtype)
    as_layout = [
        torch.stack([to_layout(pages, layout, is_key) for pages in caches])
        for caches, is_key in ((keys, True), (values, False))
    ]
    return Dealt(case, *as_layout, tables.to(device), local.to(device), options)
