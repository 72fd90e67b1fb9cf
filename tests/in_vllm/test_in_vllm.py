"""vLLM itself on our kernels: small random models give the tokens of vLLM's own attention.

Needs vLLM, which `make test-vllm` installs in an environment of its own. Every test counts the
calls of our methods, because a silent fallback to vLLM's kernels gives the right tokens, too. There
must be a call for each layer and step. The number of steps is known. With tensor parallelism it may
be a little larger, because the engine's process gets the prompts one by one.
"""

from __future__ import annotations

import random
import statistics
from itertools import chain
from typing import Any

import pytest

from vllm_kernels._requirements import require_vllm

try:
    require_vllm("tests/in_vllm")
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

from tiny_models import VOCABULARY, tiny_model  # it needs transformers, which vLLM brings

from vllm_kernels.integrations.vllm.run_job import Job, run_job

MODELS = {
    "llama": "",
    "qwen3": "norms of query and key",
    "mistral-window": "a window of 8 tokens",
    "gemma2": "softcap and a window",
    "gpt_oss": "sinks and a window",
    "bloom": "ALiBi",
}
LAYERS, WIDE_LAYERS, TOKENS = 2, 4, 24
CHUNK = 48
CHUNKED = {"block_size": 16, "max_num_batched_tokens": CHUNK, "max_num_seqs": 6}
"""Prompts in chunks; pages that vLLM's own CPU kernels do not have."""
SMALL_OPS = {
    "kernel_config": {
        "ir_op_priority": {name: ["vllm_kernels"] for name in ("rms_norm", "fused_add_rms_norm")}
    }
}
BY_TOKEN = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
"""Scores prompts as decode steps do it: one token at a time."""
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=length)


PROMPTS = [text(i, 5 + 17 * i) for i in range(6)]
FAMILY = [PROMPTS[5][:64] + tail for tail in PROMPTS[:5]]
"""Prompts with a common beginning of four pages."""
ONE_BY_ONE = {"block_size": 16, "max_num_seqs": 1}
UNSERVED = {"head_dim": 512}
"""A head size that vLLM has on a CPU, and we have not."""
TEXTS = [text(100 + i, 200) for i in range(12)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models, and a wide llama, whose 16-bit errors are those of many sums."""
    root = tmp_path_factory.mktemp("models")
    import torch

    for name in MODELS:
        torch.manual_seed(0)
        # vLLM's experts on a CPU need a multiple of 32 for each worker.
        tiny_model(name, intermediate_size=128).save_pretrained(root / name)
    wide = {"hidden_size": 256, "num_hidden_layers": WIDE_LAYERS, "initializer_range": 0.06}
    tiny_model("llama", **wide).save_pretrained(root / "wide")
    tiny_model("llama", **UNSERVED).save_pretrained(root / "unserved")
    return {name: str(root / name) for name in (*MODELS, "wide", "unserved")}


def generate(folder: str, prompts: list[list[int]] = PROMPTS, **engine: Any) -> dict[str, Any]:
    return {"model": folder, "prompts": prompts, "max_tokens": TOKENS, "engine": engine}


def score(folder: str, texts: list[list[int]] = TEXTS, **engine: Any) -> dict[str, Any]:
    return {"model": folder, "prompts": texts, "max_tokens": 0, "engine": engine}


def scores(folder: str) -> Job:
    """The wide llama's: in 16 bits, with an 8-bit cache, and token by token."""
    half = {"dtype": "bfloat16"}
    return {
        "bf16": score(folder, **half),
        "bf16 by token": score(folder, TEXTS[:2], **half, **BY_TOKEN),
        "fp8": score(folder, **half, kv_cache_dtype="fp8"),
    }


@pytest.fixture(scope="session")
def own(folders: dict[str, str]) -> dict[str, Any]:
    """vLLM's own results."""
    job = {name: generate(folders[name]) for name in (*MODELS, "unserved")}
    job |= {f"{name}, prefix": generate(folders[name], FAMILY) for name in MODELS}
    job["f32"], job["f32 by token"] = score(folders["wide"]), score(folders["wide"], TEXTS[:2])
    return run_job(job | scores(folders["wide"]), False, **ONE_THREAD)


@pytest.fixture(scope="session")
def ours(folders: dict[str, str]) -> dict[str, Any]:
    job = {name: generate(folders[name]) for name in (*MODELS, "unserved")}
    job |= {f"{name}, chunked": generate(folders[name], **CHUNKED) for name in MODELS}
    job |= {f"{name}, prefix": generate(folders[name], FAMILY, **ONE_BY_ONE) for name in MODELS}
    job["small ops"] = generate(folders["llama"], **SMALL_OPS)
    return run_job(job | scores(folders["wide"]), True, **ONE_THREAD)


def distances(result: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    """Of the log-probabilities, token by token."""
    both = zip(chain(*result["logprobs"]), chain(*expected["logprobs"]))
    return [abs(a - b) for a, b in both]


def check_equal(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """vLLM's own was vLLM's own, and the tokens are equal."""
    for one in (result, expected):
        assert "error" not in one, one["error"]
    assert expected["calls"] == {}
    assert result["tokens"] == expected["tokens"]
    assert max(distances(result, expected)) < 1e-3


def check(result: dict[str, Any], expected: dict[str, Any], steps: int = TOKENS) -> None:
    """Tokens are equal, and ours were called once for each layer and step."""
    check_equal(result, expected)
    for method in ("forward", "do_kv_cache_update"):
        assert result["calls"][method] == LAYERS * steps, method


def chunked_steps() -> int:
    """vLLM's steps for PROMPTS in chunks: older requests come first, a decode step takes 1."""
    lefts, made = [len(prompt) for prompt in PROMPTS], [0] * len(PROMPTS)
    steps = 0
    while min(made) < TOKENS:
        room = CHUNK
        for i, left in enumerate(lefts):
            if made[i] == TOKENS or not room:
                continue
            taken = min(left or 1, room)
            room -= taken
            lefts[i] = max(left - taken, 0)
            made[i] += not lefts[i]
        steps += 1
    return steps


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_vllm(own, ours, model):
    check(ours[model], own[model])


@pytest.mark.parametrize("model", MODELS)
def test_chunked_prompts_and_small_pages(own, ours, model):
    assert chunked_steps() > TOKENS
    check(ours[f"{model}, chunked"], own[model], chunked_steps())


@pytest.mark.parametrize("model", MODELS)
def test_prefix_caching(own, ours, model):
    result = ours[f"{model}, prefix"]
    check(result, own[f"{model}, prefix"], len(FAMILY) * TOKENS)
    assert result["cached"] == [0, 64, 64, 64, 64]


def test_unserved_layers_are_vllms(own, ours):
    check_equal(ours["unserved"], own["unserved"])
    assert not {"forward", "do_kv_cache_update"} & ours["unserved"]["calls"].keys()


def test_small_ops(own, ours):
    check(ours["small ops"], own["llama"])
    called = ours["small ops"]["calls"]
    for name in ("silu_and_mul", "rotary_embedding"):
        assert called[name] == LAYERS * TOKENS, name
    assert called["rms_norm"] == TOKENS  # before the first layer; all others add first
    assert called["fused_add_rms_norm"] == 2 * LAYERS * TOKENS
    assert "rms_norm" not in ours["llama"]["calls"]  # ir_op_priority chooses it


def error(results: dict[str, Any], name: str, exact: dict[str, Any]) -> float:
    """The mean distance of log-probabilities to vLLM's own in float32."""
    assert "error" not in results[name], results[name].get("error")
    return statistics.fmean(distances(results[name], exact))


@pytest.mark.parametrize("name, steps", [("bf16", 1), ("bf16 by token", 400), ("fp8", 1)])
def test_errors_of_low_precision(own, ours, name, steps):
    exact = own["f32 by token" if "token" in name else "f32"]
    theirs, mine = error(own, name, exact), error(ours, name, exact)
    print(f"{name}: mean |logprob - float32's|: vLLM {theirs:.5f}, ours {mine:.5f}")
    assert ours[name]["calls"]["forward"] == WIDE_LAYERS * steps and own[name]["calls"] == {}
    assert mine <= 1.1 * theirs


def two_workers(folder: str, **engine: Any) -> dict[str, Any]:
    """In a process of its own, so that one engine's workers do not outlive it."""
    return run_job({"run": generate(folder, **engine)}, True, **TWO_WORKERS)["run"]


@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt_oss"])
def test_tensor_parallel(own, folders, model):
    """Each worker calls ours for all layers. A prompt may begin a step after the one before."""
    result = two_workers(folders[model], tensor_parallel_size=2)
    check_equal(result, own[model])
    steps = result["calls"]["forward"] // (2 * LAYERS)
    assert TOKENS <= steps < TOKENS + len(PROMPTS)
    check(result, own[model], 2 * steps)


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_pipeline_parallel(own, folders, model):
    """Each worker has half of the layers. One by one: two batches at a time take more steps.

    Compiled: without, vLLM fails on a CPU with its own attention, too.
    """
    engine = {"pipeline_parallel_size": 2, "enforce_eager": False}
    result = two_workers(folders[model], **engine, **ONE_BY_ONE)
    check(result, own[model], len(PROMPTS) * TOKENS)
