"""The rooms that need no torch and no CUDA compile for 64-bit Arm, without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"


def test_cpu_kernels_and_kv_cache_compile(tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs {COMPILER}: apt-get install g++-aarch64-linux-gnu.")
    kernels, manager = (sorted(ROOT.glob(f"csrc/{room}/**/*.cpp")) for room in ("cpu", "kv_cache"))
    assert len(kernels) > 10 and len(manager) > 5
    # The manager has no intrinsics, which code generation may still refuse.
    for output, sources in (("-c", kernels), ("-fsyntax-only", manager)):
        done = subprocess.run(
            [COMPILER, "-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror", output,
             "-DVLLM_KERNELS_CPU_LEVEL=baseline", "-I", ROOT / "csrc", *sources],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
