"""One valid call of every op, by the names of its schema: what malformed_calls.py changes.

Sizes, dtypes and layouts are drawn from `random`, values from torch's generator. The calls are in
valid_calls_<family>.py: an import adds them to the table.
"""

from __future__ import annotations

import valid_calls_attention  # noqa: F401
import valid_calls_cache  # noqa: F401
import valid_calls_norm  # noqa: F401
import valid_calls_pages  # noqa: F401
import valid_calls_rope  # noqa: F401
import valid_calls_sampling  # noqa: F401
from valid_calls_base import VALID_CALLS, Call

__all__ = ["VALID_CALLS", "Call"]
