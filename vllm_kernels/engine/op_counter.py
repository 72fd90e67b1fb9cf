"""Counts the ops that torch dispatches, for tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .._ops import NAMESPACE

_TORCH_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "softmax")


class OpCounter(TorchDispatchMode):
    """Context manager that counts every dispatched op. It slows small models down."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    def ours(self, op: str) -> int:
        """Returns the number of calls to ``torch.ops.vllm_kernels.<op>``."""
        return self.counts[f"{NAMESPACE}::{op}"]

    def torch_attention(self) -> dict[str, int]:
        """Returns the calls to torch's own attention, by op. log_softmax does not count."""
        return {
            name: count
            for name, count in self.counts.items()
            if name.startswith("aten::")
            and "log_softmax" not in name
            and any(part in name for part in _TORCH_ATTENTION)
        }
