"""AsyncEngine beside Engine: throughput of the same requests, by coroutines and by generate.

    python -m benchmarks.bench_async_engine [--device cuda] [--streams 64] [--tokens 96]
                                            [--intervals 0 0.05] [--rounds 20] [--threads 1]
                                            [--out async.json]

A CPU serves the toy model with its tokenizer, a GPU a Qwen3 of 596 M random weights in bfloat16
without one. One engine runs all arms in turns, in an order that alternates: generate, and streams
with each ``delivery_interval``. Every arm must give the same tokens. Ratios are those of a round,
and their median is printed: to wall time, and to the process's CPU time, which neighbours on shared
cores disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import vllm_kernels
from benchmarks.bench_engine_h200 import make_model
from benchmarks.harness import machine
from vllm_kernels.engine.async_engine import AsyncEngine
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams

QWEN3_596M = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Run(NamedTuple):
    """Seconds of one arm, and the tokens of its requests."""

    wall: float
    cpu: float
    tokens: list[list[int]]


def load(device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    if device == "cpu":
        folder = Path(vllm_kernels.__file__).parent / "toy_model"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(folder)
    return make_model(device, QWEN3_596M, "qwen3"), None


async def stream(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [output.token async for output in engine.stream(prompt, params)]


async def measure(
    engine: AsyncEngine, interval: float | None, prompts: list[list[int]], params: SamplingParams
) -> Run:
    """One arm. ``interval`` None: Engine.generate in this thread, while the worker sleeps."""
    engine.engine.reset()
    wall, cpu = time.perf_counter(), time.process_time()
    if interval is None:
        outputs = engine.engine.generate(prompts, params)
        tokens = [output.completions[0].tokens for output in outputs]
    else:
        engine._worker._interval = interval
        tokens = await asyncio.gather(*(stream(engine, prompt, params) for prompt in prompts))
    return Run(time.perf_counter() - wall, time.process_time() - cpu, tokens)


async def compare(arguments: argparse.Namespace) -> dict[str, object]:
    model, tokenizer = load(arguments.device)
    generator = torch.Generator().manual_seed(0)
    shape = arguments.streams, arguments.prompt
    prompts = torch.randint(2, model.config.vocab_size, shape, generator=generator).tolist()
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    arms = [None, *arguments.intervals]
    runs: dict[float | None, list[Run]] = {arm: [] for arm in arms}
    engine = Engine(
        model,
        tokenizer,
        max_batch_size=arguments.streams,
        max_length=arguments.prompt + arguments.tokens,
    )
    async with AsyncEngine(engine) as served:
        engine.warm_up()
        for arm in arms:
            await measure(served, arm, prompts, params)
        for turn in range(arguments.rounds):
            for arm in arms[:: 1 - 2 * (turn % 2)]:
                runs[arm].append(await measure(served, arm, prompts, params))
    expected = runs[None][0].tokens
    assert all(run.tokens == expected for arm in arms for run in runs[arm])
    return summary(runs, arguments.streams * arguments.tokens)


def summary(runs: dict[float | None, list[Run]], num_tokens: int) -> dict[str, object]:
    """Medians of each arm, by its name."""

    def ratio(arm: float | None, of: Callable[[Run], float]) -> float:
        return round(median(of(a) / of(b) for a, b in zip(runs[None], runs[arm])), 3)

    return {
        "generate" if arm is None else f"streams, {arm:g} s": {
            "tokens/s": round(num_tokens / median(run.wall for run in ones)),
            "CPU us/token": round(1e6 * median(run.cpu for run in ones) / num_tokens, 1),
            "of generate, wall": ratio(arm, lambda run: run.wall),
            "of generate, CPU": ratio(arm, lambda run: run.cpu),
        }
        for arm, ones in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.0, 0.05])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
    print(machine(arguments.device))
    results = asyncio.run(compare(arguments))
    for name, values in results.items():
        print(f"{name:18}", values)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
