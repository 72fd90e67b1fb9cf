"""Index faults of the sampling ops on the GPU."""

from __future__ import annotations

import torch
from contained_cases_base import CUDA, contained

import vllm_kernels as vk


def sample() -> None:
    """With log-probabilities: a row that is none has none."""
    logits = torch.randn(3, 5000, device=CUDA)
    top_k = torch.full((3,), 50, dtype=torch.int32, device=CUDA)
    options = {
        "temperature": 0.02 * top_k,
        "uniforms": torch.rand(3, device=CUDA),
        "num_logprobs": 5,
    }
    rows = torch.tensor([2, 1, 0], dtype=torch.int32, device=CUDA)
    for limits in ({"top_k": top_k}, {}):
        want = vk.sample(logits, rows=rows, **options, **limits)
        for bad in (3, -1, 2**31 - 1):
            wrong = torch.tensor([2, bad, 0], dtype=torch.int32, device=CUDA)
            got = contained(
                lambda: vk.sample(logits, rows=wrong, **options, **limits),  # noqa: B023
                f"sample: rows[1] = {bad}: expected a row of logits in [0, 3)",
            )
            if got is None:
                continue
            tokens, logprobs, ids, ranks = got
            assert all(torch.equal(x[::2], y[::2]) for x, y in zip(got, want))
            assert tokens[1] == -1 and ranks[1] == 0
            assert logprobs[1].isnan().all() and (ids[1] == -1).all()
