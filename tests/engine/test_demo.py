"""``python -m vllm_kernels``: the demo matches transformers, and notices when it does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_kernels
from vllm_kernels.__main__ import TOY_MODEL, main
from vllm_kernels.demo import USED_OPS
from vllm_kernels.info import collect_info

ROOT = Path(__file__).parents[2]


def test_demo_from_the_command_line() -> None:
    command = [sys.executable, "-m", "vllm_kernels", "demo", "--max-new-tokens", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every token equals transformers'" in done.stdout
    for op in (*USED_OPS, "torch attention 0"):
        assert op in done.stdout, op


def test_demo_continues_prompts(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["The import statement", "A class"]
    arguments = ["demo", "--device", device, "--max-new-tokens", "8", "--prompt", *prompts]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for prompt in prompts:
        assert printed.count(prompt) == 2  # greedy and beams


def _wrong_attention(*arguments: Any, **options: Any) -> torch.Tensor:
    """The kernel, forgetting the last token of longer sequences."""
    *tensors, lens = arguments
    starts = options.get("query_start_loc")
    queries = 1 if starts is None else starts.diff()
    lens = torch.where((lens > 8) & (lens > queries), lens - 1, lens)
    return vllm_kernels.ops.paged_attention(*tensors, lens, **options)


def _wrong_copy(*arguments: Any) -> None:
    """The kernel, forgetting the values."""
    key_caches, _, pairs = arguments
    vllm_kernels.ops.copy_blocks_mla(key_caches, pairs)


def _torch_silu_and_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Right, but not the kernel."""
    gate, up = gate_up.chunk(2, -1)
    torch.mul(torch.nn.functional.silu(gate), up, out=out)


def _also_torch_attention(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Right, with a detour through torch's attention."""
    heads = torch.ones(1, 1, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    vllm_kernels.ops.silu_and_mul(out, gate_up)


@pytest.mark.parametrize(
    ("op", "replacement", "complaint"),
    [
        ("paged_attention", _wrong_attention, "expected"),
        ("copy_blocks", _wrong_copy, "4 beams"),
        ("silu_and_mul", _torch_silu_and_mul, "silu_and_mul: was never called"),
        ("silu_and_mul", _also_torch_attention, "torch's attention was called"),
    ],
)
def test_demo_fails(
    op: str,
    replacement: Callable[..., None],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vllm_kernels, op, replacement)
    assert main(["demo", "--max-new-tokens", "24"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "FAILED" in printed and complaint in printed, printed
    assert "every token equals" not in printed


def test_arguments_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["demo", "--model", str(tmp_path)]) == 2
    assert "expected a folder with a config.json" in capsys.readouterr().err
    assert main(["demo", "--max-new-tokens", "1"]) == 2
    assert "expected at least 2, got 1" in capsys.readouterr().err
    assert main(["demo", "--prompt", "A class", ""]) == 2
    assert "at least one token" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_without_transformers_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith(("vllm_kernels.demo", "transformers"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["demo"]) == 2
    assert "pip install --no-build-isolation '.[demo]'" in capsys.readouterr().err


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for name in collect_info():
        assert name in printed
    assert torch.__version__ in printed


def test_toy_model_is_small_and_trained() -> None:
    assert sum(file.stat().st_size for file in TOY_MODEL.iterdir()) <= 4e6
    readme = (TOY_MODEL / "README.md").read_text()
    assert "train_toy_model.py" in readme and "Python Software Foundation License" in readme
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype="auto")
    assert model.dtype == torch.bfloat16
    text = 'The "return" statement may only occur in a function definition.'
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        loss = model.float()(ids, labels=ids).loss.item()
    assert loss < 4.0  # nats a token; 6.9 untrained
