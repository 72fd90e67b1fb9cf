"""Which tokens a request allows, forbids or favours, beyond the numbers of ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ...errors import InvalidArgument
from ..request import Sequence
from .params import SamplingParams

__all__ = ["Constraints", "constraints_of", "num_words"]

_MAX_BIAS = 100.0


def num_words(vocabulary: int) -> int:
    """Returns the number of int32 words of a bitmask over the vocabulary."""
    return -(-vocabulary // 32)


@dataclass(frozen=True, eq=False)
class Constraints:
    """What a request asks of single tokens, with token ids in place of words."""

    bias: dict[int, float]  # added to logits; -inf forbids a token
    words: list[tuple[int, ...]]  # forbidden words of two tokens or more
    end_tokens: frozenset[int]  # forbidden while the output is short
    min_tokens: int
    allowed: npt.NDArray[np.int32] | None  # bitmask [words]; None: all tokens

    def banned(self, sequence: Sequence) -> frozenset[int]:
        """Returns the tokens that may not come next, besides those of ``bias``.

        Words need all earlier tokens. The scheduler waits for them: ``needs_tokens``.
        """
        banned = self.end_tokens if sequence.num_sampled < self.min_tokens else frozenset()
        return banned | self._ends_of_words(sequence)

    def allows(self, sequence: Sequence, token: int) -> bool:
        """Whether a token may come next. If none may, the sampler draws one that may not."""
        is_early = sequence.num_output < self.min_tokens
        if self.bias.get(token) == -np.inf or (is_early and token in self.end_tokens):
            return False
        if token in self._ends_of_words(sequence):
            return False
        return self.allowed is None or bool(self.allowed[token // 32] >> token % 32 & 1)

    def _ends_of_words(self, sequence: Sequence) -> set[int]:
        """Last tokens of the forbidden words whose other tokens are the last output."""
        output = sequence.output if self.words else []
        return {
            word[-1]
            for word in self.words
            if len(output) >= len(word) - 1 and tuple(output[1 - len(word) :]) == word[:-1]
        }


def constraints_of(
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase | None,
    end_tokens: Collection[int],
    vocabulary: int,
) -> Constraints | None:
    """Returns the constraints of a request, or None if it has none.

    Args:
        params: The parameters.
        tokenizer: The engine's tokenizer, for words.
        end_tokens: The model's end-of-sequence tokens.
        vocabulary: Number of logits of a row.

    Raises:
        ValueError: A token is outside the vocabulary, or there are words but no tokenizer.
    """
    bias = {
        int(token): float(min(max(value, -_MAX_BIAS), _MAX_BIAS))
        for token, value in (params.logit_bias or {}).items()
    }
    words = [one for word in params.bad_words for one in _variants(word, tokenizer)]
    allowed = list(map(int, params.allowed_token_ids or ()))
    _refuse_outside("logit_bias", bias, vocabulary)
    _refuse_outside("allowed_token_ids", allowed, vocabulary)
    _refuse_outside("bad_words", [token for word in words for token in word], vocabulary)
    _refuse_outside("stop_token_ids", params.stop_token_ids, vocabulary)
    bias |= {word[0]: -np.inf for word in words if len(word) == 1}
    ends = set() if params.ignore_eos else set(end_tokens)
    ends |= {int(token) for token in params.stop_token_ids}
    forbidden = {word[0] for word in words if len(word) == 1} | (
        ends if params.min_tokens else set()
    )
    if allowed and forbidden.issuperset(allowed):
        raise InvalidArgument(
            "Engine: allowed_token_ids: expected a token that bad_words and min_tokens do not "
            f"forbid, got {allowed}"
        )
    if not (bias or words or allowed or (params.min_tokens and ends)):
        return None
    return Constraints(
        bias,
        [word for word in words if len(word) > 1],
        frozenset(token for token in ends if 0 <= token < vocabulary),
        params.min_tokens,
        _bitmask(allowed, vocabulary) if allowed else None,
    )


def _variants(
    word: str | Collection[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[tuple[int, ...]]:
    """Returns the token ids of a word, and of the word after a space if they differ."""
    if not isinstance(word, str):
        return [tuple(map(int, word))]
    if tokenizer is None:
        raise InvalidArgument(
            f"Engine: bad_words: expected token ids (there is no tokenizer), got {word!r}"
        )
    both = (
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in (word, f" {word.lstrip()}")
    )
    return [tokens for tokens in dict.fromkeys(both) if tokens]


def _refuse_outside(name: str, tokens: Collection[int], vocabulary: int) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InvalidArgument(
                f"Engine: {name}: expected tokens from 0 to {vocabulary - 1}, got {token}"
            )


def _bitmask(tokens: Collection[int], vocabulary: int) -> npt.NDArray[np.int32]:
    bits = np.zeros(32 * num_words(vocabulary), np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
