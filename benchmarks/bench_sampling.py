"""Sampling, ours beside torch and FlashInfer, where it is installed: time, and GB/s of one read of
the logits. Random normal logits, cold L2.

    python -m benchmarks.bench_sampling [--device cpu|cuda] [--rows 1 64 128] [--vocab 131072]
                                        [--dtype float32 bfloat16] [--only ...]

torch is a sort, a cumulated softmax and a draw, as vLLM's native sampler.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import vllm_kernels
from benchmarks.harness import copies_for, machine, medians

Call = Callable[[int], object]
TOP_K, TOP_P = 50, 0.9

try:
    import flashinfer
except ImportError:
    flashinfer = None


def torch_sample(logits: Tensor, top_k: int, top_p: float, uniforms: Tensor) -> Tensor:
    values, order = logits.float().sort(descending=True)
    if top_k:
        values[:, top_k:] = -torch.inf
    probabilities = values.softmax(-1)
    upto = probabilities.cumsum(-1)
    probabilities[upto - probabilities >= top_p] = 0
    upto = probabilities.cumsum(-1)
    place = torch.searchsorted(upto, uniforms[:, None] * upto[:, -1:], right=True)
    return order.gather(1, place.clamp_max(logits.shape[1] - 1))


def flashinfer_calls(kind: str, logits: Tensor, full: dict[str, Tensor]) -> Call | None:
    sampling = flashinfer.sampling
    if logits.dtype != torch.float32:
        return None
    if kind == "top_k + top_p":
        return lambda i: sampling.top_k_top_p_sampling_from_logits(
            logits[i], full["top_k"], full["top_p"], deterministic=True
        )
    if kind == "temperature":
        return lambda i: sampling.sampling_from_logits(logits[i], deterministic=True)
    if kind == "softmax":
        return lambda i: sampling.softmax(logits[i])
    return None


def calls_of(rows: int, vocab: int, dtype: torch.dtype, device: str) -> dict[str, dict[str, Call]]:
    copies = copies_for(device, rows * vocab * dtype.itemsize)
    logits = torch.randn(copies, rows, vocab, device=device).to(dtype)
    full = {
        "temperature": torch.ones(rows, device=device),
        "uniforms": torch.rand(rows, device=device),
        "top_k": torch.full((rows,), TOP_K, dtype=torch.int32, device=device),
        "top_p": torch.full((rows,), TOP_P, device=device),
    }
    words = -(-vocab // 32)
    entries = 512  # tokens of a request
    penalties = {
        "token_counts": (
            torch.arange(0, (rows + 1) * entries, entries, dtype=torch.int32, device=device),
            torch.cat([torch.randperm(vocab)[:entries] for _ in range(rows)]).int().to(device),
            torch.ones(rows * entries, dtype=torch.int32, device=device),
        ),
        "repetition": torch.full((rows,), 1.1, device=device),
        "frequency": torch.full((rows,), 0.1, device=device),
        "bitmask": torch.full((rows, words), -2, dtype=torch.int32, device=device),
    }
    drawn = {name: full[name] for name in ("temperature", "uniforms")}
    tempered = drawn | {"temperature": 0.8 * full["temperature"]}
    requests: dict[str, tuple[dict, int, float]] = {
        "greedy": ({}, 1, 1.0),
        "temperature": (drawn, 0, 1.0),
        "top_k": (drawn | {"top_k": full["top_k"]}, TOP_K, 1.0),
        "top_p": (drawn | {"top_p": full["top_p"]}, 0, TOP_P),
        "top_k + top_p": (full, TOP_K, TOP_P),
        "top_k + top_p, T 0.8": (full | tempered, TOP_K, TOP_P),
        "top_k + top_p, penalties, bitmask": (full | penalties, TOP_K, TOP_P),
    }
    out = torch.empty(rows, dtype=torch.int64, device=device)
    table: dict[str, dict[str, Call]] = {}
    for kind, (request, top_k, top_p) in requests.items():
        table[kind] = {
            "ours": lambda i, request=request: vllm_kernels.sample(logits[i], **request, out=out)
        }
        if kind == "greedy":
            table[kind]["torch"] = lambda i: logits[i].argmax(-1)
        elif "penalties" not in kind and "T 0.8" not in kind:
            table[kind]["torch"] = lambda i, k=top_k, p=top_p: torch_sample(
                logits[i], k, p, full["uniforms"]
            )
    table["top_k + top_p, 5 logprobs"] = {
        "ours": lambda i: vllm_kernels.sample(logits[i], **full, num_logprobs=5, out=out)
    }
    tokens = torch.randint(vocab, (rows,), device=device)
    table["token_logprobs, 5"] = {
        "ours": lambda i: vllm_kernels.token_logprobs(logits[i], tokens, 5),
        "torch": lambda i: logits[i].log_softmax(-1, dtype=torch.float32).topk(5),
    }
    table["softmax"] = {
        "ours": lambda i: vllm_kernels.softmax(logits[i]),
        "torch": lambda i: logits[i].softmax(-1, dtype=torch.float32),
    }
    if flashinfer is not None and device == "cuda":
        for kind, calls in table.items():
            call = flashinfer_calls(kind, logits, full)
            if call is not None:
                calls["flashinfer"] = call
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    here = "cuda" if torch.cuda.is_available() and vllm_kernels.cuda_loaded else "cpu"
    parser.add_argument("--device", default=here)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 64, 128] if here == "cuda" else [8]
    )
    parser.add_argument("--vocab", type=int, default=131_072 if here == "cuda" else 151_936)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="*", help="kinds that contain one of these")
    parser.add_argument("--seconds", type=float, default=0.3)
    asked = parser.parse_args()
    print(machine(asked.device))
    for name in asked.dtype:
        for rows in asked.rows:
            dtype = getattr(torch, name)
            size = rows * asked.vocab * dtype.itemsize
            copies = copies_for(asked.device, size)
            for kind, calls in calls_of(rows, asked.vocab, dtype, asked.device).items():
                if asked.only and not any(part in kind for part in asked.only):
                    continue
                times = medians(calls, asked.device, copies, asked.seconds)
                columns = "  ".join(f"{who} {1e6 * time:9.1f} us" for who, time in times.items())
                rate = size / times["ours"] / 1e9
                print(f"{name:9} {rows:4} x {asked.vocab}  {kind:34} {columns}  {rate:7.1f} GB/s",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
