"""Engines of two processes that share a model (gloo, and NCCL on two GPUs)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engines import greedy, prompts
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.tensor_parallel import time_limit
from vllm_kernels.errors import InvalidArgument, Unsupported
from vllm_kernels.hf.tensor_parallel import group_of_model

pytest.importorskip("accelerate", reason="transformers' tensor parallelism needs accelerate")
if not hasattr(PreTrainedModel, "_mesh_manager"):
    pytest.skip("tensor parallelism needs transformers 5.23", allow_module_level=True)

WORKER = str(Path(__file__).parent / "tensor_parallel_worker.py")
MODELS = ("llama", "qwen2", "qwen3", "mistral-window", "gemma2", "gemma3", "gpt_oss", "gpt_neox")
OPTIONS: dict[str, Any] = {
    "num_blocks": 160, "block_size": 8, "max_batch_size": 4, "max_batch_tokens": 24,
}  # fmt: skip
LIMIT = 3  # seconds that a collective may take where a rank fails
LIMITS = {"models": 100, "calls": 100}  # where none waits for one that failed, on a busy machine
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ),
]


def start(
    folder: Path, case: str, torchrun: bool = False, device: str = "cpu", size: int = 2
) -> list[subprocess.Popen[str]]:
    """Starts ``size`` ranks of the worker."""
    command = [sys.executable]
    if torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    if device == "cpu":  # transformers takes a GPU that it sees
        address["CUDA_VISIBLE_DEVICES"] = ""
    return [
        subprocess.Popen(
            [*command, WORKER, case, str(folder), device], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | address | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "VLLM_KERNELS_TP_TIMEOUT": str(LIMITS.get(case, LIMIT)), "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(1 if torchrun else size)
    ]  # fmt: skip


def results(
    folder: Path, case: str, torchrun: bool = False, device: str = "cpu", size: int = 2
) -> list[list[dict[str, Any]]]:
    """Returns what each rank of a case wrote."""
    processes = start(folder, case, torchrun, device, size)
    try:
        printed = [process.communicate(timeout=300)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.terminate()  # torchrun passes it on
        pytest.fail(_ends(process.communicate(timeout=60)[0] for process in processes))
    finally:
        for process in processes:
            process.kill()
    paths = [folder / f"{case}.{rank}" for rank in range(size)]
    ends_well = case not in LIMITS or not any(process.returncode for process in processes)
    assert paths[0].exists() and ends_well, _ends(printed)
    lines = [path.read_text().splitlines() if path.exists() else [] for path in paths]
    return [[json.loads(line) for line in of_rank] for of_rank in lines]


def _ends(printed: Iterable[str]) -> str:
    return "\n".join(text[-6000:] for text in printed)


def save(folder: Path, names: tuple[str, ...], **config: int) -> list[list[int]]:
    """Saves models and prompts for the worker. Returns the prompts."""
    texts = prompts((5, 19, 33, 8, 70))
    for name in names:
        biases = {"attention_bias": True, "mlp_bias": True} if name == "llama" else {}
        model = tiny_model(name, **biases, **config)
        for parameter, tensor in model.named_parameters():
            if parameter.endswith("bias"):  # 0 in a new model
                torch.nn.init.normal_(tensor, std=0.2)
        model.save_pretrained(folder / name)
    (folder / "models.json").write_text(json.dumps(names))
    (folder / "prompts.json").write_text(json.dumps(texts))
    return texts


def alone(
    folder: Path, name: str, texts: list[list[int]], device: str = "cpu"
) -> list[list[list[int]]]:
    """The tokens of one process, greedy and sampled."""
    model = AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager")
    with Engine(model.eval().to(device), **OPTIONS) as engine:
        sampled = greedy(engine, texts, max_tokens=12, temperature=0.9, seed=3)
        return [greedy(engine, texts, max_tokens=12), sampled]


def by_name(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return {line.pop("name"): line for line in lines}


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_two_ranks(tmp_path: Path, device: str) -> None:
    texts = save(tmp_path, MODELS)
    expected = {name: alone(tmp_path, name, texts, device) for name in MODELS}
    ranks = results(tmp_path, "models", True, device)
    assert ranks[0] == ranks[1]  # also what a seed of None draws
    assert {line["model"] for line in ranks[0]} == set(MODELS)
    for line in ranks[0]:
        assert line["tokens"] == expected[line["model"]], line["model"]
        assert line["blocks"] == 160  # rank 1 has room for 161


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
        ),
    ],
)
def test_tokens_of_four_ranks(tmp_path: Path, device: str) -> None:
    texts = save(tmp_path, ("llama", "qwen3"), num_key_value_heads=4)
    ranks = results(tmp_path, "models", True, device, size=4)
    assert all(rank == ranks[0] for rank in ranks)
    assert {line["model"] for line in ranks[0]} == {"llama", "qwen3"}
    for line in ranks[0]:
        assert line["tokens"] == alone(tmp_path, line["model"], texts, device), line["model"]


@pytest.mark.parametrize("device", DEVICES)
def test_calls_of_two_ranks(tmp_path: Path, device: str) -> None:
    texts = save(tmp_path, ("llama",))
    tiny_model(num_key_value_heads=1).save_pretrained(tmp_path / "one-kv-head")
    expected, _ = alone(tmp_path, "llama", texts, device)
    ranks = [by_name(lines) for lines in results(tmp_path, "calls", device=device)]
    for rank in ranks:
        assert rank["cache"]["tokens"] == expected[0]
        assert rank["heads"]["error"] == (
            "Unsupported: Engine: num_key_value_heads: expected a multiple of 2 (from tp_size), "
            "got 1"
        )
        assert rank["compile"]["error"] == (
            "Unsupported: Engine: compile: expected False with tensor parallelism, got 'eager'"
        )
        assert rank["drafts"]["error"] == (
            "Unsupported: Engine: speculative: expected PromptLookup or None with tensor "
            "parallelism, got DraftModel"
        )
        assert rank["functions"]["error"] == (
            "Unsupported: Engine: logits_processor: expected None with tensor parallelism, got a "
            "function"
        )
        assert rank["drafted"]["tokens"] == expected
    assert ranks[0]["follow on rank 0"]["error"] == (
        "InvalidArgument: Engine: follow: expected another rank than 0, got 0"
    )
    assert ranks[0]["refused"]["error"] == (
        "InvalidArgument: Engine: prompt: expected fewer than 1024 tokens (max_length), got 2000"
    )
    assert ranks[0]["served"]["tokens"] == expected
    for name in ("other options", "other drafts"):
        assert ranks[0][name]["error"] is None
        assert ranks[1][name]["error"] == (
            "Error: Engine: scheduler: expected the state of rank 0's, got another one: give equal "
            "options and tokenizers on all ranks"
        )
    assert ranks[0]["limit"]["seconds"] > LIMITS["calls"]  # as before
    same = "make the same calls on every rank, or call follow() on all but rank 0"
    assert ranks[0]["other calls"]["error"] is None
    assert ranks[1]["other calls"]["error"] == (
        f"Error: Engine: calls: expected rank 0's close, got warm_up: {same}"
    )
    differ = f"Engine: calls: expected rank 0's add, got add with other arguments: {same}"
    assert ranks[0]["other prompts"]["error"] == f"Error: Engine: rank 1 failed: {differ}"
    assert ranks[1]["other prompts"]["error"] == f"Error: {differ}"


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_raises(tmp_path: Path, device: str) -> None:
    save(tmp_path, ("llama",))
    ranks = [by_name(lines) for lines in results(tmp_path, "raises", device=device)]
    failure = "Error: Engine: rank 1 failed: KeyError: 'poison'"
    assert ranks[0]["generate"]["error"] == failure
    assert ranks[1]["generate"]["error"] == "KeyError: 'poison'"
    assert ranks[0]["generate"]["seconds"] < LIMIT + 15
    for rank in ranks:
        assert rank["step"]["error"] == failure
        assert rank["unfinished"]["number"] == 0


def test_a_constructor_that_fails_on_one_rank(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    ranks = [by_name(lines)["constructor"] for lines in results(tmp_path, "constructor")]
    refused = (
        "Engine: k_scale: expected 1.0 (only 8-bit caches have one scale, this one is "
        "torch.float32), "
        "got 2.0"
    )
    assert ranks[0]["error"] == f"Error: Engine: rank 1 failed: {refused}"
    assert ranks[1]["error"] == f"InvalidArgument: {refused}"
    assert ranks[0]["seconds"] < LIMIT + 30  # it loads the model, too


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_is_killed(tmp_path: Path, device: str) -> None:
    save(tmp_path, ("llama",))
    left, killed = (by_name(lines) for lines in results(tmp_path, "killed", device=device))
    assert not killed
    lost = "Error: Engine: rank 0 lost another one, which ended or did not answer within 3 s: "
    assert left["generate"]["error"].startswith(lost)
    assert left["generate"]["seconds"] < LIMIT + 15


def test_other_parallelism_is_refused() -> None:
    config = SimpleNamespace(distributed_config=SimpleNamespace(tp_size=2, pp_size=2))
    model: Any = SimpleNamespace(_mesh_manager=object(), config=config)
    with pytest.raises(Unsupported) as raised:
        group_of_model(model)
    assert str(raised.value) == (
        "PagedCache: distributed_config: expected tensor parallelism alone, got pp_size=2"
    )


def test_models_that_an_older_transformers_divided() -> None:
    with pytest.raises(
        Unsupported, match=r"^PagedCache: tensor parallelism: expected trans.* 5.23,"
    ):
        group_of_model(cast("Any", SimpleNamespace(_tp_size=2)))


def test_follow_needs_ranks() -> None:
    with Engine(tiny_model(), num_blocks=16) as engine, pytest.raises(InvalidArgument) as raised:
        engine.follow()
    assert str(raised.value) == (
        "Engine: follow: expected a tensor-parallel model, got a whole one"
    )


@pytest.mark.parametrize("seconds", ["0", "fast"])
def test_bad_time_limits(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("VLLM_KERNELS_TP_TIMEOUT", seconds)
    with pytest.raises(InvalidArgument) as raised:
        time_limit()
    assert str(raised.value) == (
        f"VLLM_KERNELS_TP_TIMEOUT={seconds}: expected a number of seconds from 1"
    )
