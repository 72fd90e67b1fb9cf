"""What happens to the prefix cache, for who follows it from outside."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored"]


class BlockStored(NamedTuple):
    """A full block became findable: its tokens, and a hash of them and of all before them."""

    group: int
    block: int
    block_hash: bytes
    parent_hash: bytes
    """Hash of all tokens before; of the keys alone (salt and so on) for the first block."""
    tokens: list[int]


class BlockRemoved(NamedTuple):
    """A block is no longer findable: it was evicted, or is about to be overwritten."""

    group: int
    block: int
    block_hash: bytes


class AllBlocksCleared(NamedTuple):
    """No block is findable any more."""
