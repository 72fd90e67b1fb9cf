"""FlashAttention 3's functions: ``from vllm_kernels.compat.flash_attn_interface import ..``.

Names, arguments, order and defaults are those of flash-attn 3 (``flash_attn_interface``); what its
relatives add comes last: ``s_aux`` (vLLM's) and ``sinks`` (``sgl_kernel.flash_attn``) for attention
sinks, ``return_softmax_lse`` and ``ver``. What is said in :mod:`vllm_kernels.compat.flash_attn`
holds here. Hints to kernels (num_splits, pack_gqa, sm_margin, scheduler_metadata, deterministic,
ver) change nothing. 8-bit q, k and v stand for element * descale [batch, num_kv_heads]; the result
is bfloat16. Not supported, and refused by name: qv, attention_chunk, rotary_seqlens, seqused_q.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _attention, _direct
from ._checks import refuse
from ._options import Options

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Result = Any  # a tensor, or (out, lse): a union would make every caller narrow it


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    return_softmax_lse: bool = False,
    ver: int = 3,
) -> Result:
    """q [B, S, H, D], k, v [B, Sk, Hk, D] -> out, or (out, lse [B, H, S]).

    Args:
        q_descale, k_descale, v_descale: [B, Hk] float32, for 8-bit tensors.
        sinks: as s_aux.

    The other arguments are those of :func:`vllm_kernels.compat.flash_attn.flash_attn_func`, or
    hints.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> q, k, v = torch.randn(3, 1, 5, 2, 64)  # batch, tokens, heads, head size
        >>> out = flash_attn_func(q, k, v, causal=True)
        >>> torch.allclose(out[:, 0], v[:, 0])  # the first token sees only itself
        True
    """
    refuse("flash_attn_func", qv=qv, attention_chunk=attention_chunk)
    options = Options(
        "flash_attn_func", softmax_scale, causal, window_size, softcap, None,
        s_aux if sinks is None else sinks, q_descale, k_descale, v_descale,
        return_attn_probs or return_softmax_lse,
    )  # fmt: skip
    out, lse = _attention.dense(q, k, v, options)
    return out if lse is None else (out, lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    return_softmax_lse: bool = False,
    ver: int = 3,
) -> Result:
    """q [T, H, D], k [Tk, Hk, D], v [Tk, Hk, Dv] -> out [T, H, Dv], or (out, lse [H, T]).

    Args:
        seqused_k: [B]: keys of each sequence that count; needs max_seqlen_k.

    The other arguments are those of
    :func:`vllm_kernels.compat.flash_attn.flash_attn_varlen_func`, or hints.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> q, k, v = torch.randn(3, 7, 2, 64)  # two sequences, of 3 and 4 tokens
        >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q, k, v, starts, starts, 4, 4, causal=True)
        >>> torch.allclose(out[3], v[3])  # the first token of the second sequence
        True
    """
    if (
        seqused_q is None and seqused_k is None and qv is None and q_descale is None
        and k_descale is None and v_descale is None and not attention_chunk
        and not return_attn_probs and not return_softmax_lse
    ):  # fmt: skip
        direct = _direct.varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size, softcap, s_aux if sinks is None else sinks,
        )  # fmt: skip
        if direct is not None:
            return direct
    refuse("flash_attn_varlen_func", seqused_q=seqused_q, qv=qv, attention_chunk=attention_chunk)
    options = Options(
        "flash_attn_varlen_func", softmax_scale, causal, window_size, softcap, None,
        s_aux if sinks is None else sinks, q_descale, k_descale, v_descale,
        return_attn_probs or return_softmax_lse,
    )  # fmt: skip
    out, lse = _attention.varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, options, seqused_k, max_seqlen_k
    )
    return out if lse is None else (out, lse)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    ver: int = 3,
) -> Result:
    """q [B, S, H, D] -> out like q, or (out, lse [B, H, S]).

    Args:
        page_table: [B, width] int32 or int64: the caches are then pages [blocks, page, Hk, D].
        cu_seqlens_q: [B + 1]: q is then [T, H, D], and lse [H, T].
        cu_seqlens_k_new: [B + 1]: k and v are then [tokens, Hk, D]. Without k it is not looked at.
        max_seqlen_q: with cu_seqlens_q a bound on a sequence's queries; T by default.

    The other arguments are those of
    :func:`vllm_kernels.compat.flash_attn.flash_attn_with_kvcache`, or hints.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> q, k, v = torch.randn(3, 1, 1, 2, 64)  # one new token
        >>> k_cache, v_cache = torch.zeros(2, 1, 16, 2, 64)
        >>> lengths = torch.zeros(1, dtype=torch.int32)
        >>> out = flash_attn_with_kvcache(
        ...     q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
        ... )
        >>> torch.allclose(out, v), torch.equal(k_cache[:, 0], k[:, 0])
        (True, True)
    """
    if (
        qv is None and rotary_cos is None and rotary_sin is None and cache_batch_idx is None
        and cache_leftpad is None and rotary_seqlens is None and q_descale is None
        and k_descale is None and v_descale is None and not attention_chunk
        and not return_softmax_lse and isinstance(cache_seqlens, Tensor)
        and (cu_seqlens_q is None or k is None)
    ):  # fmt: skip
        direct = _direct.with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens, page_table, softmax_scale, causal,
            window_size, softcap, s_aux if sinks is None else sinks, cu_seqlens_q, max_seqlen_q,
        )  # fmt: skip
        if direct is not None:
            return direct
    refuse(
        "flash_attn_with_kvcache", qv=qv, rotary_seqlens=rotary_seqlens,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    options = Options(
        "flash_attn_with_kvcache", softmax_scale, causal, window_size, softcap, None,
        s_aux if sinks is None else sinks, q_descale, k_descale, v_descale,
        return_softmax_lse,
    )  # fmt: skip
    rotary = (rotary_cos, rotary_sin)
    out, lse = _attention.with_cache(
        q, k_cache, v_cache, k, v, rotary, rotary_interleaved, cache_seqlens, cache_batch_idx,
        cache_leftpad, page_table, options, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q,
        "page_table",
    )  # fmt: skip
    return out if lse is None else (out, lse)
