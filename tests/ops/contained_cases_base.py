"""What the calls with index faults share: check mode, and what it reports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import vllm_kernels as vk

CHECK = os.environ.get("VLLM_KERNELS_CHECK") == "1"
CUDA = torch.device("cuda")


def reported(*fragments: str) -> None:
    """In check mode the fault is named; without it there is none."""
    torch.cuda.synchronize()
    try:
        vk.check()
        message = ""
    except RuntimeError as error:
        message = str(error)
    if CHECK:
        assert all(f in message for f in fragments), f"reported {message!r}, expected {fragments}"
    else:
        assert message == "", message


def contained(call: Callable[[], Any], *fragments: str) -> Any:
    """What a call with a bad value returns. None: in check mode a scan ended before the launch."""
    try:
        result = call()
    except RuntimeError as error:
        assert CHECK and all(f in str(error) for f in fragments)
        return None
    reported(*fragments)
    return result
