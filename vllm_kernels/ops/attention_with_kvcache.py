"""Attention over a cache that takes a call's new tokens first."""

from __future__ import annotations

from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .._types import Layout
from ._common import entry_points, inference_only
from ._refusals import refused

__all__ = ["attention_with_kvcache"]

_traced, _direct = entry_points("attention_with_kvcache")


def attention_with_kvcache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    seq_lens: Tensor,
    *,
    block_tables: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 0,
    scale: float | None = None,
    sliding_window: int = 0,
    causal: bool = True,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cumulative: bool = False,
    layout: Layout = "NHD",
) -> Tensor:
    """Puts the new tokens of each sequence behind the cached ones, and attends to both.

    It is :func:`reshape_and_cache_flash` and :func:`paged_attention` in one call, with the indices
    that they need in between: slots, lengths, starts, and the pages of a cache without a block
    table. FlashAttention has it as ``flash_attn_with_kvcache``
    (Dao 2023, arXiv:2307.08691). A call without new tokens only attends.

    A row is padding if its length is negative, or if its table has no page (-1) for the first new
    token. A padded row stores nothing and gives 0. Scores and masks are those of
    :func:`paged_attention`.

    Args:
        query: [batch, query_len, num_heads, head_size]: as many query tokens for each sequence. Or
            [num_tokens, num_heads, head_size], one a sequence or by query_start_loc. float32,
            float16 or bfloat16; one stride between all tokens. Tokens that no sequence owns get
            0.
        key_cache, value_cache: written if there are new tokens. With a block table pages as
            :func:`paged_attention` has them. Without one a row for each sequence, [batch_cache,
            length, num_kv_heads, head_size]; both have rows equally many tokens apart.
        seq_lens: [num_seqs] int32, the tokens that the cache holds before the new ones.
        block_tables: [num_seqs, max_blocks_per_seq] int32, or None for rows.
        key, value: [num_seqs, new_tokens, num_kv_heads, head_size], dtype of query, or None. An
            8-bit cache stores them rounded, with a scale of 1.
        query_start_loc: [num_seqs + 1] int32, where each sequence's query tokens start; for query
            of three dimensions.
        max_query_len: a bound on a sequence's query tokens, by query_start_loc; 0: num_tokens.
        scale, sliding_window, causal, window_right, softcap: as :func:`paged_attention` has them.
        sinks: [num_heads] float32.
        cumulative: seq_lens is [num_seqs + 1], and its differences are the lengths.
        layout: of pages: "vllm", "NHD" or "HND".

    Warning:
        On CUDA a call may never end if seq_lens or query_start_loc change while it runs, or if
        another call uses the stream's workspace at the same time.

    Returns:
        A new contiguous tensor like query.

    Raises:
        RuntimeError: for another dtype, shape or device than above, by name. On the CPU also for a
            length without room for the new tokens, or a page out of range, before anything is
            written; on CUDA such a row is contained (cut, or left out).

    Example:
        >>> import torch, vllm_kernels
        >>> cache = torch.zeros(2, 1, 16, 2, 64)  # keys and values, one sequence, 16 tokens
        >>> token = torch.randn(1, 1, 2, 64)
        >>> out = vllm_kernels.attention_with_kvcache(
        ...     token, cache[0], cache[1], torch.zeros(1).int(), key=token, value=token)
        >>> bool(torch.equal(out, token) and torch.equal(cache[0, :, :1], token))
        True
    """
    if is_grad_enabled():
        inference_only("attention_with_kvcache", query, key_cache, value_cache, key, value, sinks)
    op = _traced if is_dynamo_compiling() else _direct
    if causal:
        window_right = 0
    try:
        return op(
            query, key_cache, value_cache, seq_lens, block_tables, key, value, query_start_loc,
            max_query_len, scale, sliding_window, window_right, softcap, sinks, cumulative, layout,
        )  # fmt: skip
    except (RuntimeError, TypeError, IndexError) as error:
        raise refused("attention_with_kvcache", error, locals()) from None
