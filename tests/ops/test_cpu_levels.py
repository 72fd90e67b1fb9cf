"""Some tests of every op again, in a process of its own at each lower instruction-set level."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from vllm_kernels import _C

LEVELS = ["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"]  # ascending
OF_ATTENTION = ["avx512_bf16"]  # whose kernels are its own
NAMES = [  # parts of the tests' names
    "ragged", "alibi", "groups", "every_byte", "strided", "nan_stays", "very_large_query",
    "cache_of_another_dtype", "saturation", "many_and_few_heads", "every_tie", "magnitudes",
    "random_cases", "read_together", "no_bit_of_out", "hard_rows", "softmax", "rejection",
]  # fmt: skip
# Only these functions are collected, of many. The last ones have such parameters.
FUNCTIONS = [f"test_*{name}*" for name in NAMES]
FUNCTIONS += ["test_options*", "test_*gather_*", "test_all_shards*"]
HERE = Path(__file__).parent


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_ops_at_a_lower_level(level):
    host = _C.cpu_level()
    if LEVELS.index(level) >= LEVELS.index(host):
        pytest.skip(f"the other tests run at {host}")
    which = "cpu and attention" if level in OF_ATTENTION else "cpu"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE),
         "-o", f"python_functions={' '.join(FUNCTIONS)}",
         "-k", f"{which} and ({' or '.join(NAMES)})"],
        env={**os.environ, "VLLM_KERNELS_ISA": level}, capture_output=True, text=True, timeout=300,
        cwd=HERE.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


def test_no_selected_test_is_in_another_function(request):
    """Sees what a run of the whole folder collects."""
    for item in request.session.items:
        if item.path.parent == HERE and "cpu" in item.name and any(n in item.name for n in NAMES):
            assert any(fnmatch(item.originalname, pattern) for pattern in FUNCTIONS), item.name
