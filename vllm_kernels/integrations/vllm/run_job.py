"""Runs vLLM in a process of its own: reads a job from stdin, prints a line with the result.

    python -m vllm_kernels.integrations.vllm.run_job < job.json

Job: {name: {"model": folder, "prompts": [[token, ..], ..], "max_tokens": number, "engine":
arguments of vllm.LLM}}. Result: {name: {"tokens": [[..], ..], "logprobs": [[..], ..], "cached":
[tokens found in the prefix cache, ..], "calls": {method of ours: number}}}, or {name: {"error":
text}}. A run of 0 tokens scores the prompts: the log-probability of each token but the first.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from typing import Any

Job = dict[str, dict[str, Any]]
RESULT = "vllm_kernels result: "
"""How the line begins: vLLM's workers print, too."""


def run_job(job: Job, on: bool, **environment: str) -> dict[str, Any]:
    """Starts the process, in which our kernels are asked for or not, and returns its result.

    Raises:
        RuntimeError: the process failed. The message ends with what it printed.
    """
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
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            results = json.loads(line.removeprefix(RESULT))
            for result in results.values():
                if "error" in result:  # the cause may be in what vLLM's other processes printed
                    result["error"] += done.stdout.split(RESULT)[0] + done.stderr
            return results
    printed = (done.stdout + done.stderr)[-4000:]
    raise RuntimeError(f"vLLM ended with {done.returncode}: {printed}")


def worker_calls(worker: Any) -> dict[str, int]:
    """How often vLLM called our methods in this worker."""
    module = sys.modules.get("vllm_kernels.integrations.vllm")
    return dict(module.calls) if module else {}


def all_calls(llm: Any) -> Counter[str]:
    return sum((Counter(one) for one in llm.collective_rpc(worker_calls)), Counter[str]())


def run(
    model: str, prompts: list[list[int]], max_tokens: int, engine: dict[str, Any]
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    settings = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    if os.environ["VLLM_KERNELS_VLLM"] == "1" and not current_platform.is_cpu():
        settings["attention_backend"] = "CUSTOM"
    settings |= {"skip_tokenizer_init": True, "disable_log_stats": True}
    llm = LLM(model, **settings | engine)
    before = all_calls(llm)
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens or 1, detokenize=False, ignore_eos=True, logprobs=0,
        prompt_logprobs=None if max_tokens else 0,
    )  # fmt: skip
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    tokens, logprobs = [], []
    for ids, output in zip(prompts, outputs):
        if max_tokens:
            ids, steps = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        else:
            ids, steps = ids[1:], output.prompt_logprobs[1:]
        tokens.append(ids)
        logprobs.append([step[token].logprob for token, step in zip(ids, steps)])
    cached = [output.num_cached_tokens for output in outputs]
    called = all_calls(llm) - before
    return {"tokens": tokens, "logprobs": logprobs, "cached": cached, "calls": called}


def main() -> None:
    job: Job = json.load(sys.stdin)
    from vllm.distributed import cleanup_dist_env_and_memory

    results: dict[str, Any] = {}
    for name, settings in job.items():
        try:
            results[name] = run(**settings)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        gc.collect()
        cleanup_dist_env_and_memory()
    print(f"\n{RESULT}{json.dumps(results)}", flush=True)


if __name__ == "__main__":
    main()
