"""Small tensors from Python to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["upload"]


def upload(
    values: Sequence[Any] | npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of ``values``. On a GPU without a wait for what runs there, as ``torch.tensor``
    with a device would have it."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
