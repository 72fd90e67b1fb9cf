"""The perplexity of the toy model with another attention function, on held-out text in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import vllm_kernels
from tools.train_toy_model import encode, split_topics

LENGTH = 256  # tokens of a text


class ToyPerplexity:
    """The model with ``attention``, and ``num_texts`` texts."""

    def __init__(self, attention: Callable[..., tuple[Tensor, None]], num_texts: int) -> None:
        folder = Path(vllm_kernels.__file__).parent / "toy_model"
        ALL_ATTENTION_FUNCTIONS["toy_perplexity"] = attention
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()
        self._model.set_attn_implementation("toy_perplexity")
        tokens = encode(AutoTokenizer.from_pretrained(folder), split_topics()[1])
        self.texts = tokens[: num_texts * LENGTH].view(-1, LENGTH)

    @torch.no_grad()
    def of_tokens_from(self, first: int) -> float:
        """Of tokens ``first`` and later of each text."""
        nats = 0.0
        for ids in self.texts:
            logits = self._model(ids[None]).logits[0, first - 1 : -1]
            nats += torch.nn.functional.cross_entropy(logits, ids[first:]).item()
        return float(torch.tensor(nats / len(self.texts)).exp())
