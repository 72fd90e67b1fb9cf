"""What choosing tokens costs a step of Engine: each kind of parameters beside greedy, and drafts.

    python -m benchmarks.bench_engine_sampling [--device cuda] [--batch 1 64 256] [--rounds 5]
    python -m benchmarks.bench_engine_sampling --drafts

A Qwen3 of 596 M random weights in bfloat16, vocabulary 151,936, contexts from 256 tokens on. The
kinds of a batch decode in turns, and a figure is the median over rounds of a step's mean wall time.
--drafts: tokens/s of greedy decoding at batch 1 with and without PromptLookup, of an 8B shape. Half
of the text stands in the prompt in runs of 4 to 16 tokens, as a summary repeats phrases.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

import torch

from benchmarks.bench_async_engine import QWEN3_596M
from benchmarks.bench_engine_h200 import LLAMA_3_8B, decode_all, make_model
from benchmarks.harness import machine
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.engine.speculative.options import PromptLookup

KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "repetition 1.1, top_p 0.95": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
    "presence 0.5, frequency 0.2": {
        "temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2,
    },
    "5 logprobs": {"logprobs": 5},
}  # fmt: skip


def seconds_per_step(engine: Engine, batch: int, steps: int, params: dict[str, object]) -> float:
    """Mean wall time of a decode step."""
    engine.reset()
    generator = torch.Generator().manual_seed(1)
    vocabulary = engine.model.config.vocab_size
    requests = []
    for seed in range(batch):
        prompt = torch.randint(vocabulary, (256,), generator=generator).tolist()
        seeds = {"seed": seed} if "temperature" in params else {}
        requests.append(
            engine.add_request(
                prompt, SamplingParams(max_tokens=steps + 90, ignore_eos=True, **params, **seeds)
            )
        )
    decode_all(engine, batch)
    for _ in range(12):
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    took = (time.perf_counter() - begin) / steps
    for request in requests:
        engine.abort(request)
    while engine.scheduler.num_unfinished:
        engine.step()
    return took


def kinds(asked: argparse.Namespace) -> None:
    model = make_model(asked.device, QWEN3_596M, "qwen3")
    for batch in asked.batch:
        engine = Engine(
            model, max_batch_size=batch, max_batch_tokens=4096, max_length=256 + asked.steps + 128
        )
        with engine:
            engine.warm_up()
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(asked.rounds + 1):
                for kind, params in KINDS.items():
                    took = seconds_per_step(engine, batch, asked.steps, params)
                    if turn:
                        times[kind].append(took)
        greedy = median(times["greedy"])
        for kind, each in times.items():
            took = median(each)
            print(
                f"batch {batch:4} {kind:28} {took * 1e3:8.3f} ms  {took / greedy:.3f}", flush=True
            )


def counting_model(device: str) -> torch.nn.Module:
    """The 8B shape whose text counts: after t comes t + 1. Its layers add next to nothing."""
    model = make_model(device, LLAMA_3_8B)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-3)
            layer.mlp.down_proj.weight.mul_(1e-3)
        embedding.normal_()
        model.get_output_embeddings().weight.copy_(embedding.roll(1, 0))
    return model


def prompt_of_runs(tokens: int) -> list[int]:
    """Half of the text that counts from 1, in shuffled runs of 4 to 16 tokens; then token 0."""
    random_numbers = random.Random(0)
    runs, first = [], 1
    while first < tokens:
        length = random_numbers.randrange(4, 17)
        runs.append(range(first, first + length))
        first += 2 * length
    random_numbers.shuffle(runs)
    return [token for run in runs for token in run] + [0]


def drafts(asked: argparse.Namespace) -> None:
    model, prompt = counting_model(asked.device), prompt_of_runs(1024)
    params = SamplingParams(max_tokens=1024, ignore_eos=True)
    texts, rates = [], []
    for options in (None, PromptLookup(5)):
        with Engine(model, max_batch_size=1, max_length=2048, speculative=options) as engine:
            engine.warm_up()
            engine.generate([prompt], SamplingParams(max_tokens=64, ignore_eos=True))
            engine.reset()
            begin = time.perf_counter()
            outputs = engine.generate([prompt], params)
            took = time.perf_counter() - begin
            texts.append(outputs[0].completions[0].tokens)
            rates.append(len(texts[-1]) / took)
            print(f"{options}: {rates[-1]:.1f} tokens/s; {engine.statistics()}", flush=True)
    same = next((i for i, (a, b) in enumerate(zip(*texts)) if a != b), len(texts[0]))
    print(f"{rates[1] / rates[0]:.2f}x, equal tokens: {same} of {len(texts[0])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", action="store_true")
    asked = parser.parse_args()
    print(machine(asked.device))
    (drafts if asked.drafts else kinds)(asked)


if __name__ == "__main__":
    main()
