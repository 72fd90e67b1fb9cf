"""The options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from ...errors import InvalidArgument, InvalidType
from ..refusals import check_integers
from ..request import Sequence

__all__ = ["DraftModel", "Drafter", "PromptLookup"]


@dataclass(frozen=True)
class PromptLookup:
    """Drafts what followed the last tokens before (Saxena 2023, prompt lookup decoding).

    The longest n-gram that occurred earlier in prompt or output counts, at its last place.

    Args:
        num_tokens: Number of drafted tokens, >= 1.
        max_ngram: Maximum number of last tokens to look up.
        min_ngram: Minimum number, >= 1.

    Raises:
        TypeError: An argument is no integer.
        ValueError: An argument is out of range.

    Example:
        >>> from vllm_kernels.integrations.transformers import PromptLookup
        >>> PromptLookup(num_tokens=8)  # Engine(model, tokenizer, speculative=PromptLookup(8))
        PromptLookup(num_tokens=8, max_ngram=3, min_ngram=1)
    """

    num_tokens: int = 5
    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        check_integers(self, num_tokens=1, max_ngram=1, min_ngram=1)
        if self.max_ngram < self.min_ngram:
            raise InvalidArgument(
                f"PromptLookup: max_ngram: expected at least {self.min_ngram} (min_ngram), got "
                f"{self.max_ngram}"
            )


@dataclass(frozen=True, eq=False)
class DraftModel:
    """Drafts what a smaller model of the same vocabulary writes.

    The draft model draws with the parameters and random numbers of the request. So its tokens are
    often those that the engine's model draws.

    Args:
        model: A transformers decoder model in eval mode, on the device of the engine's model.
        num_tokens: Number of drafted tokens, >= 1.
        cache_bytes: Size of its cache. None takes room for ``max_batch_size`` sequences of
            ``max_length`` tokens, and at most a tenth of the free memory.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.

    Example:
        >>> from pathlib import Path
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from vllm_kernels.integrations.transformers import DraftModel, Engine
        >>> folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        >>> tokenizer = AutoTokenizer.from_pretrained(folder)
        >>> draft = DraftModel(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval())
        >>> with Engine(model, tokenizer, max_length=256, speculative=draft) as engine:
        ...     outputs = engine.generate(["The for statement"])
        >>> len(outputs[0].completions[0].tokens)
        16
    """

    model: PreTrainedModel
    num_tokens: int = 4
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, PreTrainedModel):
            raise InvalidType(
                f"DraftModel: model: expected a transformers model, got {type(self.model).__name__}"
            )
        check_integers(self, num_tokens=1)
        if self.cache_bytes is not None:
            check_integers(self, cache_bytes=1)


class Drafter(Protocol):
    """Drafts tokens for an engine."""

    num_tokens: int

    def propose(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """Returns the next tokens of decoding sequences. It may leave out sequences."""
        ...

    def reset(self) -> None:
        """Forgets all sequences, after a pass that failed."""
        ...
