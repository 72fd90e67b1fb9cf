"""KVCacheManager: what its calls cost through Python, and what its memory is worth.

Times are of one core (`taskset -c 0 python -m benchmarks.bench_kv_cache`): the median of many
calls, and the tenth percentile beside it, because others may use the machine. The trace is that of
shared/peers/cpu/kv_trace.py, which drives vLLM's manager too; kv_trace_adapter.py is ours for it.
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import machine
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager, Tokens

BLOCK_SIZE = 16
PROMPT = 1024
VOCABULARY = 128_000
NUM_BEAMS = 6
NUM_SAMPLES = 6


def microseconds(calls: list[Callable[[], object]]) -> str:
    """Median (tenth percentile) of calls that are each made once."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return f"{times[len(times) // 2]:.1f} ({times[len(times) // 10]:.1f})"


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def time_steps(table: Table, num_sequences: int) -> None:
    """One token for each sequence: append and build as two calls, and step as one."""
    rng = random.Random(0)
    ids = list(range(num_sequences))
    array = np.arange(num_sequences)
    columns = (PROMPT + 1024) // BLOCK_SIZE
    for name in ("step", "step of shard 0 of 2", "append_batch", "build"):
        shards = 2 if "shard" in name else 1
        manager = KVCacheManager(num_sequences * columns, BLOCK_SIZE, shards=shards, shard=0)
        buffers = BatchBuffers.zeros(num_sequences, columns, 8192)
        for i in ids:
            manager.allocate(i, random_tokens(rng, PROMPT))
        manager.build(array, 1, buffers)
        tokens = [np.array(random_tokens(rng, num_sequences)) for _ in range(400)]
        if name.startswith("step"):
            calls = [partial(manager.step, array, 1, buffers, tokens=t) for t in tokens]
        elif name == "append_batch":
            calls = [partial(manager.append_batch, array, 1, tokens=t) for t in tokens]
        else:
            calls = [partial(manager.build, array, 1, buffers)] * len(tokens)
        table.add_row(f"{name}, {num_sequences} sequences, a token each", microseconds(calls))


def time_admissions(table: Table) -> None:
    """A prompt of 1024 tokens, none or all but the last block of it cached, and its end."""
    rng = random.Random(0)
    prompts = [random_tokens(rng, PROMPT) for _ in range(400)]
    kinds: dict[str, Callable[[list[int]], Tokens]] = {
        "list": lambda prompt: prompt,
        "int32 array": lambda prompt: np.array(prompt, dtype=np.int32),
        "int64 array": lambda prompt: np.array(prompt, dtype=np.int64),
        "int64 tensor": torch.tensor,
    }
    for kind, convert in kinds.items():
        manager = KVCacheManager(2 * len(prompts) * PROMPT // BLOCK_SIZE, BLOCK_SIZE)
        given = [convert(prompt) for prompt in prompts]
        for name, first in (("new", 0), ("cached", 1000)):
            admit = [partial(manager.allocate, first + i, p) for i, p in enumerate(given)]
            table.add_row(f"allocate, {PROMPT} {name} tokens, {kind}", microseconds(admit))
    free = [partial(manager.free, i) for i in range(len(prompts))]
    table.add_row(f"free, {PROMPT} tokens", microseconds(free))


def time_ledger(table: Table) -> None:
    """Calls of the ledger in C++: probes/ledger.cpp, compiled here."""
    root = Path(__file__).parents[1]
    sources = [root / "benchmarks/probes/ledger.cpp", *(root / "csrc/kv_cache").rglob("*.cpp")]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "ledger")
        compiler = ["g++", "-std=c++20", "-O2", "-I", root / "csrc"]
        subprocess.run([*compiler, *sources, "-o", program], check=True)
        done = subprocess.run([program], check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        name, median, tenth = line.split("\t")
        table.add_row(name, f"{median} ({tenth})")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure_memory(table: Table, num_blocks: int = 1_000_000) -> None:
    """Of a manager alone, empty and with every block hashed."""
    gc.collect()
    before = resident_bytes()
    manager = KVCacheManager(num_blocks, BLOCK_SIZE)
    table.add_row(f"{num_blocks:,} blocks, empty", f"{(resident_bytes() - before) / 1e6:.0f} MB")
    rng = np.random.default_rng(0)
    per_sequence = 1000
    for i in range(num_blocks // per_sequence):
        manager.allocate(i, rng.integers(0, VOCABULARY, per_sequence * BLOCK_SIZE, np.int32))
        manager.free(i)
    assert manager.statistics().cached_blocks == num_blocks
    gc.collect()
    table.add_row(
        f"{num_blocks:,} blocks, every one hashed", f"{(resident_bytes() - before) / 1e6:.0f} MB"
    )


def trace_waste(num_sequences: int = 256, steps: int = 2000) -> tuple[float, float]:
    """(waste, hit rate) of the trace: half the prompts share 512 tokens, outputs of 64 to 511
    tokens, a finished sequence is replaced at once. Waste: slots of used blocks without a token."""
    rng = random.Random(0)
    columns = (PROMPT + 512) // BLOCK_SIZE + 1
    manager = KVCacheManager(int(num_sequences * columns * 1.1), BLOCK_SIZE)
    shared = random_tokens(rng, PROMPT // 2)
    left = [rng.randrange(1, 512) for _ in range(num_sequences)]
    next_prompt = 0

    def admit(i: int) -> None:
        nonlocal next_prompt
        head = shared if next_prompt % 2 else []
        next_prompt += 1
        manager.allocate(i, head + random_tokens(rng, PROMPT - len(head)))

    for i in range(num_sequences):
        admit(i)
    waste = []
    for step in range(steps):
        for i in range(num_sequences):
            if left[i] == 0:
                manager.free(i)
                admit(i)
                left[i] = rng.randrange(64, 512)
        manager.append_batch(range(num_sequences), 1, tokens=random_tokens(rng, num_sequences))
        left = [count - 1 for count in left]
        if step >= steps // 4:  # steady
            now = manager.statistics()
            waste.append(now.waste_slots / (now.used_blocks * BLOCK_SIZE))
    return sum(waste) / len(waste), manager.statistics().hit_rate


def parallel_sampling(prompt: int, output: int) -> tuple[int, int]:
    """(blocks used, blocks without sharing) of 6 samples of one prompt when all are complete."""
    manager = KVCacheManager(4096, BLOCK_SIZE)
    rng = random.Random(0)
    manager.allocate(0, random_tokens(rng, prompt))
    for i in range(1, NUM_SAMPLES):
        manager.fork(0, i)
    for _ in range(output):
        manager.append_batch(range(NUM_SAMPLES), 1, tokens=random_tokens(rng, NUM_SAMPLES))
    now = manager.statistics()
    return now.used_blocks, now.table_entries


def beam_search(prompt: str, num_new: int) -> tuple[float, float, int]:
    """(mean blocks used, mean blocks without sharing, copies) of the demo's model and a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList

    from vllm_kernels.integrations.transformers import PagedCache, use_paged_attention

    folder = Path(__file__).parents[1] / "vllm_kernels" / "toy_model"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    use_paged_attention(model)
    inputs = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    used, unshared = [], []
    with PagedCache(model, 1024, BLOCK_SIZE) as cache:

        def watch(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            now = cache.statistics()
            used.append(now.used_blocks)
            unshared.append(now.table_entries)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        model.generate(
            **inputs,
            past_key_values=cache,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            num_beams=NUM_BEAMS,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
        copies = cache.statistics().num_copies
    return sum(used) / len(used), sum(unshared) / len(unshared), copies


def report_sharing(console: Console) -> None:
    waste, hit_rate = trace_waste()
    console.print(
        f"trace of 256 sequences, block size {BLOCK_SIZE}, steady state: waste {waste:.2%} of used "
        f"slots, {hit_rate:.1%} of prompt tokens cached"
    )
    table = Table("case", "blocks", "unshared", "saved", "copies")
    for output in (64, 128, 256):
        used, unshared = parallel_sampling(512, output)
        name = f"{NUM_SAMPLES} samples of a 512-token prompt, {output} tokens each, at the end"
        table.add_row(name, str(used), str(unshared), f"{1 - used / unshared:.0%}", "")
    from vllm_kernels.demo import PROMPTS

    for prompt in PROMPTS:
        for num_new in (64, 192):
            mean, without, copies = beam_search(prompt, num_new)
            name = f"{NUM_BEAMS} beams, {prompt!r}, {num_new} tokens, mean of all steps"
            saved = f"{1 - mean / without:.0%}"
            table.add_row(name, f"{mean:.1f}", f"{without:.1f}", saved, str(copies))
    console.print(table)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    torch.set_num_threads(1)
    console = Console(width=130)
    console.print(machine("cpu"))
    memory = Table("manager", "resident memory")
    measure_memory(memory)
    console.print(memory)
    times = Table("call, through Python", "us: median (tenth percentile)")
    for num_sequences in (64, 256, 1024):
        time_steps(times, num_sequences)
    time_admissions(times)
    console.print(times)
    loans = Table("call of the ledger in C++, 8 instances", "ns: median (tenth percentile)")
    time_ledger(loans)
    console.print(loans)
    report_sharing(console)


if __name__ == "__main__":
    main()
