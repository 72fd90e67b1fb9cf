"""Runs vLLM in a process of its own: reads a job from stdin, prints its result as the last line.

    python -m vllm_kernels.integrations.vllm.run_job < job.json

Job: {"model": folder, "prompts": [[token, ..], ..], "on": whether our kernels are asked for,
"runs": {name: {"engine": arguments of vllm.LLM, "max_tokens": number}}}. Result: {name: {"tokens":
[[..], ..], "logprobs": [[..], ..], "calls": {method of ours: number}}}. A run of 0 tokens scores
the prompts: the log-probability of each token but the first.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

Prompts = list[list[int]]


def run_job(
    model: str, prompts: Prompts, on: bool, runs: dict[str, Any], **environment: str
) -> dict[str, Any]:
    """Starts the process and returns its result.

    Raises:
        RuntimeError: vLLM failed. The message ends with what it printed.
    """
    job = {"model": model, "prompts": prompts, "on": on, "runs": runs}
    settings = {
        "VLLM_KERNELS_VLLM": str(int(on)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc is given a function
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(job), capture_output=True, text=True,
        env={**os.environ, **settings, **environment},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {(done.stdout + done.stderr)[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def worker_calls(worker: Any) -> dict[str, int]:
    """How often vLLM called our methods in this worker."""
    module = sys.modules.get("vllm_kernels.integrations.vllm")
    return dict(module.calls) if module else {}


def all_calls(llm: Any) -> Counter[str]:
    return sum((Counter(one) for one in llm.collective_rpc(worker_calls)), Counter[str]())


def run(job: dict[str, Any], engine: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    settings = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    if job["on"] and not current_platform.is_cpu():
        settings["attention_backend"] = "CUSTOM"
    settings |= {"skip_tokenizer_init": True, "disable_log_stats": True}
    llm = LLM(job["model"], **settings | engine)
    before = all_calls(llm)
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens or 1, detokenize=False, ignore_eos=True, logprobs=0,
        prompt_logprobs=None if max_tokens else 0,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    tokens, logprobs = [], []
    for ids, output in zip(job["prompts"], llm.generate(prompts, params, use_tqdm=False)):
        if max_tokens:
            ids, steps = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        else:
            ids, steps = ids[1:], output.prompt_logprobs[1:]
        tokens.append(ids)
        logprobs.append([step[token].logprob for token, step in zip(ids, steps)])
    return {"tokens": tokens, "logprobs": logprobs, "calls": all_calls(llm) - before}


def main() -> None:
    job = json.load(sys.stdin)
    from vllm.distributed import cleanup_dist_env_and_memory

    results = {}
    for name, settings in job["runs"].items():
        results[name] = run(job, settings["engine"], settings["max_tokens"])
        gc.collect()
        cleanup_dist_env_and_memory()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
