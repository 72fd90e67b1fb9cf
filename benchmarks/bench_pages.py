"""Page selection: bounds, selection, attention over the kept pages beside dense attention, SparQ,
and copied slots. 32/8 heads of 128, pages of 16, layout vllm, cold caches.

    python -m benchmarks.bench_pages [--device cpu|cuda] [--batch 8] [--length 32768]
                                     [--budget 2048] [--layers 32] [--dtype bfloat16]

GB/s count the bounds that a selection reads, and K and V of attention. torch is the same selection
by products of gathered bounds and topk. Decode steps bring one slot a sequence up to date. SparQ
has r = 32 and keeps as many tokens as the budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for, machine, medians
from vllm_kernels import Layout

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
R = 32  # components of SparQ
Call = Callable[[int], object]
Select = Literal["pages", "tokens"]


def torch_select(
    query: Tensor, bounds: Tensor, tables: Tensor, lens: Tensor, pages: int, per_kv_head: bool
) -> Tensor:
    heads = query.float().unflatten(1, (KV_HEADS, -1))
    weights = torch.stack([heads.clamp_max(0).sum(2), heads.clamp_min(0).sum(2)], 2)
    scores = torch.einsum("bphid,bhid->bhp", bounds[tables.long()].float(), weights)
    scores = scores if per_kv_head else scores.sum(1)
    scores[..., 0] = torch.inf
    scores[..., -4:] = torch.inf
    kept = scores.topk(pages).indices.sort().values
    of_row = tables[:, None].expand(-1, KV_HEADS, -1) if per_kv_head else tables
    return of_row.gather(-1, kept)


class Workload:
    def __init__(self, asked: argparse.Namespace):
        self.dtype, self.device = getattr(torch, asked.dtype), asked.device
        pages = asked.length // BLOCK
        blocks = asked.batch * pages
        self.bound_bytes = blocks * KV_HEADS * 2 * SIZE * self.dtype.itemsize
        self.kv_bytes = BLOCK * self.bound_bytes
        self.copies = copies_for(asked.device, self.bound_bytes)
        self.kv_copies = copies_for(asked.device, self.kv_bytes)
        x = 16 // self.dtype.itemsize
        bounds = torch.randn(self.copies, blocks, KV_HEADS, 2, SIZE, device=self.device)
        self.bounds = bounds.sort(3).values.to(self.dtype)
        keys, values = (KV_HEADS, SIZE // x, BLOCK, x), (KV_HEADS, SIZE, BLOCK)
        self.keys, self.values = (
            torch.randn(self.kv_copies, blocks, *shape, dtype=self.dtype, device=self.device)
            for shape in (keys, values)
        )
        self.query = torch.randn(asked.batch, HEADS, SIZE, dtype=self.dtype, device=self.device)
        tables = torch.randperm(blocks, device=self.device).view(asked.batch, pages)
        self.tables = tables.int()
        self.lens = torch.full((asked.batch,), asked.length, dtype=torch.int32, device=self.device)
        self.budget = asked.budget

    def select(self, i: int, per_kv_head: bool = False) -> tuple[Tensor, Tensor]:
        return vllm_kernels.select_pages(
            self.query, self.bounds[i], self.tables, self.lens, self.budget, block_size=BLOCK,
            per_kv_head=per_kv_head,
        )  # fmt: skip

    def attend(self, i: int, tables: Tensor, lens: Tensor) -> Tensor:
        i %= self.kv_copies
        return vllm_kernels.paged_attention(self.query, self.keys[i], self.values[i], tables, lens)

    def sparq(self, layout: Layout, select: Select) -> tuple[str, int, dict[str, Call]]:
        """SparQ beside dense attention in the same layout."""
        keys, values = self.keys, self.values
        if layout == "HND":
            shape = (*keys.shape[:3], BLOCK, SIZE)
            keys, values = keys.view(shape), values.view(shape)
        part = R * self.kv_bytes // (2 * SIZE)
        kept = self.budget * self.kv_bytes // (BLOCK * self.tables.shape[1])

        def call(function: Callable[..., object], **options: object) -> Call:
            def run(i: int) -> object:
                i %= self.kv_copies
                tensors = (self.query, keys[i], values[i], self.tables, self.lens)
                return function(*tensors, layout=layout, **options)

            return run

        ours = call(vllm_kernels.sparq_attention, r=R, k=self.budget, select=select)
        dense = call(vllm_kernels.paged_attention)
        return f"SparQ, {layout}, {select}", part + kept, {"ours": ours, "dense": dense}

    def rows(self) -> list[tuple[str, int, dict[str, Call]]]:
        pages = self.budget // BLOCK
        kept_bytes = len(self.query) * pages * (self.kv_bytes // self.tables.numel())
        last = self.tables[:, -1].long() * BLOCK
        written = last + torch.randint(0, BLOCK, last.shape, device=self.device)
        prompt = torch.arange(self.tables.shape[1] * BLOCK, device=self.device)

        def torch_call(each: bool) -> Call:
            return lambda i: torch_select(
                self.query, self.bounds[i], self.tables, self.lens, pages, each
            )

        def update(slots: Tensor) -> Call:
            return lambda i: vllm_kernels.page_bounds_update(
                self.bounds[i], self.keys[i % self.kv_copies], slots
            )

        return [
            ("select", self.bound_bytes, {"ours": self.select, "torch": torch_call(False)}),
            ("select, per KV head", self.bound_bytes,
             {"ours": lambda i: self.select(i, True), "torch": torch_call(True)}),
            ("select + attend", self.bound_bytes + kept_bytes,
             {"ours": lambda i: self.attend(i, *self.select(i)),
              "dense": lambda i: self.attend(i, self.tables, self.lens)}),
            self.sparq("vllm", "pages"),
            self.sparq("HND", "pages"),
            self.sparq("HND", "tokens"),
            ("update, a decode step", len(written) * BLOCK * KV_HEADS * SIZE * self.dtype.itemsize,
             {"ours": update(written)}),
            ("update, a prompt", self.kv_bytes // 2 // len(self.query), {"ours": update(prompt)}),
        ]  # fmt: skip


def copied_slots(asked: argparse.Namespace) -> tuple[str, int, dict[str, Call]]:
    """4 accepted tokens of each sequence in all layers."""
    dtype, blocks, tokens = getattr(torch, asked.dtype), 256, 4 * asked.batch
    x = 16 // dtype.itemsize
    shapes = ((KV_HEADS, SIZE // x, BLOCK, x), (KV_HEADS, SIZE, BLOCK))
    caches = [
        torch.zeros(blocks, *shape, dtype=dtype, device=asked.device)
        for _ in range(asked.layers)
        for shape in shapes
    ]
    slots = torch.randperm(blocks * BLOCK, device=asked.device)
    src, dst = slots[:tokens], slots[tokens : 2 * tokens]

    def by_torch(i: int) -> None:
        for cache in caches:
            rows = cache.movedim(3, 1)
            rows[dst // BLOCK, dst % BLOCK] = rows[src // BLOCK, src % BLOCK]

    size = 2 * tokens * len(caches) * KV_HEADS * SIZE * dtype.itemsize
    ours: Call = lambda i: vllm_kernels.copy_slots(caches, src, dst)  # noqa: E731
    return f"copy_slots, {tokens} tokens, {asked.layers} layers", size, {
        "ours": ours, "torch": by_torch,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    here = "cuda" if torch.cuda.is_available() and vllm_kernels.cuda_loaded else "cpu"
    parser.add_argument("--device", default=here)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=32_768 if here == "cuda" else 8192)
    parser.add_argument("--budget", type=int, default=2048 if here == "cuda" else 1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=0.5)
    asked = parser.parse_args()
    print(machine(asked.device))
    work = Workload(asked)
    print(f"{asked.batch} x {asked.length}, budget {asked.budget}, {asked.dtype}")
    for kind, size, calls in [*work.rows(), copied_slots(asked)]:
        times = medians(calls, asked.device, work.copies, asked.seconds)
        columns = "  ".join(f"{who} {1e6 * time:10.1f} us" for who, time in times.items())
        print(f"{kind:36} {columns}  {size / times['ours'] / 1e9:7.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
