"""Sequences that more than one GPU or instance holds."""

from .ledger import InstanceCounts, Ledger

__all__ = ["InstanceCounts", "Ledger"]
