"""The seeds and offsets of FlashInfer's sampling functions, as this library's ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InvalidArgument


def seeds_and_offsets(
    batch: int,
    device: torch.device,
    generator: torch.Generator | None,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """int64 seeds and offsets [batch]. Samples of one seed differ in the high half of the
    offset."""
    if isinstance(seed, Tensor) != isinstance(offset, Tensor) or (seed is None) != (offset is None):
        raise InvalidArgument(
            "flashinfer.sampling: seed: expected seed and offset, both numbers or both tensors"
        )
    sample = torch.arange(batch, device=device) << 32
    if seed is None or offset is None:
        drawn = torch.randint(2**63 - 1, (1,), device=device, generator=generator)
        return drawn.expand(batch).contiguous(), sample
    seeds = torch.zeros_like(sample) + _signed("seed", seed, batch)
    return seeds, sample + _signed("offset", offset, batch)


def _signed(name: str, value: int | Tensor, batch: int) -> int | Tensor:
    """The same 64 bits as int64."""
    if isinstance(value, int):
        return (value + 2**63) % 2**64 - 2**63
    if not isinstance(value, Tensor):
        want, got = "an int or a tensor", type(value).__name__
    elif value.dtype not in (torch.int64, torch.uint64):
        want, got = "int64 or uint64", str(value.dtype)
    elif value.shape not in ((), (1,), (batch,)):
        want, got = f"shape [1] or [{batch}]", str(list(value.shape))
    else:
        return value.view(torch.int64)
    raise InvalidArgument(f"flashinfer.sampling: {name}: expected {want}, got {got}")
