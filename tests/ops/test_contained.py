"""On the GPU bad indices are contained: no fault, the other rows right; check mode names them.

One process an op and mode, so that a fault in one cannot spoil the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contained_cases import CASES

HERE = Path(__file__).parent


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("check", ["0", "1"], ids=["checks off", "checks on"])
@pytest.mark.parametrize("op", CASES)
def test_bad_indices(op, check):
    done = subprocess.run(
        [sys.executable, str(HERE / "contained_cases.py"), op],
        env={**os.environ, "VLLM_KERNELS_CHECK": check, "PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "contained" in done.stdout, done.stderr[-2000:]
