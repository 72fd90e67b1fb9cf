"""tools/check_house.py on source files that are too long."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "check_house.py"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, for an empty repository."""
    spec = importlib.util.spec_from_file_location("check_house", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return module


def add(house: ModuleType, name: str, num_lines: int) -> None:
    file = house.ROOT / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n" * num_lines)
    subprocess.run(["git", "add", name], cwd=house.ROOT, check=True)


@pytest.mark.parametrize(
    "name",
    ["csrc/cpu/a.cpp", "csrc/a.h", "csrc/cuda/a.cuh", "csrc/cuda/a.cu", "vllm_kernels/hf/a.py",
     "tools/a.py", "benchmarks/probes/a.cu",
     "tests/ops/test_a.py"],
)  # fmt: skip
def test_red_on_a_file_that_is_too_long(house, capsys, name):
    add(house, name, 500)
    assert house.main() == 0, capsys.readouterr().out
    add(house, name, 501)
    assert house.main() == 1
    assert f"{name}: 501 lines, at most 500\n" in capsys.readouterr().out


def test_other_files_may_be_long(house, capsys):
    for name in ("vllm_kernels/README.md", "examples/a.py", "benchmarks/results/a.json"):
        add(house, name, 501)
    assert house.main() == 0, capsys.readouterr().out


def test_the_tree_is_green():
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
