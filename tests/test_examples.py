"""The programs of examples/ run and print what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "context_parallel": (
        r"one process: allocate: out of blocks: needed 46, free 30\n"
        r"the tokens of one process: True"
    ),
    "cuda_graph": (
        r"(No GPU: the step runs without a graph\.\n)?"
        r"\[True, True, True(, False){5}\]\n\[True, True(, False){6}\]"
    ),
    "decoder_layer": r"True",
    "engine_offline": (
        r"('.+'\n){4}0 (stop|length) '.+'\n1 (stop|length) '.+'\n"
        r"[1-9]\d* of \d+ prompt tokens cached"
    ),
    "fp8_cache": (
        r"float32 +114688 bytes\n"
        r"float8_e4m3fn +28672 bytes, error [2-5]\.\d%\n"
        r"float8_e5m2 +28672 bytes, error [5-9]\.\d%\n"
        r"int8 +28672 bytes, error [0-2]\.\d%"
    ),
    "hf_generate": r"[1-9]\d* blocks shared by beams\n('.+'\n){2}the tokens of transformers: True",
    "openai_server": (
        r"'(.+)'\n'\1' \[DONE\]\n"
        r"400 InvalidArgument: SamplingParams: max_tokens: expected at least 1, got -1"
    ),
    "own_engine": (
        r"('.+'\n){4}[1-9]\d* prompt tokens cached, [1-9]\d* preemptions\n"
        r"the tokens of transformers: True"
    ),
}
"""What each program prints."""


@pytest.mark.parametrize("name", PRINTED)
def test_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    if "from transformers" in path.read_text():
        pytest.importorskip("transformers")
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(PRINTED[name], printed), printed


def test_every_example_is_run() -> None:
    assert sorted(PRINTED) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def test_every_example_is_in_the_list() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"]({name}.py)" in listed for name in PRINTED)
