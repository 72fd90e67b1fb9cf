"""The layer benchmark in its tiny form: it runs, its candidates are right, and wrong ones show."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_smoke(device, tmp_path):
    out = tmp_path / "layer.json"
    command = [sys.executable, "-m", "benchmarks.bench_layer", "--smoke", "--device", device]
    run = subprocess.run(
        [*command, "--only", "ours*", "--out", out], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    records = json.loads(out.read_text())
    assert {r["batch"] for r in records} == {1, 3}
    names = {r["candidate"] for r in records}
    kinds = ("ours_one_launch", "ours_fused", "ours_unfused")
    assert names >= {kind + suffix for kind in kinds for suffix in ("", "_nhd")}
    wrong = [r for r in records if not r.get("right")]
    assert not wrong, wrong


def test_errors_shows_what_is_wrong(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import bench_layer
    from benchmarks.layer import SMOKE, WRONG, Layer

    torch.manual_seed(0)
    layer = Layer(SMOKE, 3, 100, "cpu", copies=2)
    right = bench_layer.candidates("cpu")["ours_fused"](layer)
    assert max(layer.errors(right)) < WRONG

    def no_write(i):
        bench_layer.attention(layer, "vllm", i, layer.caches["vllm"][i], None)

    attention, _ = layer.errors(bench_layer.Candidate(right.norm, no_write, right.activate))
    assert not attention < WRONG  # the new token's place was NaN

    def forgets_residual(x, residual, weight):
        right.norm(x, residual.clone(), weight)

    candidate = bench_layer.Candidate(forgets_residual, right.attend, right.activate)
    attention, other = layer.errors(candidate)
    assert attention < WRONG and not other < WRONG

    idle = bench_layer.Candidate(right.norm, right.attend, lambda out, x: None)
    assert not layer.errors(idle)[1] < WRONG
