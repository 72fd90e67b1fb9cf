"""Index tensors that a long copy replaces at its end: what a kernel behind it, launched while it
runs, sees of them first is stale."""

from __future__ import annotations

import torch
from torch import Tensor

import vllm_kernels

STALE = "garbage in all of them"


class LateIndices:
    """Views of the copy's target, one for each of the values that it brings."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        """values: int32, on the current CUDA device."""
        self.values = values
        sizes = [value.numel() for value in values.values()]
        pairs = torch.zeros(2, 16 << 20, dtype=torch.int32, device="cuda")  # copied in about 30 us
        source, target = (block[-sum(sizes) :].split(sizes) for block in pairs)
        self.views = {
            name: part.view(values[name].shape) for name, part in zip(values, target, strict=True)
        }
        for part, value in zip(source, values.values(), strict=True):
            part.copy_(value.flatten())
        self._pairs, self._other = pairs, torch.empty_like(pairs)

    def garbage(self) -> dict[str, Tensor]:
        """In all of them: negative ones, and the largest."""
        stale = {name: torch.full_like(value, -5) for name, value in self.values.items()}
        for value in stale.values():
            value.view(-1)[::2] = torch.iinfo(torch.int32).max
        return stale

    def begin_copy(self, stale: dict[str, Tensor]) -> None:
        """The next kernel of the stream is launched behind the copy; until it ends, views are as
        `stale` says."""
        for name, value in {**self.values, **stale}.items():
            self.views[name].copy_(value)
        torch.cuda.synchronize()
        vllm_kernels.copy_blocks([self._pairs], [self._other], torch.tensor([[0, 1]]))
