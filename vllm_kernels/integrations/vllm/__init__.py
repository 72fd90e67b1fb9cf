"""vLLM's V1 engine on this library's kernels: an attention backend, and small ops.

vLLM finds it by the entry point ``vllm_kernels`` of the group vllm.general_plugins
(``vllm_kernels_plugin.py``). Nothing changes until it is asked for: by ``VLLM_KERNELS_VLLM=1``, or
on a GPU by ``--attention-backend CUSTOM``. docs/scale_out.md says how to use it.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from torch.compiler import is_compiling

from ..._requirements import require_vllm

__all__ = ["calls", "enable"]

calls: Counter[str] = Counter()
"""How often vLLM called our methods and small ops in this process, by their names. Compiled code
and CUDA graphs call attention, and no small op, through Python: a graph once, at capture."""


def __getattr__(name: str) -> Any:
    """``Backend``, the class that vLLM resolves by its path, after a look at vLLM's version."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_vllm(__name__)
    from .backend import Backend

    return Backend


def count(name: str) -> None:
    if not is_compiling():
        calls[name] += 1


def enable() -> None:
    """Registers what vLLM then uses without being told, in this process; a second call does
    nothing.

    - On a CPU the attention backend takes the place of vLLM's own. vLLM's CPU platform takes no
      other name. On a GPU this stays the user's choice, and a warning in the log says so.
    - ``SiluAndMul`` and ``RotaryEmbedding`` get our kernels wherever vLLM's custom ops are on.
    - ``rms_norm`` and ``fused_add_rms_norm`` get the provider "vllm_kernels", which
      ``ir_op_priority`` chooses.

    Raises:
        ImportError: no vLLM, or a version that is not supported.

    Source: vLLM's doors for plugins: register_backend, CustomOp.register_oot, IrOp.register_impl.
    """
    require_vllm(__name__)
    from vllm import envs
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .small_ops import register_small_ops

    # vLLM warns of variables VLLM_* that it does not know, and its cache of compiled graphs has
    # the values of these.
    for name in os.environ:
        if name.startswith("VLLM_KERNELS_"):
            envs.environment_variables.setdefault(name, lambda name=name: os.environ.get(name))
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.Backend")
    else:
        init_logger("vllm.vllm_kernels").warning_once(
            "VLLM_KERNELS_VLLM=1 turns on small ops alone on a GPU. For attention, start vLLM with "
            "--attention-backend CUSTOM"
        )
    register_small_ops()
