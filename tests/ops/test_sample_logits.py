"""The ops beside `sample`: masks, penalties, probabilities, logprobs, verified drafts."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_compiles, bits, ints, opcheck, raises
from sampling_cases import hard_rows, pick

import vllm_kernels
from vllm_kernels import reference

SIZES = [1, 31, 1000, 40_000, 151_936]


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but for the payload of NaN."""
    got, want = got.cpu(), want.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(got.nan_to_num(7.0)), bits(want.nan_to_num(7.0)))


def rows_of(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    return (hard_rows(vocab_size) if 31 <= vocab_size < 100_000 else torch.randn(4, vocab_size)).to(
        dtype
    )


@pytest.mark.parametrize("vocab_size", SIZES)
def test_top_k_top_p_mask(device, dtype, vocab_size):
    logits = rows_of(vocab_size, dtype)
    n = logits.shape[0]
    limits = (
        pick([0, 1, 3, 50, 5000], n).int(),
        pick([1.0, 0.9, 0.2, 0.0], n),
        pick([0.0, 0.05, 1.0], n),
    )
    want = reference.top_k_top_p_mask_(logits, *limits)
    got = logits.to(device)
    assert vllm_kernels.top_k_top_p_mask_(got, *(x.to(device) for x in limits)) is got
    same(got.float(), want.float())


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num_top", [0, 1, 20, 128])
def test_token_logprobs(device, dtype, vocab_size, num_top):
    logits = rows_of(vocab_size, dtype)
    rows = torch.randint(logits.shape[0], (7,)).int()
    tokens = torch.randint(vocab_size, (7,))
    want = reference.token_logprobs(logits, tokens, num_top, rows=rows)
    got = vllm_kernels.token_logprobs(
        logits.to(device), tokens.to(device), num_top, rows=rows.to(device)
    )
    same(got[0], want[0])
    assert torch.equal(got[1].cpu(), want[1]) and torch.equal(got[2].cpu(), want[2])
    finite = logits[rows.long()].float().max(-1).values.isfinite()
    exact = logits[rows.long()].double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(got[0][:, 0].cpu().double()[finite], exact[finite], atol=2e-6, rtol=3e-7)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_softmax(device, dtype, vocab_size):
    logits = rows_of(vocab_size, dtype)
    temperature = pick([0.5, 1.0, 2.0], logits.shape[0])
    got = vllm_kernels.softmax(logits.to(device), temperature.to(device))
    same(got, reference.softmax(logits, temperature))
    x = logits.double() / temperature[:, None]
    finite = x.max(-1).values.isfinite()
    assert torch.allclose(got.cpu().double()[finite], x[finite].softmax(-1), atol=1e-9, rtol=1e-5)


def test_softmax_in_place(device):
    logits = torch.randn(3, 5000, device=device)
    want = vllm_kernels.softmax(logits)
    assert torch.equal(vllm_kernels.softmax(logits, out=logits), want)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_token_bitmask(device, dtype, vocab_size):
    logits = torch.randn(5, vocab_size, dtype=dtype)
    words = -(-vocab_size // 32)
    mask = torch.randint(-(2**31), 2**31, (3, words + 2)).int()[:, :words]
    rows = torch.tensor([2, -1, 0, 2, 1]).int()
    want = reference.apply_token_bitmask_(logits, mask, rows)
    got = vllm_kernels.apply_token_bitmask_(logits.to(device), mask.to(device), rows.to(device))
    same(got.float(), want.float())
    got = vllm_kernels.apply_token_bitmask_(logits[:3].to(device), mask[:, : words // 2].to(device))
    same(got.float(), reference.apply_token_bitmask_(logits[:3], mask[:, : words // 2]).float())


@pytest.mark.parametrize("masked", [31, 640, 1000])
@pytest.mark.parametrize("rows", [None, [0, 3, 4]])
def test_token_bitmask_is_that_of_xgrammar(device, dtype, masked, rows):
    """The first `masked` columns of all rows, or of some."""
    xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar: make test installs it")
    logits = torch.randn(5, 1000).to(device, dtype)
    mask = xgrammar.allocate_token_bitmask(5, masked).random_(-(2**31), 2**31).to(device)
    want = logits.clone()
    xgrammar.apply_token_bitmask_inplace(want, mask, vocab_size=masked, indices=rows)
    which = [i if rows is None or i in rows else -1 for i in range(5)]
    vllm_kernels.apply_token_bitmask_(logits[:, :masked], mask, ints(which, device))
    same(logits.float(), want.float())


@pytest.mark.parametrize("vocab_size", SIZES)
def test_repetition_penalties(device, dtype, vocab_size):
    logits = rows_of(vocab_size, dtype)
    n = logits.shape[0]
    masks = torch.randint(3, (2, n, vocab_size)) == 0
    penalties = pick([1.0, 1.3, 0.7], n)
    want = reference.apply_repetition_penalties(logits, *masks, penalties)
    got = logits.to(device)
    vllm_kernels.apply_repetition_penalties(got, *masks.to(device), penalties.to(device))
    same(got.float(), want.float())


def drafts(num_seqs: int, num_draft: int, vocab_size: int, seed: int = 0) -> tuple:
    torch.manual_seed(seed)
    target = torch.randn(num_seqs, num_draft + 1, vocab_size).mul(2).softmax(-1)
    draft = torch.randn(num_seqs, num_draft, vocab_size).mul(2).softmax(-1)
    tokens = torch.multinomial(draft.flatten(0, 1), 1).view(num_seqs, num_draft)
    return target, draft, tokens, torch.rand(num_seqs, num_draft + 1, 2)


@pytest.mark.parametrize("vocab_size", [2, 600, 40_000])
@pytest.mark.parametrize("num_draft", [1, 5])
@pytest.mark.parametrize("with_draft_probs", [True, False])
def test_rejection_sampling(device, vocab_size, num_draft, with_draft_probs):
    target, draft, tokens, uniforms = drafts(16, num_draft, vocab_size)
    draft[0], uniforms[0, :, 0] = target[0, :num_draft], 0.5  # accepts all
    tokens[1, 0] = -1
    tokens[2, -1] = -1
    target[3] = -target[3]  # nothing can be drawn: token 0
    options = {"target_probs": target, "uniforms": uniforms}
    if with_draft_probs:
        options["draft_probs"] = draft
    want = reference.spec_verify(tokens, **options)
    got = vllm_kernels.spec_verify(
        tokens.to(device), **{name: x.to(device) for name, x in options.items()}
    )
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


def test_rejection_sampling_has_the_target_distribution(device):
    num_seqs, vocab_size = 100_000, 12
    target, draft, _, _ = drafts(1, 1, vocab_size, seed=3)
    tokens = torch.multinomial(draft[0, 0], num_seqs, replacement=True)[:, None]
    got, accepted = vllm_kernels.spec_verify(
        tokens.to(device),
        target_probs=target.expand(num_seqs, -1, -1).contiguous().to(device),
        draft_probs=draft.expand(num_seqs, -1, -1).contiguous().to(device),
        uniforms=torch.rand(num_seqs, 2, 2).to(device),
    )
    counts = torch.bincount(got[:, 0].cpu(), minlength=vocab_size).double()
    expected = num_seqs * target[0, 0].double()
    assert ((counts - expected) ** 2 / expected).sum() < 38  # p = 1e-4 for 11 degrees of freedom
    rate = torch.minimum(target[0, 0], draft[0, 0]).sum()
    assert abs(accepted.float().mean().cpu() - rate) < 0.01


def test_sampled_targets(device):
    target = torch.randint(3, (50, 5))
    tokens = torch.randint(-1, 3, (50, 4))
    want = reference.spec_verify(tokens, target)
    got = vllm_kernels.spec_verify(tokens.to(device), target.to(device))
    assert torch.equal(got[0].cpu(), want[0]) and torch.equal(got[1].cpu(), want[1])


def test_empty(device):
    none = torch.randn(0, 10, device=device)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    assert vllm_kernels.softmax(none).shape == (0, 10)
    assert vllm_kernels.top_k_top_p_mask_(none).shape == (0, 10)
    assert vllm_kernels.token_logprobs(none, ids, 3)[0].shape == (0, 4)
    draft = torch.empty(0, 3, dtype=torch.int64, device=device)
    assert vllm_kernels.spec_verify(draft, draft.new_empty(0, 4))[0].shape == (0, 4)


def test_bad_input(device):
    x, ids = torch.randn(2, 40, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    seen, ones = torch.zeros(2, 40, dtype=torch.bool, device=device), torch.ones(2, device=device)
    mask = torch.zeros(2, 2, dtype=torch.int32, device=device)
    probs = torch.ones(2, 2, 40, device=device)
    cases = [
        (
            lambda: vllm_kernels.top_k_top_p_mask_(x[:1].expand(2, 40)),
            r"^top_k_top_p_mask_: logits: is written, so",
        ),
        (
            lambda: vllm_kernels.top_k_top_p_mask_(x, top_p=ones[:1]),
            r"^top_k_top_p_mask_: top_p: expected num_rows = 2 \(from logits\) at dimension 0, "
            r"got shape \[1\]$",
        ),
        (
            lambda: vllm_kernels.token_logprobs(x, ids.int()),
            r"^token_logprobs: tokens: expected int64, got int32; cast it with .long\(\)$",
        ),
        (
            lambda: vllm_kernels.token_logprobs(x, ids, 129),
            r"^token_logprobs: num_top: expected an int of 0 to 128, got 129$",
        ),
        (
            lambda: vllm_kernels.softmax(x, out=x.half()),
            r"^softmax: out: expected float32, got float16; cast it with .float\(\)$",
        ),
        (
            lambda: vllm_kernels.apply_token_bitmask_(x, mask.long()),
            r"^apply_token_bitmask_: bitmask: expected int32, got int64; cast it with .int\(\)$",
        ),
        (
            lambda: vllm_kernels.apply_token_bitmask_(x, mask[:1]),
            r"^apply_token_bitmask_: bitmask: expected num_rows = 2 \(from logits\) at "
            r"dimension 0, got shape \[1, 2\]$",
        ),
        (
            lambda: vllm_kernels.apply_repetition_penalties(x, seen.int(), seen, ones),
            r"^apply_repetition_penalties: prompt_mask: expected bool, got int32; cast it with "
            r".bool\(\)$",
        ),
        (
            lambda: vllm_kernels.spec_verify(ids[:, None]),
            r"^spec_verify: target_tokens: expected target_tokens or target_probs, got both or "
            r"none$",
        ),
        (
            lambda: vllm_kernels.spec_verify(ids[:, None], target_probs=probs),
            r"^spec_verify: uniforms: expected float32 \[num_seqs, num_draft \+ 1, 2\] with "
            r"target_probs, got None$",
        ),
        (
            lambda: vllm_kernels.spec_verify(ids, ids),
            r"^spec_verify: draft_tokens: expected shape \[num_seqs, num_draft\], got shape "
            r"\[2\]$",
        ),
        (
            lambda: vllm_kernels.token_logprobs(x, ids, -1),
            r"^token_logprobs: num_top: expected an int of 0 to 128, got -1$",
        ),
        (lambda: vllm_kernels.softmax("x"), r"^softmax: logits: expected a tensor, got str$"),
        (
            lambda: vllm_kernels.top_k_top_p_mask_(x, None, x.view(-1)[:2]),
            r"^top_k_top_p_mask_: logits and top_p overlap in memory$",
        ),
    ]
    for call, message in cases:
        with raises(message):
            call()


def test_opcheck_and_compile(device, dtype):
    x = torch.randn(3, 64, device=device, dtype=dtype)
    ids = torch.tensor([1, 2, 3], device=device)
    top_k = torch.tensor([3, 0, 5], dtype=torch.int32, device=device)
    mask = torch.full((3, 2), 5, dtype=torch.int32, device=device)
    seen, ones = x > 0, torch.ones(3, device=device)
    logprobs, ranks = torch.empty(3, 3, device=device), torch.empty_like(ids)
    opcheck("top_k_top_p_mask_", x.clone(), top_k)
    opcheck("token_logprobs", logprobs, torch.empty_like(logprobs).long(), ranks, x, ids)
    opcheck("softmax", torch.empty_like(x, dtype=torch.float32), x)
    opcheck("apply_token_bitmask_", x.clone(), mask)
    opcheck("apply_repetition_penalties", x.clone(), seen, seen, ones)
    draft, target = ids[:, None], torch.stack([ids, ids], 1)
    opcheck("spec_verify", torch.empty_like(target), top_k.clone(), draft, target)
    assert_compiles(vllm_kernels.softmax, x)
    assert_compiles(vllm_kernels.token_logprobs, x, ids, 2)
    assert_compiles(vllm_kernels.spec_verify, draft, target)
