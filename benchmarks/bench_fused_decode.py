"""fused_decode_attention beside the ops it stands for, on one packed QKV product.

    python -m benchmarks.bench_fused_decode [--device cpu|cuda] [--batch 1 16 64]
                                            [--context 1024 8192] [--layout vllm NHD]

The heads of Llama-3-8B, bfloat16, pages of 16 tokens, permuted. `fused` is fused_decode_attention,
`apart` rope_and_cache and then paged_attention. On a GPU a CUDA graph of calls over rotated
buffers each; the two are timed in turn. GB/s: of the K and V that are read, for both alike.
`differs`: largest difference of a head of the two results, relative to its norm.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import vllm_kernels as vk
from benchmarks.harness import machine, median_seconds
from benchmarks.layer import LLAMA_3_8B, Layer

GOAL = 0.92  # fused / apart at batch 1, context 1024
ROUNDS = 5


def calls(layer: Layer, layout: str) -> dict[str, Callable[[int], object]]:
    caches = layer.caches[layout]
    workspace = vk.paged_attention_workspace(layer.device) if layer.device == "cuda" else None
    options = {"scale": layer.scale, "layout": layout, "workspace": workspace}

    def fused(i: int) -> None:
        vk.fused_decode_attention(
            layer.qkv[i], layer.positions, layer.cos_sin, *caches[i], layer.slots,
            layer.block_tables, layer.seq_lens, out=layer.attended[i], **options,
        )  # fmt: skip

    def apart(i: int) -> None:
        query, key, value = layer.packed[i]
        vk.rope_and_cache(
            layer.positions, query, key, value, layer.cos_sin, True, *caches[i], layer.slots,
            layout,
        )  # fmt: skip
        vk.paged_attention(
            query, *caches[i], layer.block_tables, layer.seq_lens, out=layer.attended[i], **options
        )

    return {"fused": fused, "apart": apart}


def result(layer: Layer, call: Callable[[int], object]) -> Tensor:
    layer.restore()
    call(0)
    return layer.attended[0].clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="*")
    parser.add_argument("--context", type=int, nargs="*")
    parser.add_argument("--layout", nargs="*", default=["vllm", "NHD"])
    arguments = parser.parse_args()
    device = arguments.device
    on_gpu = device == "cuda"
    shape = LLAMA_3_8B
    torch.manual_seed(0)
    print(machine(device))
    print(f"{shape}, bfloat16")
    print("batch context layout  fused us  apart us  ratio  GB/s fused  GB/s apart  differs")
    for batch in arguments.batch or ([1, 16, 64] if on_gpu else [1, 8]):
        for context in arguments.context or ([1024, 8192] if on_gpu else [1024]):
            layer = Layer(shape, batch, context, device)
            read = 4 * batch * context * shape.kv_heads * shape.head_size  # bytes
            for layout in arguments.layout:
                both = calls(layer, layout)
                ours, theirs = (result(layer, call).float() for call in both.values())
                differs = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()
                samples: dict[str, list[float]] = {name: [] for name in both}
                for _ in range(ROUNDS):
                    for name, call in both.items():
                        samples[name].append(median_seconds(call, device, layer.copies, 0.1))
                fused, apart = (statistics.median(times) for times in samples.values())
                goal = f"  (goal: {GOAL})" if (batch, context) == (1, 1024) else ""
                print(
                    f"{batch:>5} {context:>7} {layout:<6} {fused * 1e6:>9.2f} {apart * 1e6:>9.2f} "
                    f"{fused / apart:>6.3f} {read / fused * 1e-9:>11.0f} "
                    f"{read / apart * 1e-9:>11.0f}  {differs:.1e}{goal}",
                    flush=True,
                )
            del layer, both


if __name__ == "__main__":
    main()
