"""Norms, rotary embedding and activations, ours beside torch eager: time and GB/s.

    python -m benchmarks.bench_small_ops [--device cpu|cuda] [--tokens 16 256 4096] [--dtype ...]

GB/s counts what the op must read and write once; eager moves more than that for the same result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for, machine, median_seconds

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 4096, 14336, 32, 8, 128
EPS = 1e-6

Call = Callable[[int], object]
# One op: name, bytes a call moves, sets of buffers, ours, torch eager.
Row = tuple[str, int, int, Call, Call]


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

    def ours_add(i: int) -> None:
        vllm_kernels.fused_add_rms_norm(x[i], other[i], weight, EPS)

    return [
        (
            "rms_norm",
            2 * size,
            copies,
            lambda i: vllm_kernels.rms_norm(other[i], x[i], weight, EPS),
            lambda i: F.rms_norm(x[i], (HIDDEN,), weight, EPS),
        ),
        (
            "fused_add_rms_norm",
            4 * size,
            copies,
            ours_add,
            lambda i: F.rms_norm(other[i].add_(x[i]), (HIDDEN,), weight, EPS),
        ),
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

    def eager(i: int) -> None:
        for x in (query[i], key[i]):
            rope_eager(x.view(tokens, -1, HEAD_SIZE), cos, sin)

    def ours(is_neox: bool) -> Call:
        return lambda i: vllm_kernels.rotary_embedding(
            positions, query[i], key[i], HEAD_SIZE, cache, is_neox
        )

    return [
        ("rotary_embedding neox", 2 * size, copies, ours(True), eager),
        ("rotary_embedding gptj", 2 * size, copies, ours(False), eager),
    ]


def activations(tokens: int, width: int, dtype: torch.dtype, device: str) -> list[Row]:
    size = tokens * width * dtype.itemsize
    copies = copies_for(device, 3 * size)
    x = torch.randn(copies, tokens, 2 * width, device=device, dtype=dtype)
    out = torch.empty(copies, tokens, width, device=device, dtype=dtype)

    def gated(name: str, function: Callable[[Tensor], Tensor]) -> Row:
        op = getattr(vllm_kernels, name)
        return (
            f"{name} {width}",
            3 * size,
            copies,
            lambda i: op(out[i], x[i]),
            lambda i: function(x[i, :, :width]) * x[i, :, width:],
        )

    return [
        gated("silu_and_mul", F.silu),
        gated("gelu_and_mul", F.gelu),
        gated("gelu_tanh_and_mul", lambda t: F.gelu(t, approximate="tanh")),
        (
            f"gelu_new {width}",
            2 * size,
            copies,
            lambda i: vllm_kernels.gelu_new(out[i], x[i, :, :width]),
            lambda i: F.gelu(x[i, :, :width], approximate="tanh"),
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--dtype", nargs="*", default=None, help="float32, float16, bfloat16")
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    arguments = parser.parse_args()
    device = arguments.device
    on_cpu = device == "cpu"
    dtypes = arguments.dtype or (["float32", "bfloat16"] if on_cpu else ["bfloat16"])

    print(machine(device))
    print(
        f"{'tokens':>6} {'dtype':<9} {'op':<26} {'ours us':>10} {'GB/s':>7} {'eager us':>10} ratio"
    )
    for tokens in arguments.tokens or ([4096] if on_cpu else [16, 256, 4096]):
        for dtype in (getattr(torch, name) for name in dtypes):
            for make in (
                norms,
                rotary,
                lambda *a: activations(a[0], 4096 if on_cpu else WIDTH, *a[1:]),
            ):
                for name, size, copies, ours, eager in make(tokens, dtype, device):
                    ours_s = median_seconds(ours, device, copies, arguments.seconds)
                    eager_s = median_seconds(eager, device, copies, arguments.seconds)
                    print(
                        f"{tokens:>6} {str(dtype)[6:]:<9} {name:<26} {ours_s * 1e6:>10.2f} "
                        f"{size / ours_s * 1e-9:>7.1f} {eager_s * 1e6:>10.2f} "
                        f"{eager_s / ours_s:>5.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
