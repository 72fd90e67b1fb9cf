"""FlashInfer's sampling functions against plain torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_kernels.compat.flashinfer import sampling


def kept_by_torch(probs: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """bool [rows, vocabulary]: top_k first, then top_p over its own sum; min_p alone."""
    best, order = probs.sort(dim=1, descending=True, stable=True)
    keep = torch.arange(probs.shape[1]) < top_k
    share = best * keep / (best * keep).sum(1, keepdim=True)
    before = share.cumsum(1) - share
    keep = keep & ((before < top_p) | (top_p == 1)) & (best >= min_p * best[:, :1])
    return torch.zeros_like(keep).scatter(1, order.cpu(), keep)


def check_draws(draw: Tensor, probs: Tensor, kept: Tensor) -> None:
    """Draws [rows, draws] have the frequencies of the kept probabilities."""
    expected = probs * kept / (probs * kept).sum(1, keepdim=True)
    for row, values in enumerate(expected):
        found = draw[row].long().bincount(minlength=len(values)) / draw.shape[1]
        assert not found[values == 0].any()
        assert (found - values).abs().max() < 5 * (0.25 / draw.shape[1]) ** 0.5


CASES = {
    "sampling_from_probs": ((), (64, 1.0)),
    "top_k_sampling_from_probs": ((5,), (5, 1.0)),
    "top_p_sampling_from_probs": ((0.7,), (64, 0.7)),
    "min_p_sampling_from_probs": ((0.3,), (64, 1.0, 0.3)),
    "top_k_top_p_sampling_from_probs": ((9, 0.6), (9, 0.6)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("per_row", [False, True], ids=["", "per row"])
def test_draws(name: str, per_row: bool, device: str) -> None:
    """Many samples share two rows by ``indices``."""
    limits, kept = CASES[name]
    draws = 6000
    probs = torch.randn(2, 64).mul(2).softmax(1)
    indices = torch.arange(2, device=device).repeat_interleave(draws)
    given = [
        torch.full((2 * draws,), limit, device=device) if per_row else limit for limit in limits
    ]
    draw = getattr(sampling, name)
    tokens, valid = draw(
        probs.to(device), *given, indices=indices, seed=3, offset=0, return_valid=True
    )
    assert tokens.dtype == torch.int64 and valid.all()
    check_draws(tokens.cpu().view(2, draws), probs, kept_by_torch(probs, *kept))


def test_draws_from_logits(device: str) -> None:
    logits, draws = torch.randn(2, 64) * 2, 6000
    indices = torch.arange(2, device=device, dtype=torch.int32).repeat_interleave(draws)
    options = {"indices": indices, "seed": 5, "offset": 1}
    everything = torch.ones(2, 64, dtype=torch.bool)
    draw = sampling.sampling_from_logits(logits.to(device), **options)
    assert draw.dtype == torch.int32
    check_draws(draw.cpu().view(2, draws), logits.softmax(1), everything)
    draw = sampling.top_k_top_p_sampling_from_logits(logits.to(device), 9, 0.6, **options)
    kept = kept_by_torch(logits.softmax(1), 9, 0.6)
    check_draws(draw.cpu().view(2, draws), logits.softmax(1), kept)


def test_random_numbers(device: str) -> None:
    logits = torch.zeros(64, 1000, device=device)

    def draw(**given: object) -> list[int]:
        return sampling.sampling_from_logits(logits, **given).tolist()

    def of(value: int, count: int) -> Tensor:
        return torch.full((count,), value, device=device)

    assert draw(seed=1, offset=2) == draw(seed=1, offset=2) != draw(seed=1, offset=3)
    assert len(set(draw(seed=1, offset=2))) > 32  # samples of one seed differ
    assert draw(seed=of(1, 1), offset=of(2, 1)) == draw(seed=1, offset=2)
    assert draw(seed=of(1, 64), offset=of(2, 64)) == draw(seed=1, offset=2)
    for signed, big in ((-(2**63), 2**63), (-1, 2**64 - 1), (1, 2**64 + 1)):
        assert draw(seed=big, offset=2) == draw(seed=signed, offset=2)
        assert draw(seed=1, offset=big) == draw(seed=1, offset=signed)
    high, low = torch.tensor([2**63 + 5, 2**63 + 2], dtype=torch.uint64).to(device).split(1)
    assert draw(seed=high, offset=low) == draw(seed=2**63 + 5, offset=2**63 + 2)
    assert draw(seed=high, offset=of(2, 64)) == draw(seed=2**63 + 5, offset=2)
    generators = [torch.Generator(device).manual_seed(4) for _ in range(2)]
    assert draw(generator=generators[0]) == draw(generator=generators[1]) != draw()


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_valid_rows(device: str, integers: torch.dtype) -> None:
    """Without ``indices`` there is a sample of each row, and with them one of each index."""
    probs = torch.tensor([[0.0, 1.0], [0.0, 0.0], [torch.nan, 0.5], [3.0, 0.0]], device=device)
    indices = torch.tensor([3, 1, 0], dtype=integers, device=device)
    for name, (limits, _) in CASES.items():
        draw = getattr(sampling, name)
        tokens, valid = draw(probs, *limits, return_valid=True)
        assert tokens.dtype == torch.int32 and valid.tolist() == [True, False, False, True]
        assert tokens[[0, 3]].tolist() == [1, 0]
        per_row = [torch.full((4,), limit, device=device) for limit in limits]
        tokens, valid = draw(probs, *per_row, indices=indices, return_valid=True)
        assert tokens.dtype == integers and valid.tolist() == [True, False, True]
        assert tokens[[0, 2]].tolist() == [0, 1]


def test_check_nan(device: str) -> None:
    good = torch.tensor([[0.0, 1.0], [0.5, 0.5]], device=device)
    bad = torch.tensor([[0.0, 1.0], [torch.nan, 0.5]], device=device)
    functions = {name: ("probs", limits) for name, (limits, _) in CASES.items()}
    functions["sampling_from_logits"] = "logits", ()
    functions["top_k_top_p_sampling_from_logits"] = "logits", (1, 0.5)
    for name, (argument, limits) in functions.items():
        draw = getattr(sampling, name)
        assert draw(good, *limits, check_nan=True).shape == (2,)
        assert draw(bad, *limits).shape == (2,)
        message = f"^flashinfer.sampling: {argument}: expected no NaN, got NaN$"
        with pytest.raises(ValueError, match=message):
            draw(bad, *limits, check_nan=True)


def test_limits(device: str, dtype: torch.dtype) -> None:
    probs = torch.randn(4, 200).mul(3).softmax(1)
    top_p = torch.tensor([0.1, 0.5, 0.9, 1.0])
    for k, p in ((7, 1.0), (200, 0.8)):
        kept = kept_by_torch(probs, k, p)
        want = probs * kept / (probs * kept).sum(1, keepdim=True)
        if k < 200:
            got = sampling.top_k_renorm_probs(probs.to(device, dtype), k)
            assert got.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert torch.allclose(got.cpu().float(), want, atol=tolerance)
        else:
            assert torch.allclose(sampling.top_p_renorm_probs(probs.to(device), p).cpu(), want)
            got = sampling.top_p_renorm_probs(probs.to(device, dtype), p)
            assert got.dtype == torch.float32  # that of FlashInfer
    assert sampling.top_k_renorm_prob is sampling.top_k_renorm_probs
    assert sampling.top_p_renorm_prob is sampling.top_p_renorm_probs
    rows = [kept_by_torch(probs[i : i + 1], 200, top_p[i].item())[0] for i in range(4)]
    got = sampling.top_p_renorm_probs(probs.to(device), top_p.to(device)).cpu()
    assert torch.equal(got > 0, torch.stack(rows))
    logits = torch.randn(4, 200, device=device).to(dtype)
    before = logits.clone()
    masked = sampling.top_k_mask_logits(logits, torch.tensor([1, 2, 3, 200], device=device))
    assert (masked > -torch.inf).sum(1).tolist() == [1, 2, 3, 200]
    assert torch.equal(logits, before)
    temperature = torch.tensor([0.5, 1.0, 2.0, 3.0], device=device)
    want = (logits.float() / temperature[:, None]).softmax(1)
    assert torch.allclose(sampling.softmax(logits, temperature), want, atol=1e-6)
    assert torch.allclose(sampling.softmax(logits, 2.0), (logits.float() / 2).softmax(1))


def test_chain_speculative_sampling(device: str) -> None:
    """The first token has the target's distribution, whatever the draft's."""
    batch = 8000
    draft, target = torch.randn(2, 1, 8).mul(2).softmax(2)
    target = torch.cat([target, target.flip(1)]).expand(batch, 2, 8).contiguous()
    draft = draft.expand(batch, 1, 8).contiguous()
    drafted = torch.multinomial(draft[:, 0], 1)
    accepted = torch.ones(batch, dtype=torch.int32, device=device)
    tokens, total, emitted = sampling.chain_speculative_sampling(
        draft.to(device), drafted.int().to(device), target.to(device), accepted
    )
    assert total is accepted and torch.equal(total - 1, emitted)  # one drafted token each
    check_draws(tokens[:, 0].cpu()[None], target[:1, 0], torch.ones(1, 8, dtype=torch.bool))
    assert torch.equal(tokens[:, 1] >= 0, emitted == 1)
    options = {"generator": torch.Generator(device).manual_seed(1)}
    halves = [x.to(device, torch.bfloat16) for x in (draft, target)]
    again = sampling.chain_speculative_sampling(
        halves[0], drafted.int().to(device), halves[1], **options
    )
    options["generator"].manual_seed(1)
    floats = sampling.chain_speculative_sampling(
        halves[0].float(), drafted.int().to(device), halves[1].float(), **options
    )
    assert all(torch.equal(a, b) for a, b in zip(again, floats))
    rate = torch.minimum(draft[0, 0], target[0, 0]).sum()
    assert abs(emitted.float().mean().cpu() - rate) < 0.03


def test_a_skipped_draft_token_is_never_accepted(device: str) -> None:
    probs = torch.full((1, 3, 8), 0.125, device=device)
    drafted = torch.tensor([[-1, 3]], device=device)
    tokens, accepted, emitted = sampling.chain_speculative_sampling(probs[:, :2], drafted, probs)
    assert tokens.tolist()[0][1:] == [-1, -1] and tokens[0, 0] >= 0
    assert accepted.tolist() == [1] and emitted.tolist() == [0]


def test_wrong_types() -> None:
    logits: Any = torch.zeros(2, 8)
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: sampling.top_k_sampling_from_probs(logits, 2.5),
            "top_k: expected an integer or a tensor, got 2.5",
        ),
        (
            lambda: sampling.top_k_mask_logits(logits, True),
            "top_k: expected an integer or a tensor, got True",
        ),
        (
            lambda: sampling.top_p_renorm_probs(logits, "0.9"),
            "top_p: expected a number or a tensor, got '0.9'",
        ),
        (
            lambda: sampling.sampling_from_probs([[0.1, 0.9]]),
            "probs: expected a tensor, got list",
        ),
        (lambda: sampling.softmax([[0.1, 0.9]]), "logits: expected a tensor, got list"),
    ]
    for call, message in cases:
        with pytest.raises(TypeError, match=f"^flashinfer.sampling: {re.escape(message)}$"):
            call()


def test_errors_of_the_ops_have_its_names() -> None:
    logits, probs = torch.zeros(2, 8), torch.rand(2, 8)
    drafts, drafted = torch.rand(2, 3, 8), torch.zeros(2, 3, dtype=torch.int32)
    chain = sampling.chain_speculative_sampling
    cases = [
        (
            lambda: sampling.sampling_from_logits(logits, indices=torch.tensor([5])),
            "indices[0] = 5: expected a row of logits in [0, 2)",
        ),
        (
            lambda: sampling.top_p_sampling_from_probs(probs, torch.ones(3)),
            "top_p: expected num_samples = 2 (from probs) at dimension 0, got shape [3]",
        ),
        (
            lambda: sampling.top_k_mask_logits(logits, torch.ones(3).int()),
            "top_k: expected num_rows = 2 (from logits) at dimension 0, got shape [3]",
        ),
        (
            lambda: sampling.top_k_renorm_probs(probs[0], 3),
            "probs: expected shape [num_rows, vocab_size], got shape [8]",
        ),
        (
            lambda: sampling.softmax(logits[0]),
            "logits: expected shape [num_rows, vocab_size], got shape [8]",
        ),
        (
            lambda: chain(drafts, drafted, drafts),
            "target_probs: expected num_draft + 1 = 4 (from draft_token_ids) at dimension 1, got "
            "shape [2, 3, 8]",
        ),
        (
            lambda: chain(drafts, drafted.float(), drafts),
            "draft_token_ids: expected int32 or int64, got torch.float32",
        ),
        (
            lambda: chain(drafts, drafted[0], drafts),
            "draft_token_ids: expected shape [batch, drafted], got [3]",
        ),
        (
            lambda: chain(drafts, drafted, torch.rand(2, 4, 8), drafted[0]),
            "maybe_output_accepted_token_num: expected shape [2], got [3]",
        ),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError, match=f"^flashinfer.sampling: {re.escape(message)}$"):
            call()


def test_what_differs_is_refused() -> None:
    logits, ones = torch.zeros(2, 8), torch.ones(1, dtype=torch.int64)
    cases = [
        (
            lambda: sampling.top_k_top_p_sampling_from_logits(
                logits, 3, 0.5, filter_apply_order="joint"
            ),
            "top_k_top_p_sampling_from_logits: filter_apply_order: expected 'top_k_first', got "
            "'joint'",
        ),
        (
            lambda: sampling.top_k_top_p_sampling_from_probs(
                logits, 3, 0.5, filter_apply_order="joint"
            ),
            "top_k_top_p_sampling_from_probs: filter_apply_order: expected 'top_k_first', got "
            "'joint'",
        ),
        (
            lambda: sampling.sampling_from_logits(logits, seed=ones.int(), offset=ones),
            "flashinfer.sampling: seed: expected int64 or uint64, got torch.int32",
        ),
        (
            lambda: sampling.sampling_from_logits(logits, seed=ones, offset=ones.float()),
            "flashinfer.sampling: offset: expected int64 or uint64, got torch.float32",
        ),
        (
            lambda: sampling.sampling_from_logits(logits, seed=ones.repeat(3), offset=ones),
            "flashinfer.sampling: seed: expected shape [1] or [2], got [3]",
        ),
        (
            lambda: sampling.sampling_from_probs(logits, indices=ones.float()),
            "flashinfer.sampling: indices: expected int32 or int64, got torch.float32",
        ),
        (
            lambda: sampling.sampling_from_probs(logits.int()),
            "flashinfer.sampling: probs: expected float32 or float16 or bfloat16, got torch.int32",
        ),
        (
            lambda: sampling.top_k_renorm_probs(logits.double(), 3),
            "flashinfer.sampling: probs: expected float32 or float16 or bfloat16, got "
            "torch.float64",
        ),
        (
            lambda: sampling.top_k_sampling_from_probs(logits, torch.ones(2)),
            "flashinfer.sampling: top_k: expected int32 or int64, got torch.float32",
        ),
        (
            lambda: sampling.sampling_from_logits(logits, seed=1.5, offset=0),
            "flashinfer.sampling: seed: expected an int or a tensor, got float",
        ),
        (
            lambda: sampling.sampling_from_logits(logits, seed=1),
            "flashinfer.sampling: seed: expected seed and offset, both numbers or both tensors",
        ),
        (
            lambda: sampling.chain_speculative_sampling(
                logits[:, None], logits[:, :1].long(), logits[:, None].repeat(1, 2, 1), seed=1
            ),
            "chain_speculative_sampling: seed: expected None, got random numbers of a seed: give a "
            "generator",
        ),
    ]
    for call, message in cases:
        with pytest.raises(RuntimeError) as error:
            call()
        assert str(error.value) == message
    message = r"^flashinfer.sampling.top_k_page_table_transform: not supported: there are chain_"
    for kind in (AttributeError, NotImplementedError):
        with pytest.raises(kind, match=message):
            _ = sampling.top_k_page_table_transform
