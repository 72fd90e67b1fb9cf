"""Copies small values to a device, and results back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["download", "upload"]


def upload(
    values: Sequence[Any] | npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns a tensor of ``values`` on ``device``.

    The copy to a GPU is asynchronous. ``torch.tensor(values, device=...)`` would synchronise.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def download(tensor: Tensor) -> Tensor:
    """Starts a copy to the host.

    The copy from a GPU is asynchronous. Wait for an event before you read it.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
