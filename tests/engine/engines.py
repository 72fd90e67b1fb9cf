"""Engines over tiny models, and what transformers gives for each request alone."""

from __future__ import annotations

import os

import torch
from tiny_models import VOCABULARY
from torch import Tensor
from transformers import PreTrainedModel

from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.layer_groups import StepInputs
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.engine.request import SamplingParams

LENGTHS = (5, 19, 33, 8, 70, 3)
SMALL = {"num_blocks": 160, "block_size": 8, "max_batch_size": 4, "max_batch_tokens": 24}
"""Chunks of prompts, and more requests than places."""
FUZZ_SECONDS = float(os.environ.get("VLLM_KERNELS_FUZZ", 0))
"""Length of the random tests. 0: bounded, for CI."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [torch.randint(1, VOCABULARY, (length,)).tolist() for length in lengths]


def by_transformers(
    model: PreTrainedModel, prompt: list[int], max_tokens: int = 20, **settings: object
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
        **settings,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def greedy(engine: Engine, texts: list[list[int]], **params: object) -> list[list[int]]:
    outputs = engine.generate(texts, SamplingParams(**({"max_tokens": 20} | params)))
    return [output.completions[0].tokens for output in outputs]


def check_equal(
    model: PreTrainedModel, texts: list[list[int]], max_tokens: int = 20, **options: object
) -> None:
    """An engine gives each request what it gets alone."""
    expected = [by_transformers(model, text, max_tokens) for text in texts]
    with Engine(model, **(SMALL | options)) as engine:
        assert greedy(engine, texts, max_tokens=max_tokens) == expected


def served_with_failures(
    engine: Engine, texts: list[list[int]] | list[str], max_tokens: int
) -> tuple[list[list[int]], int]:
    """Tokens of each request by :meth:`Engine.step`, and how often it raised."""
    ids = [engine.add_request(text, SamplingParams(max_tokens=max_tokens)) for text in texts]
    got: dict[int, list[int]] = {request: [] for request in ids}
    failures = 0
    while engine.has_unfinished:
        try:
            for output in engine.step():
                got[output.request_id].append(output.token)
        except (MemoryError, KeyError):
            failures += 1
    return list(got.values()), failures


class _Replayed:
    """Stands for a CUDA graph: the same call on the same buffers, into the same logits."""

    def __init__(self, packed: ModelRunner, step: StepInputs) -> None:
        self.packed, self.step = packed, step
        logits, self.drawn = packed._forward_and_draw(step)
        self.logits = logits.clone()

    def replay(self) -> None:
        logits, drawn = self.packed._forward_and_draw(self.step)
        for kept, new in zip((self.logits, *self.drawn), (logits, *drawn)):
            kept.copy_(new)


def replayed(
    packed: ModelRunner, step: StepInputs
) -> tuple[_Replayed, Tensor, tuple[Tensor, Tensor]]:
    """In place of ModelRunner._capture."""
    graph = _Replayed(packed, step)
    return graph, graph.logits, graph.drawn
