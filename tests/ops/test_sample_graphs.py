"""The sampling ops in CUDA graphs, replayed with other values of every argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import bits, capture, needs_cuda_library
from sampling_cases import flat, on, pick, random_request, token_lists, with_room
from torch import Tensor

Call = dict[str, Tensor]
VOCAB_SIZE, ROWS = 32_000, 8
SAMPLES = 10


def some_logits() -> Tensor:
    return 3 * torch.randn(ROWS, VOCAB_SIZE)


def rows() -> Tensor:
    return torch.randint(ROWS, (SAMPLES,)).int()


def sample(seeded: bool) -> Call:
    """Every argument. The lists change the likely tokens, and end with entries of -1."""
    likely = 1000
    sizes = torch.tensor([0, 1, 511, 512, 513, 700, 800, 900, 950, 1000])
    lists = {
        name: with_room(token_lists(sizes[torch.randperm(SAMPLES)], likely, values), 4)
        for name, values in (("token_counts", "counts"), ("bias", "bias"))
    }
    penalties = {
        name: torch.rand(SAMPLES) + 0.3 for name in ("repetition", "frequency", "presence")
    }
    request = random_request(SAMPLES, VOCAB_SIZE, full=True, seeded=seeded) | lists | penalties
    logits = some_logits()
    logits[:, :likely] += 8
    return {"tokens": torch.full((SAMPLES,), -7), "logits": logits, "rows": rows()} | flat(request)


def sample_logprobs(call: Call) -> Call:
    unset = token_logprobs(5)
    return call | {name: unset[name] for name in ("logprobs", "ids", "ranks")}


def sample_few() -> Call:
    """Without changes of logits: log-probabilities come with a short list of tokens."""
    return {
        "tokens": torch.full((SAMPLES,), -7),
        "logits": some_logits(),
        "rows": rows(),
        "temperature": pick([0.0, 0.7, 1.0, 3.0], SAMPLES),
        "top_k": pick([0, 1, 50, 127, 129], SAMPLES).int(),
        "top_p": pick([1.0, 0.9, 0.2], SAMPLES),
        "uniforms": torch.rand(SAMPLES),
    }


def top_k_top_p_mask() -> Call:
    return {
        "logits": some_logits(),
        "top_k": pick([0, 1, 50, 129, 5000], ROWS).int(),
        "top_p": pick([1.0, 0.9, 0.2], ROWS),
        "min_p": pick([0.0, 0.05, 1.0], ROWS),
    }


def token_bitmask() -> Call:
    return {
        "logits": some_logits(),
        "bitmask": torch.randint(-(2**31), 2**31, (ROWS, VOCAB_SIZE // 32 - 1)).int(),
        "bitmask_rows": torch.randint(-1, ROWS, (ROWS,)).int(),
    }


def token_logprobs(num_top: int) -> Call:
    return {
        "logprobs": torch.zeros(SAMPLES, 1 + num_top),
        "ids": torch.full((SAMPLES, 1 + num_top), -7),
        "ranks": torch.full((SAMPLES,), -7),
        "logits": some_logits(),
        "tokens": torch.randint(VOCAB_SIZE, (SAMPLES,)),
        "rows": rows(),
    }


def spec_verify(sampled: bool) -> Call:
    """Greedy targets, or probabilities near those of the drafts. Some drafts are short."""
    drafts = torch.randint(3, (ROWS, 4))
    drafts[torch.rand(ROWS, 4) < 0.1] = -1
    call = {
        "tokens": torch.full((ROWS, 5), -7),
        "accepted": torch.full((ROWS,), -7).int(),
        "draft_tokens": drafts,
    }
    if not sampled:
        return call | {"target_tokens": torch.randint(3, (ROWS, 5))}
    logits = torch.randn(ROWS, 5, VOCAB_SIZE)
    logits[..., :3] += 12
    return call | {
        "target_probs": logits.softmax(-1),
        "draft_probs": (logits + torch.randn_like(logits) / 2)[:, :4].softmax(-1),
        "uniforms": torch.rand(ROWS, 5, 2),
    }


CALLS: dict[str, tuple[str, Callable[[], Call]]] = {
    "sample-uniforms": ("sample", lambda: sample(False)),
    "sample-seeds": ("sample", lambda: sample(True)),
    "sample-logprobs": ("sample", lambda: sample_logprobs(sample(True))),
    "sample-logprobs-few": ("sample", lambda: sample_logprobs(sample_few())),
    "top_k_top_p_mask_": ("top_k_top_p_mask_", top_k_top_p_mask),
    "apply_token_bitmask_": ("apply_token_bitmask_", token_bitmask),
    "token_logprobs-0": ("token_logprobs", lambda: token_logprobs(0)),
    "token_logprobs-20": ("token_logprobs", lambda: token_logprobs(20)),
    "token_logprobs-128": ("token_logprobs", lambda: token_logprobs(128)),
    "spec_verify-greedy": ("spec_verify", lambda: spec_verify(False)),
    "spec_verify-sampled": ("spec_verify", lambda: spec_verify(True)),
}


@needs_cuda_library
@pytest.mark.parametrize("name", CALLS)
def test_replays(dtype, name):
    op, make = CALLS[name]
    run = getattr(torch.ops.vllm_kernels, op).default

    def call() -> Call:
        given = make()
        return on(
            "cuda", given | ({"logits": given["logits"].to(dtype)} if "logits" in given else {})
        )

    captured = call()
    written = [one.name for one in run._schema.arguments if one.alias_info and one.name in captured]
    graph = capture(lambda: run(**captured))
    for _ in range(4):
        other = call()
        for argument, value in other.items():
            captured[argument].copy_(value)
        graph.replay()
        run(**other)
        for output in written:
            assert torch.equal(bits(captured[output]), bits(other[output])), output
