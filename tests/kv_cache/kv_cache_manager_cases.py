"""Arguments that the tests of KVCacheManager share."""

from __future__ import annotations

from typing import Any

import torch


def make_buffers(**changes: Any) -> dict[str, Any]:
    """Arguments of a BatchBuffers for 4 sequences of 3 blocks and 8 tokens."""
    return {
        "block_tables": torch.zeros(4, 3, dtype=torch.int32),
        "seq_lens": torch.zeros(4, dtype=torch.int32),
        "query_start_loc": torch.zeros(5, dtype=torch.int32),
        "slot_mapping": torch.zeros(8, dtype=torch.int64),
        "positions": torch.zeros(8, dtype=torch.int64),
        **changes,
    }
