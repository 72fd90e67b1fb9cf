"""``flashinfer.sampling``: the functions that mean the same on this library's ops.

Results are always deterministic, so ``deterministic=False`` changes nothing. Limits are exact: of
equal probabilities the lower token ids are kept. FlashInfer's random numbers are other ones, so
the same seed draws other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...errors import Unsupported
from .._checks import check_given_integers, check_integers, wrong
from ._common import not_served
from ._limits import SAMPLING, called, check_floats, of_rows, of_samples, per_row
from ._seeds import seeds_and_offsets

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

Drawn = Tensor | tuple[Tensor, Tensor]


def __getattr__(name: str) -> object:
    raise not_served(SAMPLING, name, __all__)


def softmax(
    logits: Tensor,
    temperature: Tensor | float | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Probabilities of logits / temperature, float32 [batch, vocabulary].

    Args:
        logits: [batch, vocabulary], float32, float16 or bfloat16.
        temperature: A number, or [batch]. None: 1.
        enable_pdl: Has no effect.

    Raises:
        RuntimeError: for logits or temperatures of another dtype or size, by name.

    Example:
        >>> softmax(torch.zeros(1, 4))
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    check_floats("logits", logits)
    divisors = per_row("temperature", temperature, len(logits), logits.device, torch.float32)
    return called(ops.softmax, {}, logits, divisors)


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """Draws from softmax(logits).

    Args:
        logits: [rows, vocabulary], float32, float16 or bfloat16.
        indices: int32 or int64 [batch], the row of each sample. None: i.
        deterministic: Has no effect.
        generator: Gives the seeds if there are none.
        check_nan: Whether to look for NaN, which waits for the device.
        seed, offset: Both numbers, of which the low 64 bits count, or both int64 or uint64 of 1 or
            batch values.

    Returns:
        int32 [batch], or the dtype of ``indices``.

    Raises:
        ValueError: for NaN with ``check_nan``, and for one of seed and offset alone.
        RuntimeError: for tensors of another dtype or size, by name.

    Example:
        >>> sampling_from_logits(torch.tensor([[0.0, 100.0]]))
        tensor([1], dtype=torch.int32)
    """
    check_floats("logits", logits, check_nan)
    return _sample(logits, indices, generator, seed, offset)


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Drawn:
    """Draws from probabilities, which need not add up to 1.

    Args:
        probs: [rows, vocabulary], float32, float16 or bfloat16, computed in float32.
        return_valid: Whether to return bool [batch], too: a row has a positive probability.
        indices, deterministic, generator, check_nan, seed, offset: As in
            :func:`sampling_from_logits`.

    Raises:
        ValueError, RuntimeError: as :func:`sampling_from_logits` does.

    Example:
        >>> sampling_from_probs(torch.tensor([[0.0, 1.0]]))
        tensor([1], dtype=torch.int32)
    """
    return _sample_probs(probs, indices, generator, check_nan, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Drawn:
    """:func:`sampling_from_probs` of the likeliest tokens that reach ``top_p``, a number or
    [batch].

    Raises:
        ValueError, RuntimeError: as :func:`sampling_from_logits` does.

    Example:
        >>> top_p_sampling_from_probs(torch.tensor([[0.4, 0.6]]), 0.5)
        tensor([1], dtype=torch.int32)
    """
    return _sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid, top_p=top_p
    )


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Drawn:
    """:func:`sampling_from_probs` of the ``top_k`` likeliest tokens, a number or [batch].

    Raises:
        ValueError, RuntimeError: as :func:`sampling_from_logits` does.

    Example:
        >>> top_k_sampling_from_probs(torch.tensor([[0.4, 0.6]]), 1)
        tensor([1], dtype=torch.int32)
    """
    return _sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid, top_k=top_k
    )


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: Tensor | float,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Drawn:
    """:func:`sampling_from_probs` of tokens with at least ``min_p`` (a number or [batch]) times
    the highest probability.

    Raises:
        ValueError, RuntimeError: as :func:`sampling_from_logits` does.

    Example:
        >>> min_p_sampling_from_probs(torch.tensor([[0.4, 0.6]]), 0.9)
        tensor([1], dtype=torch.int32)
    """
    return _sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid, min_p=min_p
    )


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Drawn:
    """:func:`sampling_from_probs` after top_k, then top_p over what top_k keeps.

    Args:
        top_k, top_p: Numbers, or [batch].
        filter_apply_order: "top_k_first".
        probs, indices, return_valid: As in :func:`sampling_from_probs`.
        deterministic, generator, check_nan, seed, offset: As in :func:`sampling_from_logits`.

    Raises:
        NotImplementedError: for the order "joint".
        ValueError, RuntimeError: as :func:`sampling_from_logits` does.

    Example:
        >>> top_k_top_p_sampling_from_probs(torch.tensor([[0.4, 0.6]]), 2, 0.5)
        tensor([1], dtype=torch.int32)
    """
    _refuse_order("top_k_top_p_sampling_from_probs", filter_apply_order)
    return _sample_probs(
        probs, indices, generator, check_nan, seed, offset, return_valid, top_k=top_k, top_p=top_p
    )


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """:func:`sampling_from_logits` after top_k, then top_p over what top_k keeps.

    Raises:
        NotImplementedError: for the order "joint".
        ValueError, RuntimeError: as :func:`sampling_from_logits` does.

    Example:
        >>> top_k_top_p_sampling_from_logits(torch.tensor([[0.0, 1.0]]), 1, 0.9)
        tensor([1], dtype=torch.int32)
    """
    _refuse_order("top_k_top_p_sampling_from_logits", filter_apply_order)
    check_floats("logits", logits, check_nan)
    return _sample(logits, indices, generator, seed, offset, top_k=top_k, top_p=top_p)


def top_p_renorm_probs(
    probs: Tensor, top_p: Tensor | float, is_deterministic: bool = True
) -> Tensor:
    """Zeroes tokens that top_p leaves out, and divides by the sum of the others.

    Args:
        probs: [batch, vocabulary], float32, float16 or bfloat16, computed in float32.
        top_p: A number, or [batch].
        is_deterministic: Has no effect.

    Returns:
        float32, like probs.

    Raises:
        RuntimeError: for tensors of another dtype or size, by name.

    Example:
        >>> top_p_renorm_probs(torch.tensor([[0.5, 0.25, 0.25]]), 0.7)
        tensor([[0.6667, 0.3333, 0.0000]])
    """
    return _renormalized(probs, top_p=top_p)


top_p_renorm_prob = top_p_renorm_probs


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int, is_deterministic: bool = True) -> Tensor:
    """Zeroes tokens that top_k leaves out, and divides by the sum of the others.

    Args:
        probs: [batch, vocabulary], float32, float16 or bfloat16.
        top_k: A number, or [batch].
        is_deterministic: Has no effect.

    Returns:
        Like probs, of its dtype.

    Raises:
        RuntimeError: for tensors of another dtype or size, by name.

    Example:
        >>> top_k_renorm_probs(torch.tensor([[0.5, 0.25, 0.25]]), 2)
        tensor([[0.6667, 0.3333, 0.0000]])
    """
    return _renormalized(probs, top_k=top_k).to(probs.dtype)


top_k_renorm_prob = top_k_renorm_probs


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """Returns logits with -inf where top_k leaves out a token.

    Args:
        logits: [batch, vocabulary], float32, float16 or bfloat16.
        top_k: A number, or [batch].

    Raises:
        RuntimeError: for tensors of another dtype or size, by name.

    Example:
        >>> top_k_mask_logits(torch.tensor([[0.0, 3.0, 1.0]]), 2)
        tensor([[-inf, 3., 1.]])
    """
    check_floats("logits", logits)
    k = per_row("top_k", top_k, len(logits), logits.device, torch.int32)
    return called(ops.top_k_top_p_mask_, {}, logits.clone(), k)


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling of drafted tokens (Leviathan et al. 2022, arXiv:2211.17192).

    Args:
        draft_probs: [batch, drafted, vocabulary], computed in float32.
        draft_token_ids: int32 or int64 [batch, drafted].
        target_probs: [batch, drafted + 1, vocabulary], computed in float32.
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: int32 [batch], added
            to. None: zeros.
        deterministic: Has no effect.
        generator: Gives the random numbers.
        seed, offset: None. Random numbers of a seed are not supported.

    Returns:
        ``(tokens, accepted, emitted)``: int32 [batch, drafted + 1], the kept tokens, one more, then
        -1; int32 [batch], how many drafted tokens would be kept one by one; int32 [batch], how many
        are kept before the first rejected one.

    Raises:
        NotImplementedError: for seed or offset.
        RuntimeError: for tensors of another dtype or size, by name.

    Example:
        >>> draft = torch.tensor([[[0.0, 1.0]]])
        >>> target = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> chain_speculative_sampling(draft, torch.tensor([[1]]), target)[0]
        tensor([[1, 0]], dtype=torch.int32)
    """
    if seed is not None or offset is not None:
        raise Unsupported(
            "chain_speculative_sampling: seed: expected None, got random numbers of a seed: give a "
            "generator"
        )
    check_integers(SAMPLING, draft_token_ids=draft_token_ids)
    check_floats("draft_probs", draft_probs)
    check_floats("target_probs", target_probs)
    if draft_token_ids.dim() != 2:
        raise wrong(SAMPLING, "draft_token_ids", "shape [batch, drafted]", draft_token_ids)
    batch, drafted = draft_token_ids.shape
    device = draft_probs.device
    totals = {
        "maybe_output_accepted_token_num": maybe_output_accepted_token_num,
        "maybe_output_emitted_draft_token_num": maybe_output_emitted_draft_token_num,
    }
    check_given_integers(SAMPLING, **totals)
    for name, total in totals.items():
        if total is not None and total.shape != (batch,):
            raise wrong(SAMPLING, name, f"shape [{batch}]", total)
    uniforms = torch.rand(batch, drafted + 1, 2, device=device, generator=generator)
    draft_probs, target_probs = draft_probs.float(), target_probs.float()
    draft_tokens = draft_token_ids.long()
    tokens, emitted = called(
        ops.spec_verify, {"draft_tokens": "draft_token_ids"}, draft_tokens,
        target_probs=target_probs, draft_probs=draft_probs, uniforms=uniforms,
    )  # fmt: skip
    # A token outside the vocabulary is rejected, and reads nothing outside it.
    inside = draft_tokens.clamp(0, draft_probs.shape[2] - 1)
    drawn_from, wanted = (
        probs[:, :drafted].gather(2, inside[..., None])[..., 0]
        for probs in (draft_probs, target_probs)
    )
    kept = (uniforms[:, :drafted, 0] * drawn_from < wanted) & (inside == draft_tokens)
    accepted, emitted = (
        count if total is None else total.add_(count)
        for total, count in zip(totals.values(), (kept.sum(1, dtype=torch.int32), emitted))
    )
    return tokens.int(), accepted, emitted


def _sample(
    logits: Tensor,
    indices: Tensor | None,
    generator: torch.Generator | None,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
    name: str = "logits",
    **limits: Tensor | float,
) -> Tensor:
    if indices is not None:
        check_integers(SAMPLING, indices=indices)
    rows = None if indices is None else indices.int()
    batch, device = len(logits if indices is None else indices), logits.device
    seeds, offsets = seeds_and_offsets(batch, device, generator, seed, offset)
    dtypes = {"top_k": torch.int32}
    given: dict[str, Any] = {
        key: per_row(key, of_samples(limit, rows), batch, device, dtypes.get(key, torch.float32))
        for key, limit in limits.items()
    }
    tokens = called(
        ops.sample, {"rows": "indices", "logits": name}, logits, rows=rows, seeds=seeds,
        offsets=offsets, temperature=torch.ones(batch, device=device), **given,
    )  # fmt: skip
    return tokens.to(torch.int32 if indices is None else indices.dtype)


def _sample_probs(
    probs: Tensor,
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
    return_valid: bool,
    **limits: Tensor | float,
) -> Drawn:
    check_floats("probs", probs, check_nan)
    tokens = _sample(probs.float().log(), indices, generator, seed, offset, "probs", **limits)
    if not return_valid:
        return tokens
    highest = probs.amax(1)
    valid = highest.isfinite() & (highest > 0)
    return tokens, valid if indices is None else of_rows(valid, indices)


def _renormalized(probs: Tensor, **limits: Tensor | float) -> Tensor:
    check_floats("probs", probs)
    masked = probs.float().log()
    k = per_row("top_k", limits.get("top_k"), len(probs), probs.device, torch.int32)
    p = per_row("top_p", limits.get("top_p"), len(probs), probs.device, torch.float32)
    called(ops.top_k_top_p_mask_, {"logits": "probs"}, masked, k, p)
    kept = torch.where(masked > -torch.inf, probs.float(), 0.0)
    return kept / kept.sum(1, keepdim=True)


def _refuse_order(function: str, order: str) -> None:
    if order != "top_k_first":
        raise Unsupported(f"{function}: filter_apply_order: expected 'top_k_first', got {order!r}")
