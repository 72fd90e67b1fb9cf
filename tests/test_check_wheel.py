"""tools/check_wheel.py, and the stubs of cmake/glibc_stubs.py that make its verdict good."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = "#include <pthread.h>\nvoid once(pthread_once_t *o, void (*f)(void)) {pthread_once(o, f);}"

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


def check(path: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/check_wheel.py", path], capture_output=True, text=True
    )
    return done.returncode, done.stdout


def link(tmp_path: Path, *libraries: str) -> Path:
    source, library = tmp_path / "once.c", tmp_path / "libonce.so"
    source.write_text(SOURCE)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source, *libraries], check=True)
    return library


def test_new_symbol(tmp_path: Path):
    library = link(tmp_path)
    if b"GLIBC_2.34" not in library.read_bytes():
        pytest.skip("this system's glibc is before 2.34")
    text = (
        "newer than manylinux_2_28: libonce.so: pthread_once@GLIBC_2.34\n"
        "check_wheel: 1 libraries, 1 symbols that are too new\n"
    )
    assert check(library) == (1, text)
    with zipfile.ZipFile(tmp_path / "once.whl", "w") as wheel:
        wheel.write(library, "package/libonce.so")
    assert check(tmp_path / "once.whl") == (1, text)


def test_stubs(tmp_path: Path):
    stubs = subprocess.run(
        [sys.executable, ROOT / "cmake/glibc_stubs.py", "g++", tmp_path / "stubs"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    library = link(tmp_path, *filter(None, stubs.strip().split(";")))
    assert check(library) == (0, "check_wheel: 1 libraries, 0 symbols that are too new\n")


def test_this_build():
    """Every build makes portable libraries."""
    status, text = check(ROOT / "vllm_kernels")
    assert status == 0, text


def test_nothing(tmp_path: Path):
    text = "check_wheel: no library\ncheck_wheel: 0 libraries, 0 symbols that are too new\n"
    assert check(tmp_path) == (1, text)
