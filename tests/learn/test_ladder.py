"""The steps of docs/learn: C++ twins, CUDA code on an emulator and on a GPU, pages."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from emulate import STEPS as FOLDER
from emulate import EmulatedStep

sys.path.insert(0, str(FOLDER))
import ladder
import ladder_report

CUDA_STEPS = [step for step in ladder.STEPS if step < 8]
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
LENS = [17, 0, 70, 230, 1, 16]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learn")


@pytest.mark.parametrize("step", ladder.CPU_STEPS)
@pytest.mark.parametrize(
    "lens, heads, kv_heads, head_size",
    [(LENS, 8, 2, 128), ([5], 3, 3, 40), ([33, 32, 31], 6, 1, 64), ([0], 2, 1, 32)],
)
def test_cpu_twin(build, step, lens, heads, kv_heads, head_size):
    if shutil.which("g++") is None:
        pytest.skip("the C++ twins need g++, which is not on PATH.")
    problem = ladder.make_problem(lens, heads, kv_heads, head_size, dtype=torch.float32)
    out = problem.run(step, ladder.build(step, build, cpu=True))
    assert ladder.error_of(out, problem.expected()) <= ladder.LARGEST_ERROR[torch.float32]


def emulated(folder: Path, step: int, edit=lambda text: text) -> EmulatedStep:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++, which is not on PATH.")
    return EmulatedStep(ladder.STEPS[step], folder, edit)


@pytest.mark.parametrize("step", CUDA_STEPS)
def test_cuda_source_on_the_emulator(tmp_path, step):
    function = emulated(tmp_path, step)
    for num_splits in (1, 3) if step >= 5 else (1,):
        function.seed += 1
        problem = ladder.make_problem(LENS, 8, 2, num_splits=num_splits)
        out = problem.run(step, function)
        assert ladder.error_of(out, problem.expected()) <= ladder.LARGEST_ERROR[torch.bfloat16]


@pytest.mark.parametrize(
    "step, line, becomes",
    [
        (1, "  __syncthreads();  // all threads have read", "  //"),
        (3, "      __syncthreads();  // nobody reads", "      //"),
        (6, "dimension = k * 16 + lane / 8 % 2 * 8", "dimension = k * 16 + lane / 16 * 8"),
        (7, "    barrier_wait(", "    // ("),
        (7, "2 * present * kRowBytes", "2 * 16 * kRowBytes"),
    ],
)  # fmt: skip
def test_the_emulator_sees_faults(tmp_path, step, line, becomes):
    edited = []

    def edit(text: str) -> str:
        edited.extend([line] * text.count(line))
        return text.replace(line, becomes)

    function = emulated(tmp_path, step, edit)
    assert edited == [line]
    problem = ladder.make_problem(LENS, 8, 2)
    try:
        error = ladder.error_of(problem.run(step, function), problem.expected())
    except RuntimeError:
        assert function.error() == "deadlock"
    else:
        assert not error <= 2 * ladder.LARGEST_ERROR[torch.bfloat16]


@pytest.mark.parametrize("step", CUDA_STEPS)
def test_compiles_without_spills(tmp_path, step):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc on the PATH.")
    source = FOLDER / f"{ladder.STEPS[step]}.cu"
    options = ["-O3", "-std=c++17", "-arch=sm_90a", "-cubin", "-Xptxas=-v", "-Werror=all-warnings"]
    command = ["nvcc", *options, source, "-o", tmp_path / "step.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = SPILLS.findall(done.stderr)
    assert kernels
    assert all(numbers == ("0", "0", "0") for numbers in kernels), done.stderr


@pytest.mark.parametrize("step", CUDA_STEPS)
def test_cuda_step_on_a_gpu(build, step):
    if not torch.cuda.is_available() or shutil.which("nvcc") is None:
        pytest.skip("needs a GPU, and nvcc on the PATH.")
    if step not in ladder.possible_steps([step]):
        pytest.skip("needs sm_90.")
    function = ladder.build(step, build)
    for lens in (LENS, [1], [2048, 5], [0, 0]):
        for num_splits in (1, 3, 16) if step >= 5 else (1,):
            problem = ladder.make_problem(lens, device="cuda", num_splits=num_splits)
            out = problem.run(step, function)
            assert ladder.error_of(out, problem.expected()) <= ladder.LARGEST_ERROR[torch.bfloat16]


def test_bytes_of_the_pages():
    """docs/learn/step1.md and step5.md work these numbers out."""
    one = ladder.make_problem([1024], num_splits=16)
    assert ladder.bytes_of(5, one) == (4_202_496 + 264_192, 8_192 + 264_192)
    assert ladder.bytes_of(8, one) == (4_202_496, 8_192)
    assert sum(ladder.bytes_of(1, one)) == 4_202_496 + 8_192 + 4 * 1024 * 32 * 4


def test_pages_have_the_measured_tables():
    measured = ladder_report.MEASURED
    data = json.loads(measured.read_text()) if measured.exists() else None
    blocks = []
    for page in sorted(ladder_report.DOCS.glob("*.md")):
        text = page.read_text()
        assert text == ladder_report.filled(text, data), page.name
        blocks += [match["steps"] for match in ladder_report.BLOCK.finditer(text)]
    assert blocks == ["all", *(f"step {step}" for step in ladder.STEPS)]


def test_a_table():
    records = [
        ladder_report.Record("b1", 1, "one", 1e-3, 20.0, 4_000_000, 340_000),
        ladder_report.Record("b1", 2, "two", 1e-3, 10.0, 4_000_000, 340_000),
    ]
    measured = {
        "machine": "M", "date": "D", "ceiling": 4.34, "records": [vars(r) for r in records],
    }  # fmt: skip
    assert ladder_report.tables(measured, 2).splitlines() == [
        "M, D. Ceiling: 4.34 TB/s.",
        "",
        "| b1 | us | MB read | MB written | GB/s | % of ceiling | gained | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 2 two | 10.0 | 4.0 | 0.34 | 434 | 10 | 2.00x | 1.0e-03 |",
    ]
    page = "<!-- measured step 2: how -->\nold\n<!-- end of measured -->\n"
    assert "2 two" in ladder_report.filled(page, measured)
    assert "| 1 one" not in ladder_report.filled(page, measured)


def test_the_command(build, tmp_path, monkeypatch, capsys):
    """As on a GPU, but with the C++ twins, and a clock that always says 50 us."""
    in_float32 = partial(ladder.make_problem, dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ladder, "launch", lambda f, arguments: f(ctypes.byref(arguments), None))
    monkeypatch.setattr(ladder, "make_problem", lambda lens, device, **k: in_float32(lens, **k))
    monkeypatch.setattr(ladder, "build", partial(ladder.build, cpu=True))
    monkeypatch.setattr(ladder, "possible_steps", list)
    monkeypatch.setattr(ladder, "splits_for", lambda lens: 1)
    monkeypatch.setattr(ladder, "WORKLOADS", {"two": [40, 3], "one": [17]})
    monkeypatch.setattr(ladder.harness, "copies_for", lambda device, size: 2)
    monkeypatch.setattr(ladder.harness, "machine", lambda device: "no GPU")
    monkeypatch.setattr(ladder.harness, "median_seconds", lambda call, *_: call(1) or 5e-5)
    file = tmp_path / "measured.json"
    command = ["ladder.py", "8", "4", "1", "--ceiling", "1", "--build", str(build)]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(file)])
    assert ladder.main() == 0
    printed = capsys.readouterr().out
    measured = json.loads(file.read_text())
    assert printed.strip() == ladder_report.tables(measured).strip()
    assert [(r["workload"], r["step"]) for r in measured["records"]] == [
        ("two", 1), ("two", 4), ("two", 8), ("one", 1), ("one", 4), ("one", 8),
    ]  # fmt: skip
    assert all(r["error"] <= 1e-5 and r["us"] == 50 for r in measured["records"])

    monkeypatch.setattr(ladder, "build", lambda *_, **__: lambda *_: 0)  # computes nothing
    monkeypatch.setattr(sys, "argv", ["ladder.py"])
    assert ladder.main() == 1
    assert "WRONG: step1_naive, two: relative error nan" in capsys.readouterr().out


def test_what_write_writes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ladder_report, "DOCS", tmp_path)
    monkeypatch.setattr(ladder_report, "MEASURED", tmp_path / "measured.json")
    (tmp_path / "page.md").write_text("<!-- measured all: x -->\n<!-- end of measured -->\n")
    records = [ladder_report.Record(w, 1, "one", 1e-3, 20.0, 4_000_000, 0) for w in ("a", "b")]
    measured = {"machine": "M", "date": "D", "ceiling": 4.34, "records": list(map(vars, records))}
    ladder_report.write(measured)
    assert "![us of each step](ladder.png)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "ladder.png").stat().st_size > 1000
    assert json.loads((tmp_path / "measured.json").read_text()) == measured


def test_every_step_is_on_its_page():
    for step, name in ladder.STEPS.items():
        assert name in (ladder_report.DOCS / f"step{step}.md").read_text()
    sources = {path.stem for path in FOLDER.glob("step*.cu")}
    assert sources == {name for step, name in ladder.STEPS.items() if step < 8}
    twins = {path.stem for path in FOLDER.glob("step*.cpp")}
    assert twins == {ladder.STEPS[step] for step in ladder.CPU_STEPS}
