"""Other libraries' kernels, where they are installed: FlashInfer, FlashAttention, vLLM.

Nothing here is required. A library that cannot be imported is left out, and its name with the
reason is in MISSING.
"""

from __future__ import annotations

import importlib
from types import ModuleType

MISSING: dict[str, str] = {}
"""Library -> why it is left out of this run."""


def find(library: str, *modules: str) -> ModuleType | None:
    """The first of `modules` that imports."""
    for module in modules:
        try:
            return importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            MISSING[library] = f"{type(error).__name__}: {error}".splitlines()[0]
    return None


flashinfer = find("flashinfer", "flashinfer")
flash_attn_3 = find("flash_attn 3", "flash_attn_interface", "flash_attn_3.flash_attn_interface")
flash_attn_2 = find("flash_attn 2", "flash_attn")
vllm_ops = find("vllm", "vllm._custom_ops")
