"""Some tests of every op again, in a process of its own at each lower instruction-set level."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kernels import _C

LEVELS = ["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"]  # ascending
OF_ATTENTION = ["avx512_bf16"]  # whose kernels are its own
SELECTION = (
    "cpu and (ragged or alibi or groups or every_byte or strided or nan_stays or very_large_query "
    "or cache_of_another_dtype or saturation or many_and_few_heads or every_tie or magnitudes "
    "or random_cases or read_together or no_bit_of_out or hard_rows or softmax or rejection)"
)


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_ops_at_a_lower_level(level):
    host = _C.cpu_level()
    if LEVELS.index(level) >= LEVELS.index(host):
        pytest.skip(f"the other tests run at {host}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent),
         "-k", f"attention and {SELECTION}" if level in OF_ATTENTION else SELECTION],
        env={**os.environ, "VLLM_KERNELS_ISA": level}, capture_output=True, text=True, timeout=300,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
