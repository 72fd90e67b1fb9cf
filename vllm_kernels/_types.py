"""Words that arguments take, for type checkers."""

from __future__ import annotations

from typing import Literal, TypeAlias

Layout: TypeAlias = Literal["vllm", "NHD", "HND"]
"""How a paged cache arranges its elements; :func:`vllm_kernels.paged_attention` has the shapes."""

KVCacheDType: TypeAlias = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
"""The elements of a cache, in vLLM's words; "auto" is the dtype of the keys."""

CacheDType: TypeAlias = Literal[
    "auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token", "int4_per_token"
]
"""The elements of a :class:`~vllm_kernels.kv_cache.tensors.KVCache`: those of KVCacheDType, or int8
or int4 with a scale a token and KV head."""
