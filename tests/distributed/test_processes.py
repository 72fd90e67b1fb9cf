"""ContextParallel over processes: gloo with 2 and 4, one of which dies, and NCCL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = str(Path(__file__).parent / "context_parallel_worker.py")
SECONDS = 60  # the group's time limit
CASES = ("1 torch.float32", "2 torch.float32", "6 torch.float32", "2 torch.bfloat16")


def results(folder: Path, device: str, size: int) -> list[list[str]]:
    """Returns the lines that each of ``size`` ranks wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(folder), device],
            env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    paths = [folder / str(rank) for rank in range(size)]
    assert all(path.exists() for path in paths), "\n".join(printed)[-4000:]
    lines = [path.read_text().splitlines() for path in paths]
    sizes = (2, 4)[: size // 2]
    expected = [
        f"{group} {exchange} {case}"
        for group in sizes
        for exchange in ("all_to_all", "gather")
        for case in CASES
    ]
    assert all(of_rank[: len(expected)] == expected for of_rank in lines), "\n".join(printed)[
        -4000:
    ]
    return [of_rank[len(expected) :] for of_rank in lines]


def test_ranks_give_the_result_of_one_rank(tmp_path: Path) -> None:
    *left, killed = results(tmp_path, "cpu", 4)
    for of_rank in left:
        raised, by_gloo, seconds = of_rank[-1].split()
        assert (raised, by_gloo) == ("raised", "True")
        assert float(seconds) < SECONDS
    assert killed == ["4 all_to_all 2 torch.float32"] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_cuda(tmp_path: Path, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    for of_rank in results(tmp_path, "cuda", size):
        assert of_rank == ["graph all_to_all", "graph gather"]
