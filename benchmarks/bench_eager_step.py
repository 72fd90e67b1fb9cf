"""A decode step of an eager model: compat's flash_attn_with_kvcache beside FlashAttention-3's.

    . .peers/env.sh; python3 -m benchmarks.bench_eager_step [--batch 8] [--context 1024]

28 layers of the shape of Qwen3-0.6B, bfloat16, without CUDA graphs, so that the host's time counts.
Both loops are the same but for one function. It appends a token's K and V to pages of 16 tokens and
attends. FlashAttention-3 comes from the peers kit, by what its own Python function does; where its
build cannot append, reshape_and_cache_flash writes first, as in vLLM.

ms of a step, the median of rounds in turns; each round waits for the GPU once, at its end. The
second column has torch.set_default_device in force, as some engines do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import vllm_kernels as vk
from benchmarks.harness import machine
from vllm_kernels.compat import flash_attn_interface

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, SIZE, PAGE = 28, 1024, 3072, 16, 8, 128, 16
STEPS, ROUNDS = 20, 9

# (q, k_cache, v_cache, k, v) to the result, tokens [batch, 1, heads, SIZE].
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / shape[-1] ** 0.5


class Model:
    def __init__(self, batch: int, context: int) -> None:
        pages = context // PAGE + 1
        self.table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        self.lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        last = self.table[:, context // PAGE].long()
        self.slots = last * PAGE + context % PAGE
        self.positions = self.lens.long()
        angles = torch.outer(torch.arange(context + 1), 1e6 ** (-torch.arange(0, 1, 2 / SIZE)))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).bfloat16().cuda()
        self.norm, self.head_norm = (
            torch.ones(n, dtype=torch.bfloat16).cuda() for n in (HIDDEN, SIZE)
        )
        widths = (HEADS + 2 * KV_HEADS) * SIZE, HIDDEN
        self.layers = [
            {
                "qkv": random(*widths), "out": random(HIDDEN, HEADS * SIZE),
                "gate_up": random(2 * MLP, HIDDEN), "down": random(HIDDEN, MLP),
                "keys": random(batch * pages, PAGE, KV_HEADS, SIZE),
                "values": random(batch * pages, PAGE, KV_HEADS, SIZE),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.tokens = random(batch, HIDDEN)

    def step(self, attend: Attend, layers: int = LAYERS) -> Tensor:
        x, batch = self.tokens, len(self.tokens)
        for layer in self.layers[:layers]:
            y = F.linear(F.rms_norm(x, (HIDDEN,), self.norm), layer["qkv"]).view(batch, -1, SIZE)
            q, k, v = y.split((HEADS, KV_HEADS, KV_HEADS), 1)
            q, k = (F.rms_norm(heads, (SIZE,), self.head_norm) for heads in (q, k))
            vk.rotary_embedding(
                self.positions, q.flatten(1), k.flatten(1), SIZE, self.cos_sin, True
            )
            y = attend(q[:, None], layer["keys"], layer["values"], k[:, None], v[:, None])
            x = x + F.linear(y.reshape(batch, -1), layer["out"])
            gate, up = F.linear(F.rms_norm(x, (HIDDEN,), self.norm), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return x


def of_compat(model: Model) -> Attend:
    def attend(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_interface.flash_attn_with_kvcache(
            q, keys, values, k, v, cache_seqlens=model.lens, page_table=model.table, causal=True
        )

    return attend


def of_fa3(model: Model, appends: bool) -> Attend:
    fwd = torch.ops._vllm_fa3_C.fwd
    lens_with_new = model.lens + 1
    one = torch.ones((), device="cuda")

    def attend(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert keys.stride(-1) == 1 and values.stride(-1) == 1
        lens, new = model.lens, (k, v)
        if not appends:
            vk.reshape_and_cache_flash(
                k[:, 0], v[:, 0], keys, values, model.slots, "auto", one, one
            )
            lens, new = lens_with_new, (None, None)
        scale = q.shape[-1] ** -0.5
        return fwd(
            q, keys, values, *new, *[None] * 6, lens, None, None, model.table, *[None] * 8, scale,
            True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    return attend


def step_ms(model: Model, attend: Attend) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        model.step(attend)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    import peers

    peers.lib("fa3.so")
    model = Model(args.batch, args.context)
    ways = {"compat": of_compat(model), "FlashAttention-3": of_fa3(model, True)}
    want = model.step(ways["compat"], 1)
    try:
        model.step(ways["FlashAttention-3"], 1)
    except RuntimeError as error:
        print("FlashAttention-3 does not append:", str(error).splitlines()[0])
        ways["FlashAttention-3"] = of_fa3(model, False)
    error = (model.step(ways["FlashAttention-3"], 1) - want).norm() / want.norm()
    print(f"{machine('cuda')}; batch {args.batch}, context {args.context}")
    print(f"the results of a layer differ by {error:.1e}")
    columns: dict[str, list[float]] = {name: [] for name in ways}
    for device in (None, "cuda"):
        torch.set_default_device(device)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, attend in ways.items():
                times[name].append(step_ms(model, attend))
        for name in ways:
            columns[name].append(statistics.median(times[name]))
    print("| attention | ms | default device, ms |\n|---|---|---|")
    for name, (plain, moded) in columns.items():
        print(f"| {name} | {plain:.2f} | {moded:.2f} |")


if __name__ == "__main__":
    main()
