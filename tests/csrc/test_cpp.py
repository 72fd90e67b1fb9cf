"""Builds the C++ tests under sanitizers, and runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent
BUILD = SOURCE.parents[1] / "build"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def build_and_run(sanitizers: str, build: Path) -> None:
    for tool in ("cmake", "ctest", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"the C++ tests need {tool}, which is not on PATH.")

    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configured = (build / "CMakeCache.txt").exists()  # with a generator that may be another one
    configure = run(
        "cmake", "-S", SOURCE, "-B", build, f"-DSANITIZE={sanitizers}",
        *([] if configured else generator),
    )  # fmt: skip
    if "GTest" in configure.stdout and configure.returncode != 0:
        pytest.skip("the C++ tests need GoogleTest: apt-get install libgtest-dev.")
    assert configure.returncode == 0, configure.stdout

    built = run("cmake", "--build", build, "--parallel", "2")
    assert built.returncode == 0, built.stdout
    tests = run("ctest", "--test-dir", build, "--output-on-failure")
    assert tests.returncode == 0, tests.stdout
    assert "No tests were found" not in tests.stdout, tests.stdout


def test_cpp_under_asan_and_ubsan() -> None:
    build_and_run("address,undefined", BUILD / "csrc_tests")


def test_threads_under_tsan(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the C++ tests need g++, which is not on PATH.")
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    linked = run("g++", "-fsanitize=thread", tmp_path / "empty.cpp", "-o", tmp_path / "empty")
    if linked.returncode != 0:
        pytest.skip("g++ cannot link -fsanitize=thread: install its libtsan.")
    if run(tmp_path / "empty").returncode != 0:  # it wants memory where the kernel maps others
        pytest.skip("ThreadSanitizer does not run here: try sysctl vm.mmap_rnd_bits=28.")
    build_and_run("thread", BUILD / "csrc_tests_tsan")
