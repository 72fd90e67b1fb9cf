"""Sequences whose KV cache several devices, processes or instances hold."""

from .context_parallel import ContextParallel
from .ledger import InstanceCounts, Ledger

__all__ = ["ContextParallel", "InstanceCounts", "Ledger"]
