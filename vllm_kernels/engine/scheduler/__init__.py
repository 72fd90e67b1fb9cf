"""Chooses the tokens of each forward pass: the scheduler, its queues, and admission."""

from .scheduler import Scheduler

__all__ = ["Scheduler"]
