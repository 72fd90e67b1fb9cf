"""vLLM itself on our kernels: small random models give the tokens of vLLM's own attention.

Needs vLLM, which `make test-vllm` installs in an environment of its own. Every test counts the
calls of our methods, because a silent fallback to vLLM's kernels gives the right tokens, too.
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
LAYERS, TOKENS = 2, 24
CHUNKED = {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 6}
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
TEXTS = [text(100 + i, 200) for i in range(12)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models, and a wide llama, whose 16-bit errors are those of many sums."""
    root = tmp_path_factory.mktemp("models")
    import torch

    for name in MODELS:
        torch.manual_seed(0)
        tiny_model(name).save_pretrained(root / name)
    wide = {"hidden_size": 256, "num_hidden_layers": 4, "initializer_range": 0.06}
    tiny_model("llama", **wide).save_pretrained(root / "wide")
    return {name: str(root / name) for name in (*MODELS, "wide")}


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
    job = {name: generate(folders[name]) for name in MODELS}
    job["prefix"] = generate(folders["llama"], FAMILY)
    job["f32"], job["f32 by token"] = score(folders["wide"]), score(folders["wide"], TEXTS[:2])
    return run_job(job | scores(folders["wide"]), False, **ONE_THREAD)


@pytest.fixture(scope="session")
def ours(folders: dict[str, str]) -> dict[str, Any]:
    job = {name: generate(folders[name]) for name in MODELS}
    job |= {f"{name}, chunked": generate(folders[name], **CHUNKED) for name in MODELS}
    job["prefix"] = generate(folders["llama"], FAMILY, block_size=16, max_num_seqs=1)
    job["small ops"] = generate(folders["llama"], **SMALL_OPS)
    return run_job(job | scores(folders["wide"]), True, **ONE_THREAD)


def distances(result: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    """Of the log-probabilities, token by token."""
    both = zip(chain(*result["logprobs"]), chain(*expected["logprobs"]))
    return [abs(a - b) for a, b in both]


def check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Ours were called, vLLM's own was vLLM's own, and the tokens are equal."""
    for one in (result, expected):
        assert "error" not in one, one["error"]
    assert expected["calls"] == {}
    called = result["calls"]
    assert called["forward"] >= LAYERS * TOKENS
    assert called["do_kv_cache_update"] == called["forward"]
    assert result["tokens"] == expected["tokens"]
    assert max(distances(result, expected)) < 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_vllm(own, ours, model):
    check(ours[model], own[model])


@pytest.mark.parametrize("model", MODELS)
def test_chunked_prompts_and_small_pages(own, ours, model):
    check(ours[f"{model}, chunked"], own[model])
    assert ours[f"{model}, chunked"]["calls"]["forward"] > ours[model]["calls"]["forward"]


def test_prefix_caching(own, ours):
    check(ours["prefix"], own["prefix"])
    assert ours["prefix"]["cached"] == [0, 64, 64, 64, 64]


def test_small_ops(own, ours):
    check(ours["small ops"], own["llama"])
    called, layers = ours["small ops"]["calls"], ours["small ops"]["calls"]["forward"]
    for name in ("silu_and_mul", "rotary_embedding"):
        assert called[name] >= layers, name
    assert called["rms_norm"] + called["fused_add_rms_norm"] >= 2 * layers
    assert "rms_norm" not in ours["llama"]["calls"]  # ir_op_priority chooses it


def error(results: dict[str, Any], name: str, exact: dict[str, Any]) -> float:
    """The mean distance of log-probabilities to vLLM's own in float32."""
    assert "error" not in results[name], results[name].get("error")
    return statistics.fmean(distances(results[name], exact))


@pytest.mark.parametrize("name", ["bf16", "bf16 by token", "fp8"])
def test_errors_of_low_precision(own, ours, name):
    exact = own["f32 by token" if "token" in name else "f32"]
    theirs, mine = error(own, name, exact), error(ours, name, exact)
    print(f"{name}: mean |logprob - float32's|: vLLM {theirs:.5f}, ours {mine:.5f}")
    assert ours[name]["calls"]["forward"] > 0 and own[name]["calls"] == {}
    assert mine <= 1.1 * theirs


def test_tensor_parallel(own, folders):
    job = {"llama": generate(folders["llama"], tensor_parallel_size=2)}
    result = run_job(job, True, **TWO_WORKERS)["llama"]
    check(result, own["llama"])
    assert result["calls"]["forward"] >= 2 * LAYERS * TOKENS  # two workers, as often
    assert result["calls"]["forward"] % (2 * LAYERS) == 0


def test_pipeline_parallel(own, folders):
    """Compiled: without, vLLM fails on a CPU with its own attention, too."""
    engine = {"pipeline_parallel_size": 2, "enforce_eager": False}
    job = {"llama": generate(folders["llama"], **engine)}
    check(run_job(job, True, **TWO_WORKERS)["llama"], own["llama"])
