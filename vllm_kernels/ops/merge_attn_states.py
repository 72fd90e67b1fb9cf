"""Attention over disjoint sets of keys, put together by its log-sum-exp."""

from __future__ import annotations

import math

from torch import Tensor

from ._common import (
    calls,
)

__all__ = ["combine_attn_partials", "merge_attn_states"]

call = calls(["merge_attn_states", "combine_attn_partials"])


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Merges attention over two disjoint sets of keys by their log-sum-exp.

    The registered op has output_lse second; this order is that of vLLM's wrapper. (Merging partial
    softmax results: Milakov and Gimelshein 2018, arXiv:1805.02867.)

    Args:
        output: [num_tokens, num_heads, head_size], written; may be prefix_output or suffix_output.
        prefix_output, suffix_output: the same shape and dtype; the strides of tokens and heads are
            free in all three.
        prefix_lse, suffix_lse: [num_heads, num_tokens] float32, contiguous, natural logarithm. -inf
            (and +inf) marks a part without keys, whose output is not read.
        output_lse: [num_heads, num_tokens] float32, written; may be prefix_lse or suffix_lse.

    Where both parts are empty the output is 0 and its lse -inf.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> prefix, suffix = torch.zeros(1, 1, 8), torch.ones(1, 1, 8)  # [tokens, heads, head_size]
        >>> lse, out = torch.zeros(1, 1), torch.empty(1, 1, 8)
        >>> vllm_kernels.merge_attn_states(out, prefix, lse, suffix, lse)
        >>> out[0, 0, 0].item()
        0.5
    """
    call.merge_attn_states(output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse)


def combine_attn_partials(
    output: Tensor,
    out_partial: Tensor,
    lse_partial: Tensor,
    output_lse: Tensor | None = None,
    *,
    base2: bool = False,
) -> None:
    """Combines attention over disjoint sets of keys, in one launch.

    It takes partial results as :func:`paged_attention` gives them and weighs them by their
    log-sum-exp. It is :func:`merge_attn_states` for any number of partial results, as FlashInfer's
    merge_states and FlashAttention-3's flash_attn_combine. The registered op has output_lse second.

    Args:
        output: [num_tokens, num_heads, head_size], written; the dtype of out_partial. The strides
            of tokens and heads are free.
        out_partial: [num_partials, num_tokens, num_heads, head_size], float32, float16 or bfloat16.
            All strides but the last are free.
        lse_partial: [num_partials, num_tokens, num_heads] float32, contiguous, natural logarithm.
            -inf (and +inf) marks a partial result without keys. Its out_partial is not read.
        output_lse: [num_tokens, num_heads] float32, written.
        base2: Whether both lse are logarithms to base 2, as FlashInfer has them. They are converted
            outside the kernel, by one more launch each.

    Where all partial results are empty the output is 0 and its lse -inf.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> partials = torch.stack([torch.zeros(1, 1, 8), torch.ones(1, 1, 8)])
        >>> out = torch.empty(1, 1, 8)
        >>> vllm_kernels.combine_attn_partials(out, partials, torch.zeros(2, 1, 1))
        >>> out[0, 0, 0].item()
        0.5
    """
    if base2 and isinstance(lse_partial, Tensor):
        lse_partial = lse_partial * math.log(2)
    call.combine_attn_partials(output, output_lse, out_partial, lse_partial)
    if base2 and output_lse is not None:
        output_lse.div_(math.log(2))
