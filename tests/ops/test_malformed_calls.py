"""Calls with changed arguments, in processes of their own: malformed_calls.py says what passes.

VLLM_KERNELS_FUZZ=600: that many seconds, in place of SECONDS. More than CALLS calls are a job for
malformed_calls.py: a faster machine must not try calls that nobody has seen.
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

SECONDS, CALLS = 8.0, 30_000
# It takes raw addresses, which cannot be checked.
NOT_ATTACKED = {"swap_blocks_batch"}
HELPERS = ("scanned_devices", "raise_bad_index", "start_explaining", "take_explanation")


def test_every_registered_op_has_a_valid_call():
    names = [name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("vllm_kernels::")]  # fmt: skip
    assert not NOT_ATTACKED & set(VALID_CALLS)
    assert set(names) - set(HELPERS) == NOT_ATTACKED | set(VALID_CALLS) == set(vllm_kernels.OPS)


@pytest.mark.parametrize("op", sorted(VALID_CALLS))
def test_valid_calls_are_valid(op):
    """Were they refused, what is changed in them would not be reached."""
    for seed in range(5):
        random.seed(seed)
        getattr(torch.ops.vllm_kernels, op)(**VALID_CALLS[op](op))


def test_malformed_calls(record_property):
    report = malformed_calls.run(float(os.environ.get("VLLM_KERNELS_FUZZ", SECONDS)), CALLS)
    record_property("calls", report.calls)
    assert not report.faults, str(report)
    assert report.calls > 100


def plain_call(number: int) -> Attack:
    """A valid rms_norm, whatever the number."""
    torch.manual_seed(0)
    tensors = {"out": torch.zeros(2, 8), "input": torch.randn(2, 8), "weight": torch.ones(8)}
    return Attack("rms_norm", False, {**tensors, "epsilon": 1e-6}, [], True)


def beside(x: torch.Tensor) -> torch.Tensor:
    """The bytes around a tensor in its slot."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def writes_outside(call, run):
    beside(call["out"])[4000] = 3


def writes_an_input(call, run):
    call["input"].fill_(3.0)


def is_wrong(call, run):
    call["out"].fill_(3.0)


def is_random(call, run):
    run(call)
    call["out"].add_(random.random())


def has_no_name(call, run):
    raise RuntimeError("input: expected float32")


def writes_and_raises(call, run):
    call["out"].fill_(3.0)
    raise RuntimeError("rms_norm: input: expected float32")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (writes_outside, "outside of the written tensors"),
        (writes_an_input, "outside of the written tensors"),
        (is_wrong, "is not the reference's"),
        (is_random, "elements differ"),
        (has_no_name, "without the op's name"),
        (writes_and_raises, "memory changed before the error"),
    ],
)
def test_what_is_wrong_is_seen(monkeypatch, does, says):
    monkeypatch.setattr(malformed_calls, "make", plain_call)
    memory, run = GuardedMemory(), Attack.run
    malformed_calls.check(0, memory)

    def broken(attack, call):
        does(call, lambda call: run(attack, call))
        return []

    monkeypatch.setattr(Attack, "run", broken)
    with pytest.raises(FaultError, match=says):
        malformed_calls.check(0, memory)


READS_PAST = """
import ctypes, torch
from guarded_memory import SIZE, GuardedMemory
x = GuardedMemory().place(torch.zeros(SIZE, dtype=torch.uint8))
print("placed", flush=True)
ctypes.string_at(x.data_ptr() + ({offset}), 1)
print("read")
"""


@pytest.mark.parametrize("offset", ["-1", "SIZE"])
def test_a_read_past_a_slot_is_a_fault(offset):
    done = subprocess.run(
        [sys.executable, "-c", READS_PAST.format(offset=offset)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.returncode != 0 and done.stdout == "placed\n"
