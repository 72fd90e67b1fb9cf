"""ContextParallel over gloo with 2 and 4 processes, one of which dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

WORKER = str(Path(__file__).parent / "context_parallel_worker.py")
SECONDS = 60  # the group's time limit


def test_ranks_give_the_result_of_one_rank(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(tmp_path)], env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [(tmp_path / str(rank)).read_text().splitlines() for rank in range(4)]
    expected = [
        f"{size} {exchange} {case}"
        for size in (2, 4)
        for exchange in ("all_to_all", "gather")
        for case in ("1 torch.float32", "2 torch.float32", "6 torch.float32", "2 torch.bfloat16")
    ]
    assert all(of_rank[:16] == expected for of_rank in lines), "\n".join(printed)[-4000:]
    for of_rank in lines[:3]:
        raised, by_gloo, seconds = of_rank[-1].split()
        assert (raised, by_gloo) == ("raised", "True")
        assert float(seconds) < SECONDS
    assert lines[3][16:] == ["4 all_to_all 2 torch.float32"] * 3
