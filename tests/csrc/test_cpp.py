"""Builds the C++ tests with AddressSanitizer and UBSan, and runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent
BUILD = SOURCE.parents[1] / "build" / "csrc_tests"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_cpp_under_asan_and_ubsan() -> None:
    for tool in ("cmake", "ctest", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"the C++ tests need {tool}, which is not on PATH.")

    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configured = (BUILD / "CMakeCache.txt").exists()  # with a generator that may be another one
    configure = run(
        "cmake", "-S", SOURCE, "-B", BUILD, "-DSANITIZE=address,undefined",
        *([] if configured else generator),
    )  # fmt: skip
    if "GTest" in configure.stdout and configure.returncode != 0:
        pytest.skip("the C++ tests need GoogleTest: apt-get install libgtest-dev.")
    assert configure.returncode == 0, configure.stdout

    build = run("cmake", "--build", BUILD, "--parallel", "2")
    assert build.returncode == 0, build.stdout
    tests = run("ctest", "--test-dir", BUILD, "--output-on-failure")
    assert tests.returncode == 0, tests.stdout
    assert "No tests were found" not in tests.stdout, tests.stdout
