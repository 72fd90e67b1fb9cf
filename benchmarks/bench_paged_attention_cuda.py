"""Decode attention on a GPU: ours beside vLLM, FlashInfer and FlashAttention where installed.

    python -m benchmarks.bench_paged_attention_cuda [--cases 8x8192 64x2048 ...] [--dtype bfloat16]

A case is batch x context. 32 query heads, 8 KV heads, head size 128, permuted pages of 16 tokens;
KV copies rotate, so that the L2 cache serves none. GB/s counts K and V once. Errors are the norm of
the difference to the float64 reference over the reference's norm.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import vllm_kernels
from benchmarks import rivals
from benchmarks.harness import copies_for, machine, median_seconds
from vllm_kernels import reference

HEADS, KV_HEADS, HEAD_SIZE, PAGE, PARTITION = 32, 8, 128, 16, 512
SCALE = HEAD_SIZE**-0.5
CHECKED = 8  # sequences compared with the reference
CASES = ["1x1024", "1x8192", "8x8192", "64x2048", "256x1024"]

Call = Callable[[int], Tensor]


class Batch:
    """Sequences of one length over permuted pages, the same values in both layouts."""

    def __init__(self, batch: int, context: int, dtype: torch.dtype) -> None:
        pages = -(-context // PAGE)
        self.batch, self.context = batch, context
        self.bytes = 2 * batch * context * KV_HEADS * HEAD_SIZE * dtype.itemsize
        self.copies = copies_for("cuda", self.bytes)
        options = {"device": "cuda", "dtype": dtype}
        self.query = torch.randn(batch, HEADS, HEAD_SIZE, **options)
        shape = (self.copies, batch * pages, PAGE, KV_HEADS, HEAD_SIZE)
        self.keys, self.values = torch.randn(shape, **options), torch.randn(shape, **options)
        order = torch.randperm(batch * pages, device="cuda", dtype=torch.int32)
        self.block_tables = order.view(batch, pages)
        self.seq_lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        self.one = torch.ones(1, device="cuda")

    def vllm_layout(self) -> tuple[Tensor, Tensor]:
        x = 16 // self.keys.element_size()
        split = self.keys.unflatten(-1, (HEAD_SIZE // x, x))
        keys = split.permute(0, 1, 3, 4, 2, 5).contiguous()
        return keys, self.values.permute(0, 1, 3, 4, 2).contiguous()

    def reference(self, keys: Tensor, values: Tensor) -> Tensor:
        return reference.naive_paged_attention(
            self.query[:CHECKED], keys[0], values[0], KV_HEADS, SCALE,
            self.block_tables[:CHECKED], self.seq_lens[:CHECKED], PAGE,
        )  # fmt: skip


def vllm_style(batch: Batch, keys: Tensor, values: Tensor) -> Iterator[tuple[str, Call]]:
    """paged_attention_v1 and v2 of ours, and of vLLM where it is installed."""
    partitions = -(-batch.context // PARTITION)
    out = torch.empty_like(batch.query)
    sums = torch.empty(batch.batch, HEADS, partitions, device="cuda")
    scratch = [sums, torch.empty_like(sums),
               batch.query.new_empty(batch.batch, HEADS, partitions, HEAD_SIZE)]  # fmt: skip
    for library, ops in (("ours", vllm_kernels), ("vllm", rivals.vllm_ops)):
        if ops is None:
            continue
        for version, extra in (("v1", []), ("v2", scratch)):
            op = getattr(ops, f"paged_attention_{version}")

            def call(i: int, op=op, extra=extra) -> Tensor:
                op(out, *extra, batch.query, keys[i], values[i], KV_HEADS, SCALE,
                   batch.block_tables, batch.seq_lens, PAGE, batch.context, None, "auto",
                   batch.one, batch.one)  # fmt: skip
                return out

            yield f"{library} {version}", call


def flash_style(batch: Batch) -> Iterator[tuple[str, Call]]:
    """The libraries that read layout NHD."""
    if rivals.flashinfer:
        workspace = torch.empty(256 << 20, device="cuda", dtype=torch.uint8)
        wrapper = rivals.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        pages = batch.block_tables.size(1)
        wrapper.plan(
            torch.arange(batch.batch + 1, device="cuda", dtype=torch.int32) * pages,
            batch.block_tables.flatten(), torch.full_like(batch.seq_lens, PAGE), HEADS, KV_HEADS,
            HEAD_SIZE, PAGE, q_data_type=batch.query.dtype, kv_data_type=batch.query.dtype,
        )  # fmt: skip
        yield "flashinfer", lambda i: wrapper.run(batch.query, (batch.keys[i], batch.values[i]))
    tables = (
        ("fa3", rivals.flash_attn_3, "page_table"),
        ("fa2", rivals.flash_attn_2, "block_table"),
    )
    for name, library, table in tables:
        if library is None:
            continue
        attend = functools.partial(
            library.flash_attn_with_kvcache, batch.query.unsqueeze(1),
            cache_seqlens=batch.seq_lens, softmax_scale=SCALE, causal=True,
            **{table: batch.block_tables},
        )  # fmt: skip
        yield name, lambda i, attend=attend: attend(batch.keys[i], batch.values[i])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float16")
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_paged_attention_cuda needs a GPU: left out.")
        return
    print(machine("cuda"))
    for library, reason in rivals.MISSING.items():
        print(f"{library} is left out: {reason}")
    print(f"{'case':<10} {'KV MB':>7} {'candidate':<11} {'us':>9} {'GB/s':>6} {'error':>8}")
    for case in arguments.cases:
        batch = Batch(*map(int, case.split("x")), getattr(torch, arguments.dtype))
        caches = batch.vllm_layout()
        want = batch.reference(*caches)
        for name, call in (*vllm_style(batch, *caches), *flash_style(batch)):
            try:
                error = ((call(0)[:CHECKED] - want).norm() / want.norm()).item()
                seconds = median_seconds(call, "cuda", batch.copies, arguments.seconds)
            except (RuntimeError, ValueError, TypeError) as problem:
                print(f"{case:<10} {'':>7} {name:<11} {str(problem).splitlines()[0][:80]}")
                continue
            print(
                f"{case:<10} {batch.bytes / 1e6:>7.1f} {name:<11} {seconds * 1e6:>9.1f} "
                f"{batch.bytes / seconds * 1e-9:>6.0f} {error:>8.1e}",
                flush=True,
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
