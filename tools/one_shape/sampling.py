"""Sampling, penalties, masks and the check of drafts: one call per kernel."""

from __future__ import annotations

import torch

import vllm_kernels

from .common import CUDA, DTYPES


def sampling() -> None:
    for dtype in DTYPES:
        for rows, vocab in ((3, 7), (3, 1000), (2, 9_000)):
            logits = torch.randn(rows, vocab, device=CUDA).to(dtype)
            ones = torch.ones(rows, device=CUDA)
            ints = torch.ones(rows, dtype=torch.int32, device=CUDA)
            lists = (
                torch.arange(rows + 1, dtype=torch.int32, device=CUDA),
                torch.arange(rows, dtype=torch.int32, device=CUDA),
            )
            mask = torch.full((rows, vocab // 32 + 1), -3, dtype=torch.int32, device=CUDA)
            drawn = {"temperature": 0.7 * ones, "uniforms": 0.5 * ones}
            for limits in (
                {},
                {"top_k": 5 * ints, "top_p": 0.9 * ones, "min_p": 0.01 * ones},
                {"top_k": 5000 * ints, "top_p": 0.9 * ones},
                {"min_p": 0.1 * ones},
                {"top_p": 0.9 * ones, "bitmask": mask, "bias": (*lists, ones)},
                {"token_counts": (*lists, ints), "repetition": 1.2 * ones, "presence": ones},
            ):
                vllm_kernels.sample(logits, **drawn, **limits)
            vllm_kernels.sample(logits)
            # Log-probabilities of a list, of a masked row, of a nucleus, of a greedy row.
            few = drawn | {"top_k": 50 * ints, "top_p": 0.9 * ones}
            for request in (few, few | {"bitmask": mask}, drawn | {"top_p": 0.9 * ones}, {}):
                vllm_kernels.sample(logits, **request, num_logprobs=20)
            # Equal logits, which overflow every list.
            vllm_kernels.sample(0 * logits, **drawn, top_p=0.9 * ones)
            vllm_kernels.sample(logits, **drawn, rows=0 * ints)
            vllm_kernels.top_k_top_p_mask_(logits.clone(), 3 * ints, 0.5 * ones)
            tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
            vllm_kernels.token_logprobs(logits, tokens, 20)
            vllm_kernels.softmax(logits, 0.7 * ones)
            vllm_kernels.apply_token_bitmask_(logits.clone(), mask)
            seen = logits > 0
            vllm_kernels.apply_repetition_penalties(logits.clone(), seen, seen, ones)
    lists = torch.full((2, 600), -1, dtype=torch.int32, device=CUDA)
    lengths = torch.tensor([250, 0], dtype=torch.int32, device=CUDA)
    ends = torch.tensor([0, 300, 600], dtype=torch.int32, device=CUDA)
    for token in (7, 7, 9):
        new = torch.full((2,), token, device=CUDA)
        vllm_kernels.append_token_counts(lists[0], lists[1], lengths, ends, new, new, 0 * new)
    probs = torch.randn(4, 3, 1000, device=CUDA).softmax(-1)
    draft = torch.randint(1000, (4, 2), device=CUDA)
    vllm_kernels.spec_verify(draft, torch.randint(1000, (4, 3), device=CUDA))
    vllm_kernels.spec_verify(
        draft, target_probs=probs, draft_probs=probs[:, 1:].contiguous(),
        uniforms=torch.rand(4, 3, 2, device=CUDA),
    )  # fmt: skip


def sampled_logprobs() -> None:
    """Log-probabilities where a list does not suffice, or the row is read again. Some threads load
    two Vecs."""
    rows, vocab = 2, 33_000
    ones = torch.ones(rows, device=CUDA)
    ints = torch.ones(rows, dtype=torch.int32, device=CUDA)
    few = {"temperature": 0.7 * ones, "uniforms": 0.5 * ones, "top_k": 50 * ints}
    lists = torch.arange(rows + 1, dtype=torch.int32, device=CUDA), ints.cumsum(0).int()
    for dtype in DTYPES:
        logits = torch.randn(rows, vocab, device=CUDA).to(dtype)
        with_nan = logits.clone()
        with_nan[0, -1] = torch.nan
        for x, changes in (
            (0 * logits, {}),  # overflows every list
            (logits, {"token_counts": (*lists, ints), "presence": ones, "bias": (*lists, ones)}),
            (logits, {"top_k": 5000 * ints}),
            (with_nan, {}),
        ):
            vllm_kernels.sample(x, **few | changes, num_logprobs=20)
        vllm_kernels.sample(logits, **few, num_logprobs=0)
    # Logits that differ have equal quotients. Many are equal themselves.
    close = 1.75 + torch.randint(100, (rows, vocab), device=CUDA) * 2.0**-23
    vllm_kernels.sample(close, **few | {"temperature": 3 * ones}, num_logprobs=20)
