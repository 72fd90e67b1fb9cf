"""Rotary position embedding."""

from __future__ import annotations

from torch import Tensor

from vllm_kernels.ops._common import inference_only, library_ops

__all__ = [
    "rotary_embedding",
]


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> None:
    """Rotary position embedding of query and key, in place.

    The first ``rotary_size`` elements of each head are turned in pairs by the angle of the token's
    position: ``(x, y) -> (x cos - y sin, y cos + x sin)``, in float32 and rounded once (Su et al.
    2021, arXiv:2104.09864). The rest of the head stays as it is.

    Args:
        positions: [tokens] or [batch, seq], int64; sequences may be strided (or one, expanded).
        query: [positions' dimensions, heads * head_size] or [..., heads, head_size], written;
            float32, float16 or bfloat16. Tokens and heads may be strided.
        key: like ``query`` with its own number of heads, or None.
        head_size: elements a head.
        cos_sin_cache: [max_position, rotary_size], any floating dtype: the cosines of the angles,
            then their sines. ``rotary_size`` is even and at most ``head_size``.
        is_neox: pairs ``(i, i + rotary_size / 2)``; otherwise ``(2 i, 2 i + 1)`` as in GPT-J.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given. A position outside
            of ``cos_sin_cache`` is an error on a CPU; on a GPU its token is left unchanged.
    """
    inference_only("rotary_embedding", query, key, cos_sin_cache)
    library_ops.rotary_embedding.default(positions, query, key, head_size, cos_sin_cache, is_neox)
