"""The command ``vllm_kernels``: info, selftest, --version; and the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_kernels
from vllm_kernels import _log, _version, info, selftest
from vllm_kernels.__main__ import main

ROOT = Path(__file__).parent.parent
ONE_CALL = """
import torch, vllm_kernels
x = torch.ones(2, 64)
vllm_kernels.rms_norm(torch.empty_like(x), x, torch.ones(64), 1e-6)
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_info_as_json(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_KERNELS_SOMETHING", "x" * 300)
    assert main(["info", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["vllm_kernels"] == vllm_kernels.__version__
    assert known["variables"]["VLLM_KERNELS_SOMETHING"] == "x" * 300
    assert known["torch"] == torch.__version__ and known["cpu_level"]
    for key in ("driver", "gpus", "cuda_architectures", "glibc", "commit", "built_with_compiler"):
        assert key in known


def test_info_is_plain_and_unwrapped():
    done = python("""
import sys
sys.modules["rich"] = None  # as where it is not installed
from vllm_kernels.__main__ import main
main(["info"])
""")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["vllm_kernels"] == vllm_kernels.__version__, done.stderr
    assert lines["commit"] and lines["driver"] and lines["GPU"]


@pytest.mark.parametrize(
    "built, gpu, problem",
    [
        (["9.0a"], (9, 0), None),
        (["8.0"], (8, 9), None),
        (["9.0a"], (8, 9), "built for sm_90a, this GPU is sm_89: build with "
                           "TORCH_CUDA_ARCH_LIST=8.9"),
        (["8.9", "8.0"], (9, 0), "TORCH_CUDA_ARCH_LIST=9.0a"),
        (["8.9"], (8, 0), "TORCH_CUDA_ARCH_LIST=8.0"),
        (["9.0a"], (10, 0), "TORCH_CUDA_ARCH_LIST=10.0"),
        (["9.0a", "8.0+PTX"], (12, 0), None),
        (["10.0f"], (10, 3), None),
        ([], (9, 0), None),
    ],
)  # fmt: skip
def test_a_gpu_without_code_gets_the_line_that_mends_it(built, gpu, problem):
    got = info.gpu_problem(built, *gpu)
    assert got is None if problem is None else problem in str(got)


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(_version, "commit", "0123456789abcdef")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == (
        f"vllm_kernels {vllm_kernels.__version__} (commit 0123456789abcdef)\n"
    )


def test_the_command_is_an_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'vllm_kernels = "vllm_kernels.__main__:main"' in text


def test_a_missing_package_is_named_with_its_remedy():
    done = python("""
import sys
sys.modules["rich"] = None
from vllm_kernels.__main__ import main
sys.exit(main(["demo"]))
""")
    assert done.returncode == 2
    assert "The demo needs rich: in " in done.stderr and "'.[demo]'" in done.stderr


def test_selftest_passes(capsys):
    assert main(["selftest"]) == 0
    printed = capsys.readouterr().out
    for check in selftest.OPS:
        assert f"cpu     {check.__name__:<16} ok" in printed
    assert "manager          ok" in printed and " 0 failed" in printed


@pytest.mark.parametrize(
    "op, group",
    [
        ("rms_norm", "norms"),
        ("scaled_fp8_quant", "quantization"),
        ("paged_attention", "decode"),
        ("page_bounds_update", "pages"),
        ("select_pages", "pages"),
        ("sample", "sampling"),
    ],
)
def test_selftest_fails_where_an_op_is_wrong(monkeypatch, capsys, op, group):
    right = getattr(vllm_kernels, op)

    def wrong(first: torch.Tensor, *args: object, **kwargs: object) -> object:
        result = right(first, *args, **kwargs)
        changed = result[1] if isinstance(result, tuple) else first if result is None else result
        changed.view(-1)[-1] += 1
        return result

    monkeypatch.setattr(vllm_kernels, op, wrong)
    assert main(["selftest"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(group in line and "FAILED: Mismatch" in line for line in lines)


def test_debug_logs_ops_and_shapes():
    done = python(ONE_CALL, VLLM_KERNELS_LOGLEVEL="debug")
    line = "vllm_kernels DEBUG rms_norm(out float32[2, 64] cpu, input float32[2, 64] cpu, weight"
    assert line in done.stderr and done.returncode == 0
    assert "epsilon 1e-06)" in done.stderr
    quiet = python(ONE_CALL)
    assert "vllm_kernels" not in quiet.stderr
    about_libraries = python(ONE_CALL, VLLM_KERNELS_LOGLEVEL="INFO").stderr
    assert "INFO CPU library: " in about_libraries and "rms_norm(" not in about_libraries


def test_debug_turns_the_kernel_log_on_unless_it_is_set():
    code = "import os, vllm_kernels; print(os.environ.get('VLLM_KERNELS_LOG'))"
    assert python(code, VLLM_KERNELS_LOGLEVEL="DEBUG").stdout.strip() == "1"
    both = python(code, VLLM_KERNELS_LOGLEVEL="DEBUG", VLLM_KERNELS_LOG="0")
    assert both.stdout.strip() == "0"
    assert python(code, VLLM_KERNELS_LOGLEVEL="INFO").stdout.strip() == "None"


def test_a_wrong_level_is_one_sentence():
    done = python(ONE_CALL, VLLM_KERNELS_LOGLEVEL="loud")
    assert (
        "VLLM_KERNELS_LOGLEVEL=LOUD: expected DEBUG, INFO, WARNING or ERROR"
        in done.stderr.splitlines()[-1]
    )


def test_off_a_call_has_no_wrapper():
    from vllm_kernels.ops import _common

    assert not _log.calls_are_logged
    traced, direct = _common.entry_points("rms_norm")
    assert direct is traced._op
