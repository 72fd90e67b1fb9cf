"""Sizes, the type of a row, and the libraries beside ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import rivals

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, PAGE = 4096, 14336, 32, 8, 128, 16
EPS = 1e-6

Call = Callable[[int], object]
# One op: name, bytes a call moves, sets of buffers, candidates (ours first).
Row = tuple[str, int, int, dict[str, Call]]

flashinfer, vllm = rivals.flashinfer, rivals.vllm_ops


def vllm_library(device: str) -> object | None:
    """vLLM's ops: of the installed package on a GPU, of the library --vllm-so names on a CPU."""
    if device == "cuda":
        return rivals.vllm_ops
    return torch.ops._C if hasattr(torch.ops._C, "rms_norm") else None


def with_compiled(calls: dict[str, Call], function: Callable, *arguments: Tensor) -> None:
    """On a CPU, adds torch.compile of a function that returns new tensors: arguments of set i."""
    if arguments[0].device.type == "cpu":
        compiled = torch.compile(function, dynamic=False)
        calls["compile"] = lambda i: compiled(*(argument[i] for argument in arguments))
