"""Which sequence owns which block of a paged KV cache.

A cache is a pool of ``num_blocks`` blocks of ``block_size`` tokens. :class:`KVCacheManager` maps
sequence ids to tables of block ids; token ``i`` of a sequence is in slot
``table[i // block_size] * block_size + i % block_size``. It holds no keys or values: it
returns where to write them (``slot_mapping`` for ``reshape_and_cache``), where to read them
(``block_tables`` and ``seq_lens`` for ``paged_attention``), and which blocks to copy
(``copy_blocks``, ``swap_blocks``). Names follow vLLM's manager (vllm/v1/core) where the meaning is
the same.

A serving loop::

    cached = manager.allocate(request, prompt, num_new=0)  # shares the cached blocks of the prompt
    copies = manager.step(ids, counts, buffers, tokens=input_ids)  # slots and tables of one pass
    ...                                      # copy_blocks(copies), then the forward pass
    manager.free(request)

Every call is all or nothing: whatever it raises, the manager and the buffers are as before.
"""

from .._C import (
    DuplicateSequence,
    IntegrityError,
    InvalidArgument,
    KVCacheError,
    OutOfBlocks,
    ReferenceOverflow,
    Statistics,
    UnknownSequence,
)
from .arguments import Integers, MultimodalItem, Tokens
from .buffers import BatchBuffers
from .events import AllBlocksCleared, BlockRemoved, BlockStored
from .manager import KVCacheManager

__all__ = [
    "AllBlocksCleared",
    "BatchBuffers",
    "BlockRemoved",
    "BlockStored",
    "DuplicateSequence",
    "IntegrityError",
    "Integers",
    "InvalidArgument",
    "KVCacheError",
    "KVCacheManager",
    "MultimodalItem",
    "OutOfBlocks",
    "ReferenceOverflow",
    "Statistics",
    "Tokens",
    "UnknownSequence",
]
