"""tools/check_words.py on identifiers with old words, and on words that are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "check_words.py"


def run(path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    return subprocess.run(
        [sys.executable, str(TOOL), *options, str(path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "identifier", "word"),
    [
        ("a.cuh", "constexpr int kMaxPieces = 4;\n", "kMaxPieces", "pieces"),
        ("a.cu", "int x = p.num_least;\n", "num_least", "least"),
        ("a.cpp", 'auto* a = "//"; int team;\n', "team", "team"),
        ("a.h", "int n = 1'000; struct KVRing {};\n", "KVRing", "ring"),
        ("a.py", 'x = f"#" + widen_rows(y)  # a comment\n', "widen_rows", "widen"),
    ],
)
def test_red_on_an_old_word(tmp_path, name, text, identifier, word):
    done = run(tmp_path / name, text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{name}:1: {identifier}: '{word}' is " in done.stdout


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.cuh", "// pieces of a ring\n/* the least\n team */ int steam, string;\n"),
        ("a.cpp", 'throw Error("turn the ring");\n#include "cuda/ring.cuh"\n'),
        ("a.py", '"""Turns pieces."""\nx = \'team\'  # the ring\nreturned = string = 1\n'),
    ],
    ids=["comments", "strings", "python"],
)
def test_green_without_one(tmp_path, name, text):
    done = run(tmp_path / name, text)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not (TOOL.parents[1] / ".git").exists(), reason="needs a clone")
def test_the_tree_is_green():
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
