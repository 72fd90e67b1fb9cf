"""``python -m vllm_kernels bench engine``: traces, what is printed, and what is refused."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

import torch
from torch import Tensor
from transformers import GenerationMixin

from vllm_kernels.__main__ import main
from vllm_kernels.bench.trace import made_trace, read_trace

FEW = ["bench", "engine", "--requests", "6", "--max-length", "96", "--num-blocks", "80"]


def test_made_traces() -> None:
    options = {"seed": 3, "vocabulary": 100, "max_length": 2048, "rate": 10.0}
    trace = made_trace(400, **options)
    assert trace == made_trace(400, **options)
    assert trace != made_trace(400, **(options | {"seed": 4}))
    assert mean(len(request.prompt) for request in trace) == pytest.approx(161, rel=0.2)
    assert mean(request.max_tokens for request in trace) == pytest.approx(338, rel=0.2)
    assert trace[-1].arrival == pytest.approx(40, rel=0.2)
    assert all(2 <= token < 100 for request in trace for token in request.prompt)
    assert all(len(request.prompt) + request.max_tokens <= 2048 for request in trace)
    assert {request.arrival for request in made_trace(9, **(options | {"rate": math.inf}))} == {0}


def test_made_conversations() -> None:
    trace = made_trace(200, seed=0, vocabulary=100, max_length=4096, rounds=3)
    goes_on = [
        later.prompt[: len(before.prompt)] == before.prompt for before, later in pairwise(trace)
    ]
    assert 0.5 < mean(goes_on) < 0.8


def test_traces_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt": [1, 2], "max_tokens": 3, "arrival": 2}\n\n{"prompt": "A class"}\n')
    first, second = read_trace(file, max_tokens=7)
    assert (first.prompt, first.max_tokens, first.arrival) == ("A class", 7, 0)
    assert (second.prompt, second.max_tokens, second.arrival) == ([1, 2], 3, 2)
    for line, message in (
        ("nonsense", "expected a prompt in JSON, got 'nonsense'"),
        ("[1]", r"expected a prompt in JSON, got \[1\]"),
        ('{"text": "a"}', "expected a prompt in JSON, got {'text': 'a'}"),
        ('{"prompt": 5}', "prompt: expected text or a list of token ids, got 5"),
        ('{"prompt": [2.5]}', "prompt: expected text or a list"),
        ('{"prompt": "a", "max_tokens": "b"}', "max_tokens: expected an integer, got 'b'"),
        ('{"prompt": "a", "arrival": "b"}',
         r"arrival: expected seconds, 0 to 31536000 \(a year\), got 'b'"),
        ('{"prompt": "a", "arrival": 1e300}', r"arrival: expected seconds, 0 to .*, got 1e\+300"),
        ('{"prompt": "a", "arrival": NaN}', r"arrival: expected seconds, 0 to .*, got nan"),
        (r'{"prompt": "ab\ud800"}',
         r"prompt: expected text, got 'ab\\ud800': a lone surrogate at character 2"),
        ("[" * 100_000, r"expected a prompt in JSON, got '\[+\.\.\.\[+': maximum recursion depth"),
        ('{"prompt": "a", "temperature": 1}', "expected prompt, max_tokens and arrival, got temp"),
    ):  # fmt: skip
        file.write_text(f'{{"prompt": "good"}}\n{line}\n')
        with pytest.raises(ValueError, match=rf"trace.jsonl:2: {message}"):
            read_trace(file, 7)
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"trace.jsonl:1: expected a prompt in JSON, .* byte 0xff"):
        read_trace(file, 7)
    # U+2028 and a form feed end no line: JSON may hold the first one, the second one is a mistake.
    file.write_bytes('{"prompt": "one\u2028prompt"}\r\n{"prompt": "two"}\r\n'.encode())
    assert [request.prompt for request in read_trace(file, 7)] == ["one\u2028prompt", "two"]
    file.write_text('{"prompt": "one"}\f{"prompt": "two"}')
    with pytest.raises(ValueError, match=r"trace.jsonl:1: expected a prompt in JSON"):
        read_trace(file, 7)
    file.write_text("\n")
    with pytest.raises(ValueError, match="expected at least one request"):
        read_trace(file, 7)


def test_what_is_printed(
    tmp_path: Path,
    device: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    rows = []

    def counting(model: GenerationMixin, ids: Tensor, **options: object) -> Tensor:
        rows.append(len(ids))
        return generate(model, ids, **options)

    generate = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", counting)
    assert main([*FEW, "--device", device, "--plot", str(plot), "--compare"]) == 0
    printed = capsys.readouterr().out
    for name in (
        "throughput, output tokens/s", "time to first token", "time per output token",
        "waste in used blocks", "prefix cache hit rate", "preemptions", "one by one",
    ):  # fmt: skip
        assert name in printed, name
    assert printed.count("equal") == 2 and "DIFFERENT" not in printed
    assert plot.stat().st_size > 10_000
    assert rows == [1] * 4 + [1] * 6 + [4, 6]  # each is warmed up by 4 requests


def test_scales_of_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    few = [*FEW, "--output-mean", "2", "--cache-dtype", "int8"]
    assert main(few) == 2
    assert "cache_dtype: int8: with these k_scale and v_scale" in capsys.readouterr().err
    assert main([*few, "--k-scale", "0.05", "--v-scale", "0.05"]) == 0


def test_prompts_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"prompt": "The for statement is used to repeat", "max_tokens": 5, "arrival": 0.01 * i}
        for i in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--max-length", "64", "--num-blocks", "40", "--block-size", "4"]
    assert main(["bench", "engine", "--trace", str(file), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "3 requests" in printed and "drawn" not in printed


def test_arguments_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--model", str(tmp_path)], "--model: expected a folder with a config.json"),
        (["--requests", "0"], "--requests: expected at least 1, got 0"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0.0"),
        (["--rate", "-1"], "--rate: expected more than 0, got -1.0"),
        (["--rate", "nan"], "--rate: expected more than 0, got nan"),
        (["--prompt-mean", "0"], "--prompt-mean: expected more than 0 tokens, got 0.0"),
        (["--output-mean", "inf"], "--output-mean: expected more than 0 tokens, got inf"),
        (["--num-blocks", "4"], "made trace: Engine: prompt: expected fewer than 64 tokens"),
        (["--compare", "--rate", "3"], "--compare: expected requests all at once"),
        (["--trace", str(tmp_path / "none")], "--trace: "),
        (["--num-blocks", "1"], "at least 2 blocks"),
        (["--plot", str(tmp_path)], "--plot: expected a file in a folder"),
        (["--plot", str(tmp_path / "none" / "x.png")], "--plot: expected a file in a folder"),
    ):
        assert main(["bench", "engine", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_lines_that_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    for entry, message in (
        ({"prompt": [2] * 64}, "prompt: expected fewer than 64 tokens (max_length), got 64"),
        ({"prompt": [2], "max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"prompt": [-1]}, "prompt: expected tokens from 0 to"),
        (
            {"prompt": [2], "arrival": math.nan},
            "arrival: expected seconds, 0 to 31536000 (a year), got nan",
        ),
        ({"prompt": [2], "max_tokens": math.inf}, "max_tokens: expected an integer, got inf"),
    ):
        file.write_text(f'{{"prompt": [2], "arrival": 9}}\n{json.dumps(entry)}\n')
        arguments = ["--trace", str(file), "--max-length", "64", "--num-blocks", "40"]
        assert main(["bench", "engine", *arguments]) == 2
        printed = capsys.readouterr()
        assert f"--trace: {file}:2: " in printed.err and message in printed.err
        assert printed.err.count("\n") == 1 and not printed.out


def test_bench_async_engine(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, compares the tokens of all arms, and has a figure for each."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    from benchmarks import bench_async_engine

    out = tmp_path / "async.json"
    sizes = ["--streams", "3", "--tokens", "5", "--rounds", "2", "--intervals", "0", "0.5"]
    sizes += ["--threads", str(torch.get_num_threads())]
    monkeypatch.setattr("sys.argv", ["bench", "--device", "cpu", *sizes, "--out", str(out)])
    bench_async_engine.main()
    assert list(json.loads(out.read_text())) == ["generate", "streams, 0 s", "streams, 0.5 s"]
    assert "of generate, CPU" in capsys.readouterr().out
