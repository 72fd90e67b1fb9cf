"""Attention to a KV cache that is spread over several devices or processes."""

from .context_parallel import ContextParallel

__all__ = ["ContextParallel"]
