"""The lending benchmark in its tiny form, over two processes: every mode gives the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    ),
]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("device", DEVICES)
def test_smoke(tmp_path: Path, device: str) -> None:
    out = tmp_path / "lending.json"
    command = [sys.executable, "-m", "benchmarks.bench_lending", "--smoke", "--device", device]
    run = subprocess.run(
        [*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    rows = {row["mode"]: row for row in json.loads(out.read_text())["rows"]}
    assert all(row["equal_tokens"] == row["tokens"] > 0 for row in rows.values())
    lent = {mode: row["lent_blocks"] for mode, row in rows.items()}
    assert lent.pop("lend") > 1 and not any(lent.values())
    preempted = {mode: row["preemptions"] for mode, row in rows.items()}
    assert preempted["recompute"] == preempted["swap"] > 0
    assert preempted["room"] == preempted["lend"] == 0
