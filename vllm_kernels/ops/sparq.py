"""Attention to the tokens with the best approximate scores, and the mean of the values."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from .._types import Layout
from ..errors import InvalidArgument, Unsupported
from ._common import calls, shape_of
from ._refusals import refused

__all__ = ["sparq_attention", "value_mean_update"]

call = calls(__all__)


@overload
def sparq_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    r: int = ...,
    k: int = ...,
    window: int | None = ...,
    sink_tokens: int = ...,
    select: Literal["pages", "tokens"] = ...,
    components: Literal["chunks", "single"] = ...,
    mean_value: Tensor | None = ...,
    scale: float | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    workspace: Tensor | None = ...,
) -> Tensor: ...


@overload
def sparq_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    r: int = ...,
    k: int = ...,
    window: int | None = ...,
    sink_tokens: int = ...,
    select: Literal["pages", "tokens"] = ...,
    components: Literal["chunks", "single"] = ...,
    mean_value: Tensor | None = ...,
    scale: float | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: Literal[True],
    workspace: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def sparq_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    r: int = ...,
    k: int = ...,
    window: int | None = ...,
    sink_tokens: int = ...,
    select: Literal["pages", "tokens"] = ...,
    components: Literal["chunks", "single"] = ...,
    mean_value: Tensor | None = ...,
    scale: float | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    layout: Layout = ...,
    out: Tensor | None = ...,
    return_lse: bool = ...,
    workspace: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def sparq_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    r: int = 32,
    k: int = 1024,
    window: int | None = None,
    sink_tokens: int = 0,
    select: Literal["pages", "tokens"] = "pages",
    components: Literal["chunks", "single"] = "chunks",
    mean_value: Tensor | None = None,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Layout = "vllm",
    out: Tensor | None = None,
    return_lse: bool = False,
    workspace: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode attention that reads a part of K to choose tokens, and K and V of these alone.

    For each KV head and its group of query heads ``q_g``:

    1. The chunks of components with the largest sum of ``|q_g|`` over the group are chosen, r
       components in all.
    2. Each token gets the approximate score ``scale * f_g * q_g . k`` over these components, where
       ``f_g ** 2`` is the sum of ``|q_g|`` over all components by that over the chosen ones.
    3. The group's scores are added up. A page has that of its best token. Pages (or tokens) are
       kept as :func:`select_pages` keeps them: sinks, the newest, then by falling score.
    4. The query attends to the tokens of the kept pages.

    With a k that covers all tokens the result is that of :func:`vllm_kernels.paged_attention`, and
    no scores are computed. Positions are lost: there is no sliding window and no ALiBi.
    ``reference.sparq_attention`` is the exact meaning.

    Args:
        query: [num_seqs, num_heads, head_size] float32, float16 or bfloat16, contiguous, one token
            a sequence, after RoPE. num_heads is a multiple of num_kv_heads. head_size as
            :func:`vllm_kernels.paged_attention` has it.
        key_cache, value_cache: as :func:`vllm_kernels.paged_attention` has them. Blocks and KV
            heads (and tokens, if tokens are selected) of both are equally far apart, in units of
            one stride each; caches without gaps are.
        block_tables: [num_seqs, max_pages] int32; entries after a sequence's pages are ignored.
        seq_lens: [num_seqs] int32, tokens, the new one included.
        r: components, whole chunks. A chunk has 16 bytes of a token's K in layout "vllm", 32 in the
            others (16 where 32 do not divide a row): 8 and 16 components in 16 bits.
        k: tokens that are kept of a sequence, rounded down to whole pages, for each KV head.
        window: the newest tokens, always kept; None stands for k // 4. The current one always is.
        sink_tokens: the first tokens, always kept.
        select: "pages", or "tokens" for layouts "NHD" and "HND".
        components: "chunks". ``reference.sparq_attention`` also has "single".
        mean_value: [num_seqs, num_kv_heads, head_size], of :func:`value_mean_update`. The result is
            ``alpha * out + (1 - alpha) * mean_value``, where alpha is the kept part of the softmax
            of the approximate scores. Another dtype than query's is converted.
        scale: of the scores; None stands for head_size ** -0.5.
        k_scale, v_scale: of an 8-bit cache, one float32 element; None stands for 1.
        layout: "vllm", "NHD" or "HND".
        out: [num_seqs, num_heads, head_size], contiguous, written; made if None.
        return_lse: whether to return the log-sum-exp as well.
        workspace: as :func:`vllm_kernels.paged_attention` has it.

    Warning:
        On CUDA this or a later call may never end if seq_lens change while it runs, or if another
        call uses its workspace or the stream's at the same time.

    Returns:
        out, or (out, lse). lse: [num_seqs, num_heads] float32, of the kept tokens, natural
        logarithm.

    Two launches on CUDA (three with mean_value), without a sync and safe in graphs. A NaN of the
    query counts as 0 in the choice. A token whose approximate score is NaN has the lowest one.

    Raises:
        Unsupported: for ``components="single"``.
        RuntimeError: for another dtype, shape, stride or device than above, an r or k that does not
            fit, or outputs that overlap another tensor. On the CPU also for a length or a block out
            of range. On CUDA also for a query group (query heads of a KV head x head_size) above
            24,000 elements, or 56,000 on Hopper. There a length is cut to the table, and a bad
            block's page comes last and is skipped; both are reported with VLLM_KERNELS_CHECK=1.

    Example:
        >>> query = torch.randn(1, 8, 64)
        >>> key_cache, value_cache = torch.randn(2, 64, 16, 2, 64)  # layout NHD
        >>> tables = torch.arange(64, dtype=torch.int32)[None]
        >>> lens = torch.tensor([1000], dtype=torch.int32)
        >>> vllm_kernels.sparq_attention(
        ...     query, key_cache, value_cache, tables, lens, r=16, k=256, layout="NHD"
        ... ).shape
        torch.Size([1, 8, 64])

    Source: SparQ, Ribar et al. 2024, arXiv:2312.04985.
    """
    op = "sparq_attention"
    if components == "single":
        raise Unsupported(
            f'{op}: components: expected "chunks", got "single", which is in reference.{op} alone'
        )
    if components != "chunks":
        raise InvalidArgument(f'{op}: components: expected "chunks", got {components!r:.40}')
    num_seqs, num_heads, head_size = shape_of(
        op, "query", query, "num_seqs", "num_heads", "head_size"
    )
    if scale is None:
        scale = max(1, head_size) ** -0.5
    if window is None:
        window = k // 4 if isinstance(k, int) else 0
    try:
        if isinstance(mean_value, Tensor):
            mean_value = mean_value.to(query.dtype)
        if out is None:
            out = query.new_empty(num_seqs, num_heads, head_size)
        lse = query.new_empty(num_seqs, num_heads, dtype=torch.float32) if return_lse else None
    except (RuntimeError, TypeError, AttributeError) as error:
        given = {"query": query, "mean_value": mean_value, "return_lse": return_lse}
        raise refused(op, error, given) from None
    call.sparq_attention(
        out, lse, query, key_cache, value_cache, block_tables, seq_lens, scale, r, k, window,
        sink_tokens, select, mean_value, k_scale, v_scale, layout, workspace,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def value_mean_update(mean: Tensor, counts: Tensor, value: Tensor, rows: Tensor) -> None:
    """Brings up to date the mean of V of each row, for :func:`sparq_attention`.

    Call it with the values of a step. A row is a sequence of the batch. The mean of a row becomes
    that of the values it had and of the new ones, added in float32 in the order of the call.

    - A new sequence in a row: set its count to 0 first. Its old mean is then not read.
    - A sequence that was cut, or a fork: set the count to 0 and name the values that are left, or
      copy mean and count of the parent.

    Args:
        mean: [num_rows, num_kv_heads, head_size] float32, contiguous, written.
        counts: [num_rows] int32, values that each mean has, contiguous, written.
        value: [num_tokens, num_kv_heads, head_size] float32, float16 or bfloat16; the strides of
            tokens and heads are free.
        rows: [num_tokens] int64, the row of each token; -1 is skipped.

    One launch on CUDA, safe in graphs; a result repeats bit for bit. Each row looks through the
    tokens of the call.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or overlapping tensors.
            On the CPU also for a row out of range, before anything is written; on CUDA such a token
            is skipped, and reported with VLLM_KERNELS_CHECK=1.

    Example:
        >>> mean, counts = torch.zeros(1, 1, 2), torch.zeros(1, dtype=torch.int32)
        >>> value = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]])
        >>> vllm_kernels.value_mean_update(mean, counts, value, torch.tensor([0, 0]))
        >>> mean.flatten().tolist(), counts.tolist()
        ([2.0, 4.0], [2])

    Source: SparQ, Ribar et al. 2024, arXiv:2312.04985.
    """
    call.value_mean_update(mean, counts, value, rows)
