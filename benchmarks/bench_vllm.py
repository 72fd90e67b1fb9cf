"""Decode steps of vLLM on a CPU: its own attention beside ours as a plugin.

    build/vllm-venv/bin/python -m benchmarks.bench_vllm [--batch 8] [--context 2048] [--threads 1]

Needs vLLM, as `make test-vllm` installs it. The model is a Llama of four layers with random
weights: 32 query heads and 8 KV heads of size 128 as in Llama 3 8B, but a hidden size of 512, so
that attention is most of a step. Each candidate is a process of its own; they take turns. CPU time
of the thread beside wall time: neighbours on the machine lengthen the latter alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from vllm_kernels._requirements import require_vllm

LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN = 4, 32, 8, 128, 512


def write_model(folder: str, context: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=SIZE,
        max_position_embeddings=context,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def measure(folder: str, batch: int, context: int, steps: int, dtype: str) -> dict[str, Any]:
    """In this process: seconds of decode steps and of their attention, wall and CPU."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    impl = AttentionBackendEnum.CPU_ATTN.get_class().get_impl_cls()
    spent = [0.0, 0.0]
    forward = impl.forward

    def timed(*arguments: Any, **options: Any) -> Any:
        before = clock()
        result = forward(*arguments, **options)
        spent[:] = [s + b - a for s, a, b in zip(spent, before, clock())]
        return result

    impl.forward = timed
    llm = LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=batch,
        max_model_len=context + 64, disable_log_stats=True, enable_prefix_caching=False,
    )  # fmt: skip
    engine, tokens = llm.llm_engine, torch.randint(1, 1024, (batch, context)).tolist()
    params = SamplingParams(max_tokens=steps + 2, ignore_eos=True, detokenize=False)
    for number, ids in enumerate(tokens):
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    rows = []
    while engine.has_unfinished_requests():
        spent[:], before = [0.0, 0.0], clock()
        outputs = engine.step()
        wall, cpu = (b - a for a, b in zip(before, clock()))
        started = [len(output.outputs[0].token_ids) > 1 for output in outputs]
        if len(outputs) == batch and all(started):  # every request decodes
            rows.append([wall, cpu, *spent])
    return {"class": impl.__module__, "steps": rows[1:-1]}


def run(on: bool, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    environment = {
        "VLLM_KERNELS_VLLM": str(int(on)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(arguments.threads),
    }
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--folder", folder],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["class"].startswith("vllm_kernels.") == on, result["class"]
    return result


def report(name: str, steps: list[list[float]]) -> None:
    """All steps of a candidate so far."""
    columns = [[1e3 * x for x in column] for column in zip(*steps)]
    wall, cpu, attention_wall, attention_cpu = map(statistics.median, columns)
    print(
        f"{name}: step {wall:.1f} ms wall (best {min(columns[0]):.1f}), {cpu:.1f} CPU (best "
        f"{min(columns[1]):.1f}); attention {attention_wall:.1f} wall, {attention_cpu:.1f} CPU "
        f"(best {min(columns[3]):.1f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the model: measure here
    arguments = parser.parse_args()
    batch, context = arguments.batch, arguments.context
    if arguments.folder:
        result = measure(arguments.folder, batch, context, arguments.steps, arguments.dtype)
        print(json.dumps(result))
        return
    try:
        require_vllm("benchmarks.bench_vllm")
    except ImportError as error:
        print(f"skipped: {error}")
        return
    from benchmarks.harness import machine

    print(f"{machine('cpu')}; {arguments.threads} threads are measured")
    steps: dict[bool, list[list[float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, context + 64)
        for _ in range(arguments.rounds):
            for on in (False, True):
                steps[on] += run(on, arguments, folder)["steps"]
                report(f"{'ours' if on else 'vLLM'} {batch}x{context} {arguments.dtype}", steps[on])


if __name__ == "__main__":
    main()
