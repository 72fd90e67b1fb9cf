"""The lending benchmark in its tiny form, over two processes: every mode gives the same tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.lending import BORROWER, Schedule, Sequence, blocks_for, make_trace

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
    with subprocess.Popen(
        [*command, "--json", str(out)], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as run:  # fmt: skip
        try:
            printed, _ = run.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # the ranks, too
    assert run.returncode == 0, printed[-4000:]
    rows = {row["mode"]: row for row in json.loads(out.read_text())["rows"]}
    assert all(row["equal_tokens"] == row["tokens"] > 0 for row in rows.values())
    lent = {mode: row["lent_blocks"] for mode, row in rows.items()}
    assert lent.pop("lend") > 1 and not any(lent.values())
    preempted = {mode: row["preemptions"] for mode, row in rows.items()}
    assert preempted["recompute"] == preempted["swap"] > 0
    assert preempted["room"] == preempted["lend"] == 0


def run(mode: str, share: float) -> tuple[Schedule, list[Sequence], list[bool]]:
    """Runs a trace without a model. Returns whether each step had a loan."""
    trace = make_trace(200, 24, 5, 64)
    first = list(trace[BORROWER])
    schedule = Schedule(mode, trace, blocks_for(first, share), budget=64)
    loans = []
    while not all(schedule.is_done(instance) for instance in range(2)):
        plans, loan = schedule.step()
        loans.append(loan is not None)
        schedule.advance(plans)
    schedule.check_end()
    return schedule, first, loans


def test_the_long_sequence_borrows_and_is_never_stopped() -> None:
    schedule, sequences, loans = run("lend", 0.1)
    begin = loans.index(True)
    assert begin > 0 and schedule.lent > 1 and schedule.preemptions == 0
    longest = max(sequences, key=lambda sequence: sequence.prompt)
    assert longest.steps == list(range(longest.steps[0], longest.steps[-1] + 1))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_stops_the_sequence_that_came_last(mode: str) -> None:
    schedule, sequences, loans = run(mode, 0.1)
    assert schedule.preemptions > 0 and not any(loans)
    gaps = [max(b - a for a, b in zip(one.steps, one.steps[1:])) for one in sequences]
    assert gaps[0] == 1 and max(gaps) == gaps[-1] > 1


def test_with_room_nothing_is_lent() -> None:
    schedule, _, loans = run("room", 1)
    assert not schedule.lent and not schedule.preemptions and not any(loans)
