"""FlashAttention 2's functions: ``from vllm_kernels.compat.flash_attn import flash_attn_func``.

Names, arguments, order, defaults and results are those of flash-attn 2.8; ``s_aux`` (attention
sinks) is added last, where callers that look for it find it. Meanings that are easily mistaken:

- causal and windows are aligned at the ends: query i of Sq sees the keys
  ``i + Sk - Sq - left .. i + Sk - Sq + right``, right 0 where causal; no key gives 0.
- ``alibi_slopes`` [num_heads] or [batch, num_heads] add ``-slope * |i + Sk - Sq - j|``. (A slope or
  scale for each sequence is a launch for each sequence.)
- ``flash_attn_with_kvcache`` puts ``k`` and ``v`` into the cache at ``cache_seqlens`` first, in
  place, turned if there are ``rotary_cos`` and ``rotary_sin``. A row is left out and gives 0 where
  cache_seqlens is -1 or the table has no page (-1) for the first new token, or where none is new
  for the last old one. Any other page that is missing is an error on a CPU, before the writing; on
  CUDA its tokens are neither stored nor seen. (Without ``k`` only cache_seqlens -1 gives 0.)
- A length past the cache, new tokens included, raises on a CPU; on CUDA the row is cut or left out.
- pages: 1, 2, 4, .. 256 tokens, of any stride. Head sizes: of caches and pages, multiples of 8 (in
  8 bits of 16) from 32 to 256; elsewhere any up to 256, and V may have one of its own.
- Shapes that do not fit are a RuntimeError that names the function and its argument.

For inference: no dropout, no gradients; softmax's probabilities are not returned (None).
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from ..errors import Error, InvalidArgument
from ..ops._refusals import renamed
from . import _attention, _direct, bert_padding
from ._checks import check_tensors, refuse
from ._options import Options

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__version__ = "2.8.3"  # whose interface this is
__path__: list[str] = []  # imported as flash_attn, a package with flash_attn.bert_padding
_ = bert_padding
flash_attn_interface = sys.modules[__name__]  # what flash_attn has under this name

Result = Any  # a tensor, or a tuple with the log-sum-exp: a union would make every caller narrow it


def _result(out: Tensor, lse: Tensor | None) -> Result:
    return out if lse is None else (out, lse, None)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """q [B, S, H, D], k, v [B, Sk, Hk, D] -> out [B, S, H, D].

    Args:
        dropout_p: 0.0; anything else is refused.
        softmax_scale: of the product; D ** -0.5 by default.
        causal: whether keys after a query's position are invisible to it. The last query has the
            position of the last key.
        window_size: (left, right): visible keys before and after the position; -1: all.
        softcap: bound on the scaled product; 0.0: none.
        alibi_slopes: [H] or [B, H] float32.
        deterministic: changes nothing: results always repeat.
        return_attn_probs: returns (out, lse [B, H, S], None).
        s_aux: [H], a logit more in the denominator of each row.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> q, k, v = torch.randn(3, 1, 5, 2, 64)  # batch, tokens, heads, head size
        >>> out = flash_attn_func(q, k, v, causal=True)
        >>> torch.allclose(out[:, 0], v[:, 0])  # the first token sees only itself
        True
    """
    refuse("flash_attn_func", dropout_p=dropout_p)
    options = Options(
        "flash_attn_func", softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux,
        returns_lse=return_attn_probs,
    )  # fmt: skip
    return _result(*_attention.dense(q, k, v, options))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Result:
    """q [T, H, D], k, v [Tk, Hk, D] -> out [T, H, D], for B sequences one after the other.

    Args:
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32 or int64: where each sequence's tokens start, and
            the last one's end. A query that no sequence has gives 0.
        max_seqlen_q: a bound on a sequence's queries. A CPU refuses longer ones; CUDA gives the
            queries past it 0.
        max_seqlen_k: the most keys of a sequence; a hint that decides whether keys are split.
        block_table: [B, width] int32 or int64: k and v are then pages [blocks, page, Hk, D].
        return_attn_probs: returns (out, lse [H, T], None).

    The other arguments are those of :func:`flash_attn_func`.

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
    if not (dropout_p or alibi_slopes is not None or return_attn_probs):
        direct = (
            _direct.varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                causal, window_size, softcap, s_aux,
            )
            if block_table is None
            else _direct.with_kvcache(
                q, k, v, None, None, cu_seqlens_k, block_table, softmax_scale, causal, window_size,
                softcap, s_aux, cu_seqlens_q, max_seqlen_q, cumulative=True,
            )
        )  # fmt: skip
        if direct is not None:
            return direct
    refuse("flash_attn_varlen_func", dropout_p=dropout_p)
    options = Options(
        "flash_attn_varlen_func", softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux,
        returns_lse=return_attn_probs,
    )  # fmt: skip
    out, lse = _attention.varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, options, None, max_seqlen_k, block_table
    )
    return _result(out, lse)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """q [B, S, H, D] over caches, into which it puts k and v before -> out like q.

    Args:
        k_cache, v_cache: [B_cache, length, Hk, D]; with a block_table pages [blocks, page, Hk, D].
        k, v: [B, new, Hk, D]: put behind the tokens that the cache has, in place.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]: turn q and k at their positions.
        cache_seqlens: [B] int32 or int64, or one length for all: tokens before k and v. None: the
            caches are full.
        cache_batch_idx: [B]: the row of the cache that each sequence has.
        cache_leftpad: [B]: tokens at the front of each row that are no keys.
        block_table: [B, width] int32 or int64.
        rotary_interleaved: whether pairs of dimensions are turned together, not halves.
        num_splits: changes nothing.
        return_softmax_lse: returns (out, lse [B, H, S]).

    The other arguments are those of :func:`flash_attn_func`.

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
        rotary_cos is None and rotary_sin is None and cache_batch_idx is None
        and cache_leftpad is None and alibi_slopes is None and not return_softmax_lse
        and isinstance(cache_seqlens, Tensor)
    ):  # fmt: skip
        direct = _direct.with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens, block_table, softmax_scale, causal,
            window_size, softcap, s_aux,
        )  # fmt: skip
        if direct is not None:
            return direct
    options = Options(
        "flash_attn_with_kvcache", softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux,
        returns_lse=return_softmax_lse,
    )  # fmt: skip
    rotary = (rotary_cos, rotary_sin)
    out, lse = _attention.with_cache(
        q, k_cache, v_cache, k, v, rotary, rotary_interleaved, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, options,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def _unpacked(function: str, name: str, rows: Tensor, count: int, lead: str) -> tuple[Tensor, ...]:
    """rows [*lead, count, H, D] apart."""
    check_tensors(function, **{name: rows})
    rank = lead.count(",") + 4
    if rows.dim() != rank or rows.shape[-3] != count:
        raise InvalidArgument(
            f"{function}: {name}: expected shape [{lead}, {count}, num_heads, head_size], got "
            f"{list(rows.shape)}"
        )
    return rows.unbind(-3)


_KV = {"k": "kv", "v": "kv"}
_QKV = {
    "q": "qkv", "k": "qkv", "v": "qkv", "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen", "max_seqlen_k": "max_seqlen",
}  # fmt: skip
"""What the packed forms call the arguments of the others."""


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of qkv [B, S, 3, H, D], with its other arguments.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> qkv = torch.randn(1, 5, 3, 2, 64)
        >>> out = flash_attn_qkvpacked_func(qkv, causal=True)
        >>> torch.allclose(out[:, 0], qkv[:, 0, 2])
        True
    """
    q, k, v = _unpacked("flash_attn_qkvpacked_func", "qkv", qkv, 3, "batch, seqlen")
    try:
        return flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, s_aux,
        )  # fmt: skip
    except Error as error:
        raise renamed(error, "flash_attn_qkvpacked_func", _QKV) from None


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of kv [B, Sk, 2, Hk, D], with its other arguments.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> q, kv = torch.randn(1, 5, 2, 64), torch.randn(1, 5, 2, 2, 64)
        >>> out = flash_attn_kvpacked_func(q, kv, causal=True)
        >>> torch.allclose(out[:, 0], kv[:, 0, 1])
        True
    """
    k, v = _unpacked("flash_attn_kvpacked_func", "kv", kv, 2, "batch, seqlen_k")
    try:
        return flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, s_aux,
        )  # fmt: skip
    except Error as error:
        raise renamed(error, "flash_attn_kvpacked_func", _KV) from None


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` of qkv [T, 3, H, D], with its other arguments.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> qkv, starts = torch.randn(7, 3, 2, 64), torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> out = flash_attn_varlen_qkvpacked_func(qkv, starts, 4, causal=True)
        >>> torch.allclose(out[3], qkv[3, 2])
        True
    """
    q, k, v = _unpacked("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, "total")
    try:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
            causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, None,
            s_aux,
        )  # fmt: skip
    except Error as error:
        raise renamed(error, "flash_attn_varlen_qkvpacked_func", _QKV) from None


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` of kv [Tk, 2, Hk, D], with its other arguments.

    Raises:
        Unsupported: for an argument of flash-attn that this library does not have, by name.
        RuntimeError: for another dtype, shape or device than above, by name.

    Example:
        >>> q, kv = torch.randn(7, 2, 64), torch.randn(7, 2, 2, 64)
        >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> out = flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 4, 4, causal=True)
        >>> torch.allclose(out[3], kv[3, 1])
        True
    """
    k, v = _unpacked("flash_attn_varlen_kvpacked_func", "kv", kv, 2, "total_k")
    try:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
            softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, None, s_aux,
        )  # fmt: skip
    except Error as error:
        raise renamed(error, "flash_attn_varlen_kvpacked_func", _KV) from None
