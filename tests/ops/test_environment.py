"""Environment variables: a value that is not known is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CALL = """
import torch, vllm_kernels
x = torch.randn(4, 64)
try:
    vllm_kernels.rms_norm(torch.empty_like(x), x, torch.ones(64), 1e-6)
    print("fine")
except RuntimeError as error:
    print(error)
"""
LEVELS = "baseline, avx2, avx512, avx512_bf16 or avx512_amx"


@pytest.mark.parametrize(
    ("name", "value", "printed"),
    [
        ("VLLM_KERNELS_CHECK", "foo", "VLLM_KERNELS_CHECK=foo: expected 0 or 1"),
        ("VLLM_KERNELS_CHECK", "true", "VLLM_KERNELS_CHECK=true: expected 0 or 1"),
        ("VLLM_KERNELS_LOG", "yes", "VLLM_KERNELS_LOG=yes: expected 0 or 1"),
        ("VLLM_KERNELS_ISA", "avx3", f"VLLM_KERNELS_ISA=avx3: expected {LEVELS}"),
        ("VLLM_KERNELS_CHECK", "1", "fine"),
        ("VLLM_KERNELS_LOG", "0", "fine"),
        ("VLLM_KERNELS_ISA", "", "fine"),
        ("VLLM_KERNELS_ISA", "baseline", "fine"),
    ],
)
def test_unknown_values(name, value, printed):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALL],
        capture_output=True, text=True, timeout=120, env={**os.environ, name: value},
    )  # fmt: skip
    assert done.stdout.strip() == printed, done.stderr[-2000:]


FORK = """
import os, torch, vllm_kernels
torch.set_num_threads(2)
x = torch.randn(4096, 1024)
call = lambda: vllm_kernels.rms_norm(torch.empty_like(x), x, torch.ones(1024), 1e-6)
call()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    call()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_with_one_thread():
    """What docs/threads.md advises. Without it the child waits for threads that it lacks."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "7", done.stderr[-2000:]
