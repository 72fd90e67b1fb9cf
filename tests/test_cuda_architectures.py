"""Which GPU architectures a build gets, and the line where a GPU is none of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kernels import _C, _library, info

ROOT = Path(__file__).parent.parent
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PRINT = """
include({})
message(STATUS "list=${{architectures}} cmake=${{CUDA_ARCHITECTURES}}")
"""


def choose(tmp_path: Path, asked: str, gpus: str | None) -> tuple[str, str, str]:
    """The list in torch's words, that of CMake, and all that is printed.

    Args:
        gpus: what nvidia-smi prints; None: there is none.
    """
    if CMAKE is None:
        pytest.skip("needs cmake")
    script = tmp_path / "print.cmake"
    script.write_text(PRINT.format(ROOT / "cmake" / "cuda_architectures.cmake"))
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    text = "exit 9" if gpus is None else f"printf '{gpus}'"
    fake.write_text(f"#!/bin/sh\n{text}\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin", "TORCH_CUDA_ARCH_LIST": asked}
    done = subprocess.run(
        [CMAKE, "-P", str(script)], capture_output=True, text=True, env=environment, timeout=60
    )
    printed = done.stdout + done.stderr
    if "list=" not in printed:
        return "", "", printed
    words, cmake = printed.partition("list=")[2].splitlines()[0].split(" cmake=")
    return words, cmake, printed


@pytest.mark.parametrize(
    "asked, gpus, words, cmake",
    [
        ("", None, "9.0a", "90a-real"),
        ("", "", "9.0a", "90a-real"),
        ("", r"8.9\n", "8.9", "89-real"),
        ("", r"9.0\n9.0\n", "9.0a", "90a-real"),
        ("", r"9.0\n8.0\n", "9.0a;8.0+PTX", "90a-real;80-real;80-virtual"),
        ("8.0", r"9.0\n", "8.0", "80-real"),
        ("8.0 8.6,12.0;9.0a", None, "8.0;8.6;12.0+PTX;9.0a", None),
        ("8.0;9.0a+PTX", None, "8.0;9.0a+PTX", "80-real;90a-real;90a-virtual"),
        ("9.0a;10.0a", None, "9.0a;10.0a", "90a-real;100a-real"),
    ],
)
def test_choice(tmp_path, asked, gpus, words, cmake):
    got = choose(tmp_path, asked, gpus)
    assert got[0] == words
    if cmake is not None:
        assert got[1] == cmake
    else:
        assert got[1] == "80-real;86-real;120-real;90a-real;120-virtual"
    assert "CMake Warning" not in got[2]


def test_info_names_each(monkeypatch):
    monkeypatch.setattr(_C, "cuda_build", "nvcc 13.0.88 (nvcc), architectures 8.0,9.0a,12.0+PTX")
    monkeypatch.setattr(_library, "CUDA_LIBRARY", Path(__file__))
    assert info.built_architectures() == ["8.0", "9.0a", "12.0+PTX"]


def test_plain_9_0_warns(tmp_path):
    words, _, printed = choose(tmp_path, "9.0", None)
    assert words == "9.0" and "an H100 or H200 wants 9.0a." in " ".join(printed.split())


def test_a_wrong_entry_is_named(tmp_path):
    _, _, printed = choose(tmp_path, "sm_80", None)
    assert "expected entries such as 8.0 or 9.0a or 12.0+PTX, got sm_80" in " ".join(
        printed.split()
    )


def test_the_error_has_the_line_that_mends_it(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    (tmp_path / "main.cpp").write_text("""
        #include <cstdio>
        #include "cuda/base/built_for.h"
        int main() {
          for (int gpu : {89, 90, 120}) {
            std::puts(vllm_kernels::cuda::no_code_for_gpu("sm_80, PTX of sm_80", gpu).c_str());
          }
        }
    """)
    program = tmp_path / "main"
    source = ["-std=c++20", f"-I{ROOT / 'csrc'}", str(tmp_path / "main.cpp"), "-o", str(program)]
    subprocess.run(["g++", *source], check=True, timeout=120)
    lines = subprocess.run([program], capture_output=True, text=True).stdout.splitlines()
    start = "vllm_kernels: built for sm_80, PTX of sm_80, this GPU is sm_"
    assert lines == [
        f"{start}89: build with TORCH_CUDA_ARCH_LIST=8.9",
        f"{start}90: build with TORCH_CUDA_ARCH_LIST=9.0a",
        f"{start}120: build with TORCH_CUDA_ARCH_LIST=12.0",
    ]
