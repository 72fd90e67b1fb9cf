"""Calls with changed arguments, in processes of their own: malformed_calls.py says what passes.

VLLM_KERNELS_FUZZ=600: that many seconds of calls, in place of SECONDS.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import malformed_calls
import pytest
import torch
from guarded_memory import GuardedMemory
from malformed_calls import Attack, FaultError
from valid_calls import VALID_CALLS

import vllm_kernels

SECONDS = 15.0
HELPERS = ("scanned_devices", "raise_bad_index", "start_explaining", "take_explanation")
RMS_NORM = next(n for n in range(10**4) if malformed_calls.make(n).op == "rms_norm")


def test_every_registered_op_has_a_valid_call():
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("vllm_kernels::")]  # fmt: skip
    assert set(names) - set(HELPERS) == set(VALID_CALLS) == set(vllm_kernels.OPS)


@pytest.mark.parametrize("op", sorted(VALID_CALLS))
def test_valid_calls_are_valid(op):
    """Were they refused, what is changed in them would not be reached."""
    for seed in range(5):
        random.seed(seed)
        getattr(torch.ops.vllm_kernels, op)(**VALID_CALLS[op](op))


def test_malformed_calls():
    report = malformed_calls.run(float(os.environ.get("VLLM_KERNELS_FUZZ", SECONDS)))
    print(report)
    assert not report.faults, str(report)
    assert report.calls > 100


@pytest.fixture
def plain_call(monkeypatch: pytest.MonkeyPatch) -> Attack:
    """A valid rms_norm in place of every call."""
    torch.manual_seed(0)
    call = {
        "out": torch.empty(2, 8), "input": torch.randn(2, 8), "weight": torch.ones(8),
        "epsilon": 1e-6,
    }  # fmt: skip
    attack = Attack("rms_norm", False, call, [], True)
    monkeypatch.setattr(malformed_calls, "make", lambda number: attack)
    return attack


def beside(x: torch.Tensor) -> torch.Tensor:
    """The bytes around a tensor in its slot."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (lambda call, run: beside(call["out"]).view(-1)[4000].fill_(3), "outside of the written"),
        (lambda call, run: call["input"].fill_(3.0), "outside of the written"),
        (lambda call, run: call["out"].fill_(3.0), "is not the reference's"),
        (lambda call, run: run(call) or call["out"].add_(random.random()), "elements differ"),
        (lambda call, run: exec("raise RuntimeError('no')"), "without the op's name"),
        (lambda call, run: call["out"].fill_(3.0) + exec("raise RuntimeError('rms_norm: x')"),
         "memory changed before the error"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_seen(monkeypatch, plain_call, does, says):
    memory, run = GuardedMemory(), Attack.run
    malformed_calls.check(0, memory)
    monkeypatch.setattr(Attack, "run", lambda self, call: does(call, partial_run(self, run)) and [])
    with pytest.raises(FaultError, match=says):
        malformed_calls.check(0, memory)


def partial_run(attack, run):
    return lambda call: run(attack, call)


READS_PAST = """
import ctypes, torch
from guarded_memory import GuardedMemory
x = GuardedMemory().place(torch.zeros(4096, dtype=torch.uint8))
ctypes.string_at(x.data_ptr() + {offset}, 1)
print("read")
"""


@pytest.mark.parametrize("offset", [-4096, 8 * 4096])
def test_a_read_past_a_slot_is_a_fault(offset):
    """Wherever in the slot the tensor is."""
    paths = [str(Path(__file__).parent)]
    code = READS_PAST.format(offset=offset)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode != 0 and "read" not in done.stdout
