"""paged_attention on a GPU along its axes: what each head size, group, page size, cache type and
layout reaches, beside head size 128, group 4, pages of 16 tokens at the same KV bytes.

    python -m benchmarks.bench_paged_attention_axes [--bytes 268435456] [--batch 64]

The context follows from the bytes. Pages are permuted, KV copies rotate past the L2 cache, the
lengths are known on the device only. GB/s counts K and V once; `of base` compares the GB/s with the
first row's of the same layout and cache type. Errors are the norm of the difference to the float64
reference over the reference's norm, on 4 sequences.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

import vllm_kernels
from benchmarks.harness import copies_for, machine, median_seconds
from vllm_kernels import reference

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
INT8_SCALE = 4 / 127  # unit variance


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the axes; the defaults are the base."""

    layout: str = "vllm"
    cache: str = "bf16"
    head_size: int = 128
    group: int = 4
    page: int = 16
    query_len: int = 1
    kv_heads: int = 8

    def name(self) -> str:
        return (
            f"{self.layout:<5} {self.cache:<5} head {self.head_size:<4} group {self.group:<3} "
            f"page {self.page:<4} tokens {self.query_len:<3}"
        )


def cases() -> list[Case]:
    result = []
    for layout in ("vllm", "NHD", "HND"):
        for cache in ("bf16", "e4m3"):
            base = Case(layout, cache)
            change = dataclasses.replace
            result += [base]
            result += [change(base, head_size=size) for size in (64, 80, 96, 112, 192, 256)]
            result += [change(base, group=group) for group in (1, 2, 5, 6, 7, 8, 16, 32)]
            pages = (8, 32, 64, 128, 256) if cache == "bf16" or layout != "vllm" else (32, 64, 256)
            result += [change(base, page=page) for page in pages]
    result += [Case(cache=cache) for cache in ("fp16", "e5m2", "int8")]
    result += [Case(cache=cache, query_len=n) for cache in ("bf16", "e4m3") for n in (2, 4, 8, 16)]
    return result


class Batch:
    """Sequences of one length that hold `kv_bytes` of keys and values together."""

    def __init__(self, case: Case, batch: int, kv_bytes: int) -> None:
        dtype = DTYPES[case.cache]
        token_bytes = 2 * case.kv_heads * case.head_size * dtype.itemsize
        pages = max(1, round(kv_bytes / (batch * token_bytes * case.page)))
        self.case, self.bytes = case, batch * pages * case.page * token_bytes
        self.copies = copies_for("cuda", self.bytes)
        shape = (self.copies, batch * pages, case.page, case.kv_heads, case.head_size)
        query_dtype = torch.float16 if case.cache == "fp16" else torch.bfloat16
        heads = case.kv_heads * case.group
        self.query = torch.randn(
            batch * case.query_len, heads, case.head_size, device="cuda", dtype=query_dtype
        )
        self.scale = case.head_size**-0.5
        self.keys, self.values = self._pool(shape, dtype, True), self._pool(shape, dtype, False)
        order = torch.randperm(batch * pages, device="cuda", dtype=torch.int32)
        self.block_tables = order.view(batch, pages)
        self.seq_lens = torch.full((batch,), pages * case.page, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * case.query_len
        self.out = torch.empty_like(self.query)
        scale = torch.tensor([INT8_SCALE if case.cache == "int8" else 1.0], device="cuda")
        self.kv_scales = {"k_scale": scale, "v_scale": scale} if dtype.itemsize == 1 else {}

    def _pool(self, shape: tuple[int, ...], dtype: torch.dtype, key: bool) -> torch.Tensor:
        """Random values in the case's layout; one copy is drawn, the others repeat it."""
        one = torch.randn(shape[1:], device="cuda", dtype=torch.bfloat16)
        if dtype == torch.int8:
            one = (one.float() / INT8_SCALE).round_().clamp_(-127, 127)
        one = one.to(dtype)
        bits = one.view(torch.uint8) if one.element_size() == 1 else one
        if self.case.layout == "HND":
            bits = bits.transpose(1, 2)
        elif self.case.layout == "vllm" and key:
            bits = bits.unflatten(-1, (-1, 16 // dtype.itemsize)).permute(0, 2, 3, 1, 4)
        elif self.case.layout == "vllm":
            bits = bits.permute(0, 2, 3, 1)
        bits = bits.contiguous()
        return bits.expand(self.copies, *bits.shape).contiguous().view(dtype)

    def call(self, i: int) -> torch.Tensor:
        several = {}
        if self.case.query_len > 1:
            several = {"query_start_loc": self.starts, "max_query_len": self.case.query_len}
        vllm_kernels.paged_attention(
            self.query, self.keys[i], self.values[i], self.block_tables, self.seq_lens,
            scale=self.scale, layout=self.case.layout, out=self.out, **self.kv_scales, **several,
        )  # fmt: skip
        return self.out

    def error(self) -> float:
        some = min(4, self.seq_lens.size(0))
        tokens = some * self.case.query_len
        scales = {name: scale.cpu() for name, scale in self.kv_scales.items()}
        tables = self.block_tables[:some].long()
        keys, values = self.keys[0][tables.flatten()].cpu(), self.values[0][tables.flatten()].cpu()
        local = torch.arange(tables.numel(), dtype=torch.int32).view(tables.shape)
        want = reference.paged_attention(
            self.query[:tokens].cpu(), keys, values, local, self.seq_lens[:some].cpu(),
            query_start_loc=self.starts[: some + 1].cpu(), scale=self.scale,
            layout=self.case.layout, **scales,
        )  # fmt: skip
        want = want[0] if isinstance(want, tuple) else want
        got = self.call(0)[:tokens].cpu()
        return ((got.double() - want.double()).norm() / want.double().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bytes", type=int, default=256 << 20, help="of K and V")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.05, help="per figure")
    parser.add_argument("--match", default="", help="only cases whose line holds this")
    parser.add_argument("--check", action="store_true", help="compare with the reference as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_paged_attention_axes needs a GPU: left out.")
        return
    print(machine("cuda"))
    base: dict[tuple[str, str], float] = {}
    for case in cases():
        if arguments.match not in case.name():
            continue
        batch = Batch(case, arguments.batch, arguments.bytes)
        error = f"  error {batch.error():.1e}" if arguments.check else ""
        seconds = median_seconds(batch.call, "cuda", batch.copies, arguments.seconds)
        rate = batch.bytes / seconds * 1e-9
        first = base.setdefault((case.layout, case.cache), rate)
        print(
            f"{case.name()} {batch.bytes / 1e6:7.1f} MB {seconds * 1e6:8.1f} us {rate:6.0f} GB/s "
            f"{rate / first:5.2f} of base{error}",
            flush=True,
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
