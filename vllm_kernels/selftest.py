"""``vllm_kernels selftest``: each group of ops against the reference, in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

import vllm_kernels

from . import _library, reference
from .kv_cache import BatchBuffers, KVCacheManager
from .kv_cache.tensors import KVCache, KVShape

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 8, 2, 64, 16, 8
LENS = (20, 37)

Check = Callable[[torch.device], None]


class Mismatch(Exception):
    """A result that differs from the reference."""


def _close(got: Tensor, want: Tensor, what: str) -> None:
    tolerance = 2e-2 if got.dtype.itemsize < 4 else 1e-4
    error = (got.double() - want.double().to(got.device)).abs().max().item()
    if not error <= tolerance * max(1.0, want.abs().max().item()):
        raise Mismatch(f"{what} is off by {error:.2g}")


def _equal(got: Tensor, want: Tensor, what: str) -> None:
    if not torch.equal(got, want.to(got)):
        raise Mismatch(f"{what} gives other values")


def _random(device: torch.device, *shape: int) -> Tensor:
    """Half precision on a GPU, whose fast kernels are for that."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(device, torch.float16 if device.type == "cuda" else torch.float32)


def _ints(device: torch.device, values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def norms(device: torch.device) -> None:
    x, weight = _random(device, 5, 256), _random(device, 256)
    out = torch.empty_like(x)
    vllm_kernels.rms_norm(out, x, weight, 1e-6)
    _close(out, reference.rms_norm(x, weight, 1e-6), "rms_norm")


def activations(device: torch.device) -> None:
    x = _random(device, 5, 256)
    out = x.new_empty(5, 128)
    vllm_kernels.silu_and_mul(out, x)
    _close(out, reference.silu_and_mul(x), "silu_and_mul")


def quantization(device: torch.device) -> None:
    x = _random(device, 5, 256)
    got, scale = vllm_kernels.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    want, want_scale = reference.scaled_fp8_quant(x.cpu(), use_per_token_if_dynamic=True)
    _close((got.float() * scale).cpu(), want.float() * want_scale, "scaled_fp8_quant")


def rotary(device: torch.device) -> None:
    query, key = _random(device, 5, HEADS * SIZE), _random(device, 5, KV_HEADS * SIZE)
    positions = torch.arange(5, device=device)
    table = _random(device, 16, SIZE)
    want = [reference.rotary_embedding(positions, rows, SIZE, table, True) for rows in (query, key)]
    vllm_kernels.rotary_embedding(positions, query, key, SIZE, table, True)
    _close(query, want[0], "rotary_embedding's query")
    _close(key, want[1], "rotary_embedding's key")


def _cache(
    device: torch.device, layout: vllm_kernels.Layout, eight: bool
) -> tuple[KVCache, Tensor]:
    """A cache with two sequences that were written to it, and their table."""
    dtype = _random(device, 1).dtype
    shape = KVShape(1, KV_HEADS, SIZE, dtype, BLOCK, layout, "fp8" if eight else "auto")
    cache = KVCache(shape, BLOCKS, device=device)
    for pages in (cache.key_caches[0], cache.value_caches[0]):
        pages.view(torch.uint8).zero_()
    rows = [[3, 1, 0], [6, 2, 5]]
    slots = [row[t // BLOCK] * BLOCK + t % BLOCK for row, n in zip(rows, LENS) for t in range(n)]
    key, value = _random(device, sum(LENS), KV_HEADS, SIZE), _random(device, 57, KV_HEADS, SIZE)
    cache.write(0, key, value, torch.tensor(slots, device=device))
    return cache, _ints(device, rows)


def _attention(device: torch.device, layout: vllm_kernels.Layout, eight: bool, new: int) -> None:
    """new: query tokens of each sequence."""
    cache, table = _cache(device, layout, eight)
    query, lens = _random(device, 2 * new, HEADS, SIZE), _ints(device, list(LENS))
    starts = _ints(device, [0, new, 2 * new])
    keys, values = cache.key_caches[0], cache.value_caches[0]
    out = vllm_kernels.paged_attention(
        query, keys, values, table, lens, query_start_loc=starts, max_query_len=new, layout=layout
    )
    want, _ = reference.paged_attention(
        query, keys, values, table, lens, query_start_loc=starts, layout=layout
    )
    _close(out, want, f"paged_attention, layout {layout}")


def decode(device: torch.device) -> None:
    _attention(device, "vllm", False, 1)
    _attention(device, "NHD", False, 1)
    _attention(device, "HND", False, 1)


def prefill(device: torch.device) -> None:
    _attention(device, "NHD", False, 17)
    starts = _ints(device, [0, 9, 20])
    query, key = _random(device, 20, HEADS, SIZE), _random(device, 20, KV_HEADS, SIZE)
    out = vllm_kernels.varlen_attention(query, key, key, starts, starts)
    _close(out, reference.varlen_attention(query, key, key, starts, starts)[0], "varlen_attention")


def eight_bit_cache(device: torch.device) -> None:
    _attention(device, "NHD", True, 1)


def shared_prefixes(device: torch.device) -> None:
    cache, table = _cache(device, "NHD", False)
    table[:, 0] = 3
    query, lens = _random(device, 2, HEADS, SIZE), _ints(device, list(LENS))
    keys, values = cache.key_caches[0], cache.value_caches[0]
    out = vllm_kernels.cascade_attention(query, keys, values, table, lens, 1, layout="NHD")
    want, _ = reference.paged_attention(query, keys, values, table, lens, layout="NHD")
    _close(out, want, "cascade_attention")


def cache_copies(device: torch.device) -> None:
    cache, _ = _cache(device, "NHD", False)
    pages = cache.key_caches[0]
    cache.copy([[3, 7]])
    if not torch.equal(pages[7], pages[3]) or not pages[3].any():
        raise Mismatch("copy_blocks did not copy")


def pages(device: torch.device) -> None:
    cache, table = _cache(device, "NHD", False)
    keys, slots = cache.key_caches[0], torch.tensor([63, 31, 3], device=device)
    bounds = keys.new_zeros(BLOCKS, KV_HEADS, 2, SIZE)
    right = reference.page_bounds_update(bounds.cpu(), keys.cpu(), slots.cpu(), layout="NHD")
    vllm_kernels.page_bounds_update(bounds, keys, slots, layout="NHD")
    _equal(bounds, right, "page_bounds_update")
    query, lens = _random(device, 2, HEADS, SIZE), _ints(device, list(LENS))

    def keep_two(select: Callable[..., tuple[Tensor, Tensor]], *operands: Tensor) -> Tensor:
        tables, kept = select(*operands, 2 * BLOCK, block_size=BLOCK, sink_pages=0, recent_pages=1)
        return torch.cat([tables.flatten(), kept])

    got = keep_two(vllm_kernels.select_pages, query, bounds, table, lens)
    want = keep_two(reference.select_pages, query.cpu(), right, table.cpu(), lens.cpu())
    _equal(got, want, "select_pages")


def sampling(device: torch.device) -> None:
    """CPU and CUDA draw the same tokens."""
    logits, half = _random(device, 3, 1000), torch.full((3,), 0.5)
    there = half.to(device)
    got = vllm_kernels.sample(logits, temperature=there, top_p=there, uniforms=there)
    want = reference.sample(logits.cpu(), temperature=half, top_p=half, uniforms=half)
    _equal(got, want, "sample")


def manager(device: torch.device) -> None:
    """The tables and slots of two sequences that share a block."""
    blocks = KVCacheManager(8, 4)
    buffers = BatchBuffers.zeros(2, 4, 8)
    blocks.allocate(1, list(range(6)))
    cached = blocks.allocate(2, [0, 1, 2, 3, 9], num_new=0)
    blocks.step([1, 2], [1, 1], buffers, tokens=[6, 9])
    blocks.check_integrity()
    shared = buffers.block_tables[0, 0] == buffers.block_tables[1, 0]
    if cached != 4 or not shared or buffers.seq_lens.tolist() != [7, 5]:
        raise Mismatch("the tables of two sequences with a common block are wrong")


OPS: tuple[Check, ...] = (
    norms, activations, quantization, rotary, decode, prefill, eight_bit_cache, shared_prefixes,
    cache_copies, pages, sampling,
)  # fmt: skip


def _devices() -> list[torch.device]:
    gpus = range(torch.cuda.device_count() if _library.cuda_loaded else 0)
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in gpus)]


def run_selftest() -> int:
    """Prints a line for each check. Returns the exit code: 1 if one failed."""
    checks = [(check, device) for device in _devices() for check in OPS]
    checks.append((manager, torch.device("cpu")))
    failed = 0
    start = time.perf_counter()
    for check, device in checks:
        try:
            with torch.no_grad():
                check(device)
            verdict = "ok"
        except Exception as error:  # every kind is a failure of this installation
            failed += 1
            verdict = f"FAILED: {type(error).__name__}: {error}"
        print(f"{device!s:<7} {check.__name__:<16} {verdict}")
    if not _library.cuda_loaded:
        print(f"CUDA    not tested: {_library.cuda_reason}")
    print(f"{len(checks)} checks, {failed} failed, {time.perf_counter() - start:.1f} s")
    return 1 if failed else 0
