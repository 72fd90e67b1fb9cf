"""Sampling: from logits to tokens."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from ..errors import InvalidArgument
from ._common import calls, shape_of
from ._refusals import short

__all__ = [
    "append_token_counts",
    "apply_repetition_penalties",
    "apply_token_bitmask_",
    "sample",
    "softmax",
    "spec_verify",
    "token_logprobs",
    "top_k_top_p_mask_",
]

call = calls(__all__)

TokenLists = tuple[Tensor, Tensor, Tensor]
"""A list of tokens per sample: indptr int32 [num_samples + 1], tokens int32 [entries] and values
[entries]. The tokens of a sample are distinct. Token -1 skips its entry."""

MAX_TOP_LOGPROBS = 128


@overload
def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None = ...,
    top_k: Tensor | None = ...,
    top_p: Tensor | None = ...,
    min_p: Tensor | None = ...,
    uniforms: Tensor | None = ...,
    seeds: Tensor | None = ...,
    offsets: Tensor | None = ...,
    bitmask: Tensor | None = ...,
    bitmask_rows: Tensor | None = ...,
    token_counts: TokenLists | None = ...,
    repetition: Tensor | None = ...,
    frequency: Tensor | None = ...,
    presence: Tensor | None = ...,
    bias: TokenLists | None = ...,
    rows: Tensor | None = ...,
    num_logprobs: None = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None = ...,
    top_k: Tensor | None = ...,
    top_p: Tensor | None = ...,
    min_p: Tensor | None = ...,
    uniforms: Tensor | None = ...,
    seeds: Tensor | None = ...,
    offsets: Tensor | None = ...,
    bitmask: Tensor | None = ...,
    bitmask_rows: Tensor | None = ...,
    token_counts: TokenLists | None = ...,
    repetition: Tensor | None = ...,
    frequency: Tensor | None = ...,
    presence: Tensor | None = ...,
    bias: TokenLists | None = ...,
    rows: Tensor | None = ...,
    num_logprobs: int,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    offsets: Tensor | None = None,
    bitmask: Tensor | None = None,
    bitmask_rows: Tensor | None = None,
    token_counts: TokenLists | None = None,
    repetition: Tensor | None = None,
    frequency: Tensor | None = None,
    presence: Tensor | None = None,
    bias: TokenLists | None = None,
    rows: Tensor | None = None,
    num_logprobs: int | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws one token per sample, in one launch and without a sort.

    The steps, in vLLM's order and in float32: the bitmask, the bias, the penalties, division by the
    temperature, min_p, top_k, top_p over what top_k kept, the draw. Of equal logits the first come
    first. The draw inverts the cumulated weights of the kept tokens in index order. Weights are
    integers: a token depends only on its own row and parameters, and CPU and CUDA give the same.
    ``vllm_kernels.reference.sample`` is the exact meaning.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16, vocab_size <= 262,144. Not
            modified. Rows may be strided.
        temperature: float32 [num_samples], contiguous, as all parameters are. Below 1e-5 a sample
            is greedy: the first of the highest logits, without min_p, top_k and top_p. None: all
            are greedy.
        top_k: int32 [num_samples]; 0, -1 or None: all tokens.
        top_p: float32 [num_samples]; 1 or None: all tokens. At least one token is kept.
        min_p: float32 [num_samples]; keeps logits of at least the highest + ln(min_p). 0 or None:
            all tokens.
        uniforms: float32 [num_samples] in [0, 1], the random numbers. Others, and NaN, draw some
            kept token.
        seeds, offsets: int64 [num_samples], in place of ``uniforms``: Philox 4x32-10 with a seed's
            key and an offset's counter.
        bitmask: int32 [mask_rows, words]. Bit j % 32 of word j // 32 allows token j; tokens past
            the last word are allowed. xgrammar's layout.
        bitmask_rows: int32 [num_samples], the mask's row of each sample, -1: none. None: i.
        token_counts: lists (indptr int32 [num_samples + 1], tokens int32 [entries], counts int32
            [entries]). Those of sample i are entries indptr[i] to indptr[i + 1] - 1. A token stands
            there once; -1 skips its entry. A count of 0 is a token of the prompt alone. Errors name
            the tensors ``count_indptr``, ``count_tokens`` and ``counts``.
        repetition: float32 [num_samples]. Divides positive logits of listed tokens, multiplies
            others.
        frequency: float32 [num_samples], subtracted count times.
        presence: float32 [num_samples], subtracted if the count is above 0.
        bias: such lists (indptr, tokens, float32 values), added to the logits. Errors name them
            ``bias_indptr``, ``bias_tokens`` and ``bias_values``.
        rows: int32 [num_samples], the row of logits of each sample, which samples may share.
            None: i.
        num_logprobs: 0 to 128, the number of most likely tokens whose log-probabilities are
            returned, too, after that of the drawn one. None: no log-probabilities.
        out: int64 [num_samples]; made if None. Errors name it ``tokens``.

    Returns:
        Tokens, int64 [num_samples]. If the highest logit of a row is NaN, +inf or -inf, its first
        token with that logit.

        With ``num_logprobs``: ``(tokens, logprobs, ids, ranks)``, also what ``token_logprobs``
        gives for these tokens. It is the log_softmax of the logits as they are: no mask, no bias,
        no penalties, no temperature. CUDA finds it in the same launch. A greedy row or one with a
        top_k is usually read once if it has no mask, bias or penalties; docs/sampling.md has the
        conditions. Its log-probabilities then differ from those of ``token_logprobs`` by at most
        about 2e-6, the same for all its tokens, and a rounding. Other rows are read again.

    Raises:
        RuntimeError: for logits that are not [rows, vocab] floats of at most 262,144 columns, and
            for a parameter of another dtype, size or device, by name.

    Example:
        >>> logits = torch.tensor([[0.0, 3.0, 1.0]])
        >>> vllm_kernels.sample(logits)
        tensor([1])
        >>> ones = torch.ones(1)
        >>> vllm_kernels.sample(logits, temperature=ones, uniforms=0.99 * ones)
        tensor([2])
        >>> vllm_kernels.sample(torch.zeros(1, 2), num_logprobs=0)
        (tensor([0]), tensor([[-0.6931]]), tensor([[0]]), tensor([2]))
    """
    if out is None or num_logprobs is not None:
        samples = shape_of("sample", "logits", logits, "num_rows", "vocab_size")[:1]
        if rows is not None:
            samples = shape_of("sample", "rows", rows, "num_samples")
    if out is None:
        out = torch.empty(samples, dtype=torch.int64, device=logits.device)
    found = None
    if num_logprobs is not None:
        found = _made_for_logprobs("sample", "num_logprobs", num_logprobs, samples, logits.device)
    call.sample(
        out, logits, temperature, top_k, top_p, min_p, uniforms, seeds, offsets, bitmask,
        bitmask_rows, *_three("token_counts", "counts", token_counts), repetition, frequency,
        presence, *_three("bias", "values", bias), rows, *(found or (None, None, None)),
    )  # fmt: skip
    return out if found is None else (out, *found)


def _three(
    name: str, values: str, lists: TokenLists | None
) -> TokenLists | tuple[None, None, None]:
    """Returns the tensors of some lists, or as many None."""
    if lists is None:
        return None, None, None
    if not isinstance(lists, (tuple, list)) or len(lists) != 3:
        expected = f"(indptr, tokens, {values})"
        raise InvalidArgument(f"sample: {name}: expected {expected}, got {short(lists)}")
    return lists


def _made_for_logprobs(
    op: str, name: str, num_top: int, samples: torch.Size, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logprobs, ids and ranks, which an op fills."""
    if not isinstance(num_top, int) or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        expected = f"an int of 0 to {MAX_TOP_LOGPROBS}"
        raise InvalidArgument(f"{op}: {name}: expected {expected}, got {short(num_top)}")
    shape = (*samples, 1 + num_top)
    logprobs = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    return logprobs, ids, torch.empty(samples, dtype=torch.int64, device=device)


def top_k_top_p_mask_(
    logits: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Sets logits to -inf that ``sample`` would not keep, at temperature 1.

    A row whose highest logit is not finite stays as it is.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16, written. Rows may be strided.
        top_k: int32 [num_rows]; 0, -1 or None: all tokens.
        top_p: float32 [num_rows]; 1 or None: all tokens.
        min_p: float32 [num_rows]; 0 or None: all tokens.

    Returns:
        ``logits``.

    Raises:
        RuntimeError: for logits or limits of another dtype, size or device, by name.

    Example:
        >>> logits = torch.tensor([[0.0, 3.0, 1.0]])
        >>> vllm_kernels.top_k_top_p_mask_(logits, torch.tensor([2], dtype=torch.int32))
        tensor([[-inf, 3., 1.]])
    """
    call.top_k_top_p_mask_(logits, top_k, top_p, min_p)
    return logits


def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int = 0, *, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token per sample, and of the most likely tokens.

    They are the log_softmax of the logits as they are: no temperature, no penalties.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16. Rows may be strided.
        tokens: int64 [num_samples].
        num_top: 0 to 128.
        rows: int32 [num_samples], the row of logits of each sample. None: i.

    Returns:
        ``(logprobs, ids, ranks)``: float32 and int64 [num_samples, 1 + num_top], the given token
        first, then the most likely ones in order, of equals the first come first; and int64
        [num_samples], the number of logits that are at least the token's. Columns past vocab_size
        have id -1. Logprobs are NaN if the row's highest logit is not finite.

    Raises:
        RuntimeError: for tokens or rows that do not fit logits in dtype or size, by name.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0]])
        >>> vllm_kernels.token_logprobs(logits, torch.tensor([1]))
        (tensor([[-0.6931]]), tensor([[1]]), tensor([2]))
    """
    shape_of("token_logprobs", "logits", logits, "num_rows", "vocab_size")
    samples = shape_of("token_logprobs", "tokens", tokens, "num_samples")
    found = _made_for_logprobs("token_logprobs", "num_top", num_top, samples, logits.device)
    call.token_logprobs(*found, logits, tokens, rows)
    return found


def softmax(logits: Tensor, temperature: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Probabilities of ``logits / temperature`` in float32, row by row.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16. Rows may be strided.
        temperature: float32 [num_rows]; None: 1.
        out: float32 [num_rows, vocab_size]; may be ``logits`` itself. Made if None.

    Returns:
        ``out``. A row whose highest logit is not finite is NaN.

    Raises:
        RuntimeError: for logits, temperature or out of another dtype, size or device, by name.

    Example:
        >>> vllm_kernels.softmax(torch.zeros(1, 4))
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    if out is None:
        shape = shape_of("softmax", "logits", logits, "num_rows", "vocab_size")
        out = torch.empty(shape, dtype=torch.float32, device=logits.device)
    call.softmax(out, logits, temperature)
    return out


def apply_token_bitmask_(
    logits: Tensor, bitmask: Tensor, bitmask_rows: Tensor | None = None
) -> Tensor:
    """Sets the logits of forbidden tokens to -inf.

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16, written. Rows may be strided.
        bitmask: int32 [mask_rows, words]. Bit j % 32 of word j // 32 allows token j; tokens past
            the last word are allowed. xgrammar's layout.
        bitmask_rows: int32 [num_rows], the mask's row of each row, -1: none. None: i.

    Returns:
        ``logits``.

    Raises:
        RuntimeError: for a bitmask that is not int32 [rows, words], by name.

    Example:
        >>> logits = torch.zeros(1, 3)
        >>> vllm_kernels.apply_token_bitmask_(logits, torch.tensor([[0b101]], dtype=torch.int32))
        tensor([[0., -inf, 0.]])
    """
    call.apply_token_bitmask_(logits, bitmask, bitmask_rows)
    return logits


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """Penalizes tokens of the prompt or the output once, in place: vLLM's op of the same name.

    Positive logits are divided by the penalty, others multiplied (Keskar et al. 2019,
    arXiv:1909.05858).

    Args:
        logits: [num_rows, vocab_size], float32, float16 or bfloat16, written. Rows may be strided.
        prompt_mask: bool [num_rows, vocab_size], the tokens of the prompt.
        output_mask: bool [num_rows, vocab_size], the tokens of the output.
        repetition_penalties: float32 [num_rows].

    Raises:
        RuntimeError: for masks that are not bool and of the shape of logits, and for other
            penalties, by name.

    Example:
        >>> logits, seen = torch.tensor([[2.0, -1.0, 5.0]]), torch.tensor([[True, True, False]])
        >>> vllm_kernels.apply_repetition_penalties(logits, seen, seen, torch.tensor([2.0]))
        >>> logits
        tensor([[ 1., -2.,  5.]])
    """
    call.apply_repetition_penalties(logits, prompt_mask, output_mask, repetition_penalties)


def append_token_counts(
    tokens: Tensor,
    counts: Tensor,
    lengths: Tensor,
    indptr: Tensor,
    new_tokens: Tensor,
    positions: Tensor | None = None,
    next_positions: Tensor | None = None,
) -> None:
    """Counts a new token of each row in the row's list, which ``sample`` reads as ``token_counts``.

    Row i has the entries indptr[i] to indptr[i + 1] - 1. The first lengths[i] of them are in use.
    An entry in use with the new token counts it. If there is none, the next entry gets the token
    and the count 1. A row without entries has no list and counts nothing. One launch on CUDA, safe
    in graphs.

    Args:
        tokens: int32 [entries], written. Fill it with -1 at first: ``sample`` skips such entries.
        counts: int32 [entries], written.
        lengths: int32 [num_rows], entries in use, written.
        indptr: int32 [num_rows + 1], rising ends of the rows' lists.
        new_tokens: int64 [num_rows]; -1 counts nothing.
        positions: int64 [num_rows], the position of each new token in its sequence.
        next_positions: int64 [num_rows], written, with ``positions``. A token at a lower position
            is counted already, and is not counted again. It becomes the position + 1.

    Raises:
        RuntimeError: for another dtype, shape or device than above, or outputs that overlap another
            tensor. On the CPU also for an end, a length or a token out of range, and for a list
            without a free entry. On CUDA such a list does not count the token, and numbers out of
            range are cut to the list; these are reported with VLLM_KERNELS_CHECK=1.

    Example:
        >>> tokens, counts = torch.full((2, 4), -1, dtype=torch.int32)
        >>> lengths, indptr = torch.tensor([0]).int(), torch.tensor([0, 4]).int()
        >>> for token in (7, 5, 7):
        ...     vllm_kernels.append_token_counts(
        ...         tokens, counts, lengths, indptr, torch.tensor([token])
        ...     )
        >>> tokens.tolist(), counts.tolist()
        ([7, 5, -1, -1], [2, 1, -1, -1])
    """
    call.append_token_counts(tokens, counts, lengths, indptr, new_tokens, positions, next_positions)


def spec_verify(
    draft_tokens: Tensor,
    target_tokens: Tensor | None = None,
    *,
    target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Keeps the drafted tokens that the target model agrees with, and adds one.

    With ``target_tokens``, which ``sample`` drew or took greedily at each position, tokens are kept
    up to the first difference, and the target's token is added. Drafts of a prompt lookup need no
    more: the result is what the target model would have written.

    With ``target_probs``, a token is kept with probability min(1, target / draft). After the first
    rejected one, a token is drawn from max(target - draft, 0); after the last one, from the
    target's distribution (Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023,
    arXiv:2302.01318).

    Args:
        draft_tokens: int64 [num_seqs, num_draft]; -1 ends a sequence's draft.
        target_tokens: int64 [num_seqs, num_draft + 1].
        target_probs: float32 [num_seqs, num_draft + 1, vocab_size], in place of ``target_tokens``.
        draft_probs: float32 [num_seqs, num_draft, vocab_size]; None: 1 at the drafted token.
        uniforms: float32 [num_seqs, num_draft + 1, 2] in [0, 1), to keep and to draw; with
            ``target_probs``.

    Returns:
        ``(tokens, accepted)``: int64 [num_seqs, num_draft + 1], the kept tokens, one more, then -1;
        and int32 [num_seqs], the number of kept tokens. Where the target has no probability of
        at least 2**-40, token 0 is drawn.

    Raises:
        RuntimeError: for tokens or probabilities that do not fit each other, by name.

    Example:
        >>> vllm_kernels.spec_verify(torch.tensor([[5, 6]]), torch.tensor([[5, 7, 8]]))
        (tensor([[ 5,  7, -1]]), tensor([1], dtype=torch.int32))
    """
    num_seqs, num_draft = shape_of(
        "spec_verify", "draft_tokens", draft_tokens, "num_seqs", "num_draft"
    )
    device = draft_tokens.device
    tokens = torch.empty(num_seqs, num_draft + 1, dtype=torch.int64, device=device)
    accepted = torch.empty(num_seqs, dtype=torch.int32, device=device)
    call.spec_verify(
        tokens, accepted, draft_tokens, target_tokens, target_probs, draft_probs, uniforms
    )
    return tokens, accepted
