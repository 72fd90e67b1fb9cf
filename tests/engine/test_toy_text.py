"""The toy model's text with each kind of cache and of sparse attention, float32.

An 8-bit or int4 cache gives the text of transformers over K and V that were rounded likewise, up to
the first tokens that are nearly equally likely. Sparse attention gives the dense text when it keeps
all tokens, and most of it when it keeps few.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.demo import PROMPTS
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.integrations.transformers import PageSelection, SparQ

NUM_TOKENS = 60  # of each prompt
SCALE = 0.05
Rounding = Callable[[Tensor], Tensor]


def one_scale(x: Tensor) -> Tensor:
    return (x / SCALE).round().clamp(-128, 127) * SCALE


def fp8(x: Tensor) -> Tensor:
    return (x / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * SCALE


def scale_per_token(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def scale_and_zero_per_token(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / 15
    return ((x - low) / scale).round() * scale + low


class RoundedCache(DynamicCache):
    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self.rounding = rounding

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(self.rounding(key), self.rounding(value), *args, **kwargs)


@pytest.fixture
def toy(device: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype=torch.float32)
    return model.eval().to(device)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


def by_transformers(model: PreTrainedModel, text: list[int], rounding: Rounding) -> list[int]:
    ids = torch.tensor([text], device=model.device)
    out = model.generate(
        ids, do_sample=False, max_new_tokens=NUM_TOKENS, past_key_values=RoundedCache(rounding)
    )
    return out[0, len(text) :].tolist()


def by_engine(model: PreTrainedModel, texts: list[list[int]], **options: Any) -> list[list[int]]:
    with Engine(model, max_length=256, num_blocks=160, **options) as engine:
        outputs = engine.generate(texts, SamplingParams(max_tokens=NUM_TOKENS))
    return [output.completions[0].tokens for output in outputs]


def number_equal(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


@pytest.mark.parametrize(
    ("cache_dtype", "layout", "rounding"),
    [
        ("int8", "vllm", one_scale),
        ("fp8", "NHD", fp8),
        ("int8_per_token", "HND", scale_per_token),
        ("int4_per_token", "vllm", scale_and_zero_per_token),
        ("int4_per_token", "NHD", scale_and_zero_per_token),
        ("int4_per_token", "HND", scale_and_zero_per_token),
    ],
)
def test_rounded_caches(
    toy: PreTrainedModel, texts: list[list[int]], cache_dtype: str, layout: str, rounding: Rounding
) -> None:
    scales = {} if cache_dtype.endswith("per_token") else {"k_scale": SCALE, "v_scale": SCALE}
    got = by_engine(toy, texts, cache_dtype=cache_dtype, layout=layout, **scales)
    want = [by_transformers(toy, text, rounding) for text in texts]
    assert sum(number_equal(*pair) for pair in zip(got, want)) >= 200


@pytest.mark.parametrize(
    ("sparse", "least"),
    [
        (PageSelection(budget=256), 240),
        (PageSelection(budget=96), 180),
        (PageSelection(budget=256, per_kv_head=True), 240),
        (PageSelection(budget=96, per_kv_head=True), 180),
        (SparQ(r=32, k=256), 240),
        (SparQ(r=16, k=64), 180),
    ],
)
def test_sparse(
    toy: PreTrainedModel, texts: list[list[int]], sparse: PageSelection | SparQ, least: int
) -> None:
    dense, got = by_engine(toy, texts), by_engine(toy, texts, sparse=sparse)
    assert sum(number_equal(*pair) for pair in zip(got, dense)) >= least
