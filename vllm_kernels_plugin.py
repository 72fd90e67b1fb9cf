"""What vLLM calls in each of its processes: the entry point of the group vllm.general_plugins.

It lies outside of the package, whose import loads torch and the compiled libraries. A vLLM that
nobody asked to use vllm_kernels shall not pay for that.
"""

from __future__ import annotations

import os

BACKEND = "vllm_kernels.integrations.vllm.Backend"


def register() -> None:
    """Offers the attention backend to vLLM as CUSTOM. VLLM_KERNELS_VLLM=1 also turns it on.

    It may be called several times in a process.

    Raises:
        ImportError: VLLM_KERNELS_VLLM=1 with a version of vLLM that is not supported.
        ValueError: VLLM_KERNELS_VLLM is neither 0 nor 1.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    asked = os.environ.get("VLLM_KERNELS_VLLM") or "0"
    if asked not in ("0", "1"):
        raise ValueError(f"VLLM_KERNELS_VLLM={asked}: expected 0 or 1")
    if asked == "1" or not AttentionBackendEnum.CUSTOM.is_overridden():  # by another plugin
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if asked == "1":
        from vllm_kernels.integrations.vllm import enable

        enable()
