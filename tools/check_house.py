"""Fails when the rooms of the source lose their shape.

- No folder of csrc or vllm_kernels has more than 24 files.
- Includes point down: a room includes itself and the rooms that ROOMS allows.
- No torch, Python or pybind11 header in the kernel rooms.
- csrc/torch_ops narrows numbers only in base/check.h: int32_size() refuses what does not fit.
- No function is longer than 150 lines, except those of LONG_FUNCTIONS with their reasons.
- No source file of csrc, vllm_kernels, tools, benchmarks or tests has more than 500 lines.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_FILES, MAX_LINES, MAX_LINES_OF_FILE = 24, 150, 500
ATTENTION = "cuda/attention"
# What a room may include besides itself and csrc's own headers (export.h, ops/).
ROOMS = {
    "ops": set[str](),
    "cuda/base": set[str](),
    f"{ATTENTION}/common": {"cuda/base"},
    f"{ATTENTION}/simt": {"cuda/base", f"{ATTENTION}/common"},
    f"{ATTENTION}/decode": {"cuda/base", f"{ATTENTION}/common"},
    f"{ATTENTION}/prefill": {"cuda/base", f"{ATTENTION}/common"},
    "cuda/cache": {"cuda/base", "cuda"},
    "cuda/norm": {"cuda/base", "cuda"},
    "cuda/activation": {"cuda/base", "cuda"},
    "cuda/sampling": {"cuda/base", "cuda"},
    "cuda/pages": {"cuda/base", "cuda", "cuda/sampling", f"{ATTENTION}/common"},
    "cuda/rope": {"cuda/base", "cuda/norm", "cuda/cache", "cuda"},
    f"{ATTENTION}/fused_decode": {
        "cuda/base", "cuda/rope", f"{ATTENTION}/common", f"{ATTENTION}/decode", ATTENTION, "cuda",
    },
    ATTENTION: {
        "cuda/base", "cuda", f"{ATTENTION}/common", f"{ATTENTION}/decode", f"{ATTENTION}/prefill",
        f"{ATTENTION}/simt",
    },
    "cuda": set[str](),
    "cpu/base": {"cpu"},
    "cpu/attention": {"cpu/base", "cpu"},
    "cpu/cache": {"cpu/base", "cpu"},
    "cpu/norm": {"cpu/base", "cpu"},
    "cpu/rope": {"cpu/base", "cpu/norm", "cpu/cache", "cpu"},
    "cpu/activation": {"cpu/base", "cpu"},
    "cpu/sampling": {"cpu/base", "cpu"},
    "cpu/pages": {"cpu/base", "cpu", "cpu/sampling", "cpu/attention"},
    "cpu": {"cpu/attention"},
}  # fmt: skip
LONG_FUNCTIONS = {
    (
        "csrc/cuda/attention/decode/decode_kernel.cuh",
        "decode",
    ): "one CTA, six states in registers; a struct is slower: docs/lab/decode/phases.md",
    (
        "csrc/cuda/attention/prefill/sm90/prefill_kernel.cuh",
        "consume_tiles",
    ): "a main loop: the order of wgmma, waits and softmax is the algorithm",
    ("vllm_kernels/ops/paged_attention.py", "paged_attention"): "three quarters are its docstring",
}
SOURCE = re.compile(r"\.(cu|cuh|cpp|h|py)$")
FOREIGN = re.compile(r'#include\s*[<"](torch|ATen|c10|pybind11|Python\.h)')
NARROWING = re.compile(r"static_cast<(?:u?int(?:8|16|32)_t|int|unsigned|short)>\(")
NARROWS = "csrc/torch_ops/base/check.h"
INCLUDE = re.compile(r'#include "((?:cuda|cpu|ops)/[^"]+)"')


def room_of(path: str) -> str:
    """The room of a path below csrc: the longest that ROOMS names."""
    folder = path.rsplit("/", 1)[0]
    while folder and folder not in ROOMS:
        folder = folder.rpartition("/")[0]
    return folder


def functions(text: str) -> list[tuple[str, int]]:
    """(name, lines) of the functions at namespace or class level, by clang-format's indentation."""
    found, lines = [], text.splitlines()
    for end, line in enumerate(lines):
        if line not in ("}", "  }"):
            continue
        indent = " " * (len(line) - 1)
        start = end - 1
        while start > 0 and not re.match(indent + r"[A-Za-z_~]", lines[start]):
            start -= 1
        head = " ".join(lines[start : start + 3])
        names = re.findall(r"\b([a-zA-Z_]\w*)\(", head)
        names = [name for name in names if name not in ("__launch_bounds__", "TEST")]
        if names and not re.match(r"\s*(namespace|struct|class|enum|using)\b", head):
            found.append((names[0], end - start + 1))
    return found


def python_functions(text: str) -> list[tuple[str, int]]:
    """(name, lines) of all functions, docstrings included."""
    return [
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def tracked(*folders: str) -> list[str]:
    """The files of these folders that git tracks."""
    return subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()


def long_files() -> list[str]:
    """A fault for each source file with too many lines."""
    faults = []
    for file in filter(SOURCE.search, tracked("csrc", "vllm_kernels", "tools", "benchmarks", "tests")):
        length = len((ROOT / file).read_text().splitlines())
        if length > MAX_LINES_OF_FILE:
            faults.append(f"{file}: {length} lines, at most {MAX_LINES_OF_FILE}")
    return faults


def main() -> int:
    files = tracked("csrc", "vllm_kernels")
    faults = long_files()
    for folder, count in Counter(file.rpartition("/")[0] for file in files).items():
        if count > MAX_FILES:
            faults.append(f"{folder}: {count} files, at most {MAX_FILES}")
    for file in files:
        if not SOURCE.search(file):
            continue
        text = (ROOT / file).read_text()
        find = python_functions if file.endswith(".py") else functions
        room = room_of(file.removeprefix("csrc/"))
        if room:
            if match := FOREIGN.search(text):
                faults.append(f"{file}: {match.group(0)}")
            for included in INCLUDE.findall(text):
                target = room_of(included)
                if target not in {room, "ops", *ROOMS[room]}:
                    faults.append(f"{file}: includes {included}: {room} does not build on {target}")
        if file.startswith("csrc/torch_ops/") and file != NARROWS:
            for number, line in enumerate(text.splitlines(), 1):
                if match := NARROWING.search(line):
                    faults.append(
                        f"{file}:{number}: {match.group(0)}..): use int32_size() or clamped_int32()"
                    )
        for name, length in find(text):
            if length > MAX_LINES and (file, name) not in LONG_FUNCTIONS:
                faults.append(f"{file}: {name}() has {length} lines, at most {MAX_LINES}")
    for fault in faults:
        print(fault)
    print(f"check_house: {len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
