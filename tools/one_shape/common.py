"""What the command line asks for, and caches of every layout."""

from __future__ import annotations

import sys

import torch

torch.manual_seed(0)
CUDA = torch.device("cuda")
ASKED = set(sys.argv[1:])
NAMES = {"float16", "bfloat16", "float32"}
DTYPES = [getattr(torch, name) for name in sorted(ASKED & NAMES or NAMES)]


def in_vllm_layout(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of rows in layout NHD, as K and as V of layout vllm."""
    return (
        rows.unflatten(-1, (-1, 16 // rows.itemsize)).permute(0, 2, 3, 1, 4).contiguous(),
        rows.permute(0, 2, 3, 1).contiguous(),
    )


def rows_by_layout(rows: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layout, of rows in layout NHD. NHD and HND have one tensor for both."""
    return {
        "NHD": (rows, rows),
        "HND": (rows.transpose(1, 2).contiguous(),) * 2,
        "vllm": in_vllm_layout(rows),
    }
