"""The sampling parameters of a request, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from ctypes import c_float
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Protocol

from torch import Tensor

from ...errors import Error, InvalidArgument, InvalidType

__all__ = ["LogitsMask", "LogitsProcessor", "SamplingParams"]

LogitsProcessor = Callable[[Any, Any], Tensor]
"""(input_ids int64 [1, n], scores float32 [1, vocabulary]) -> scores. transformers' processors
are such functions."""


class LogitsMask(Protocol):
    """Says which tokens may come next. ``xgrammar.GrammarMatcher`` is one.

    Example:
        >>> from vllm_kernels.integrations.transformers import SamplingParams
        >>> class OnlyOnce:  # no token comes twice
        ...     def __init__(self):
        ...         self.seen = set()
        ...     def fill_next_token_bitmask(self, bitmask, index=0):
        ...         bitmask[index] = -1  # all tokens
        ...         for token in self.seen:
        ...             bitmask[index, token // 32] &= ~(1 << token % 32)
        ...     def accept_token(self, token_id):
        ...         self.seen.add(token_id)
        ...         return True
        ...     def is_terminated(self):
        ...         return False
        >>> params = SamplingParams(logits_mask=OnlyOnce)
    """

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> object:
        """Writes row ``index`` of int32 [1, words]. Bit j % 32 of word j // 32 allows token j."""
        ...

    def accept_token(self, token_id: int) -> bool:
        """Moves on by a token. False: the token is not allowed."""
        ...

    def is_terminated(self) -> bool:
        """Whether no token may follow."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples the tokens of one request.

    The order of the steps is vLLM's: ``logits_processor``, allowed and forbidden tokens,
    ``logit_bias``, penalties, temperature, min_p, top_k, top_p. docs/sampling.md has the formulas.

    Args:
        max_tokens: Maximum number of new tokens per sequence, >= 1.
        temperature: Divisor of the logits, >= 0. Below 1e-5 sampling is greedy, and so it is by
            default.
        top_k: Sample from the k likeliest tokens. 0 or -1 means all.
        top_p: Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). Sample from the
            likeliest tokens whose probabilities add up to p. It applies after top_k. 1 means all.
        seed: Seed of the request. The same logits and seed give the same tokens in any batch.
            None means random.
        repetition_penalty: Penalty on tokens of prompt and output (Keskar et al. 2019,
            arXiv:1909.05858). It divides positive logits and multiplies negative ones. 1 means
            none.
        n: Number of sequences that continue the prompt. They share its blocks.
        stop_token_ids: Tokens that end a sequence, besides the model's end-of-sequence tokens. The
            token is part of the output.
        stop: Strings that end a sequence. The text is cut before them. Needs a tokenizer.
        ignore_eos: Whether to go on after an end-of-sequence token of the model.
        min_p: Sample from tokens with at least min_p times the highest probability. 0 means all.
        presence_penalty: Subtracted from the logits of tokens that the output has. 0 means none.
        frequency_penalty: Subtracted for each time that the output has the token. 0 means none.
        logit_bias: Values to add to the logits of tokens, by token id. They are cut to
            [-100, 100].
        allowed_token_ids: The only tokens that may come. None allows all.
        bad_words: Words, or lists of token ids. The last token of a word is forbidden after its
            other tokens, with and without a space before the word. Other tokens may still spell it.
            Words need a tokenizer.
        min_tokens: Number of new tokens before the sequence may end by a token or a stop string.
        logprobs: Number of likeliest tokens whose log-probabilities each new token reports,
            besides its own. They are those of the model, before all parameters. -1 means all
            tokens. None means no log-probabilities.
        prompt_logprobs: The same for each prompt token but the first. The prompt is computed as a
            whole, so cached prefixes are not used.
        logits_mask: Returns a new mask of allowed tokens for each sequence, such as
            ``lambda: xgrammar.GrammarMatcher(grammar)``. docs/structured_output.md shows it.
        logits_processor: Maps input_ids int64 [1, n] (prompt and output) and scores float32
            [1, vocabulary] to scores. transformers' logits processors fit.

    Raises:
        InvalidType: An argument has the wrong type.
        InvalidArgument: An argument is out of range.

    Example:
        >>> from vllm_kernels.integrations.transformers import SamplingParams
        >>> params = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, stop=["\\n"])
        >>> params.is_greedy
        False
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    n: int = 1
    stop_token_ids: Items[int] = ()
    stop: Items[str] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str | Items[int]] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_mask: Callable[[], LogitsMask] | None = None
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_collections()
        self._check_ranges()

    def _check(
        self, holds: bool, name: str, expected: str, error: type[Error] = InvalidArgument
    ) -> None:
        if not holds:
            raise error(f"SamplingParams: {name}: expected {expected}, got {getattr(self, name)!r}")

    def _check_types(self) -> None:
        for name in ("max_tokens", "top_k", "n", "min_tokens"):
            self._check(_is_int(getattr(self, name)), name, "an integer", InvalidType)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(value is None or _is_int(value), name, "an integer or None", InvalidType)
        for name in (
            "temperature", "top_p", "min_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            self._check(_is_number(getattr(self, name)), name, "a number", InvalidType)
        for name in ("logits_mask", "logits_processor"):
            value = getattr(self, name)
            self._check(value is None or callable(value), name, "a function or None", InvalidType)

    def _check_collections(self) -> None:
        self._check(
            _are_ints(self.stop_token_ids), "stop_token_ids", "a list of integers", InvalidType
        )
        self._check(not isinstance(self.stop, str), "stop", "a list of strings")
        self._check(
            isinstance(self.stop, Collection) and all(isinstance(x, str) for x in self.stop),
            "stop", "a list of strings", InvalidType,
        )  # fmt: skip
        self._check(all(self.stop), "stop", "strings that are not empty")
        bias, allowed, words = self.logit_bias, self.allowed_token_ids, self.bad_words
        self._check(
            bias is None
            or (isinstance(bias, Mapping)
            and _are_ints(bias)
            and all(map(_is_number, bias.values()))),
            "logit_bias", "numbers by token id, or None", InvalidType,
        )  # fmt: skip
        self._check(
            bias is None or all(value == value for value in bias.values()),
            "logit_bias", "numbers",
        )  # fmt: skip
        self._check(
            allowed is None or _are_ints(allowed),
            "allowed_token_ids", "a list of integers or None", InvalidType,
        )  # fmt: skip
        self._check(allowed is None or len(allowed) > 0, "allowed_token_ids", "at least one token")
        self._check(
            isinstance(words, Collection)
            and not isinstance(words, str)
            and all(isinstance(word, str) or _are_ints(word) for word in words),
            "bad_words", "a list of strings or of lists of integers", InvalidType,
        )  # fmt: skip
        self._check(all(map(len, words)), "bad_words", "words that are not empty")

    def _check_ranges(self) -> None:
        check = self._check
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= _float32(self.temperature) < inf, "temperature", "a finite float32 >= 0")
        check(-1 <= self.top_k < 2**31, "top_k", "0 or -1 (all), or up to 2147483647")
        check(0 < self.top_p <= 1, "top_p", "more than 0, up to 1")
        check(0 <= self.min_p <= 1, "min_p", "0 to 1")
        # The sampler has them in float32.
        check(
            0 < _float32(self.repetition_penalty) < inf,
            "repetition_penalty", "a finite float32 above 0",
        )  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            check(isfinite(_float32(getattr(self, name))), name, "a finite float32")
        check(self.n >= 1, "n", "at least 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "0 to max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or value >= -1, name, "-1 (all) or more")

    @property
    def is_greedy(self) -> bool:
        """Whether the sampler takes the likeliest token.

        A smaller temperature leaves no other token a chance, and the division may overflow.
        """
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on how often tokens came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def needs_tokens(self) -> bool:
        """Whether the next token depends on earlier ones that the host must know."""
        return (
            self.logits_mask is not None
            or self.logits_processor is not None
            or bool(self.bad_words)
        )


def _float32(value: float) -> float:
    try:
        return c_float(value).value
    except OverflowError:  # an int that no float can hold
        return inf


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_ints(values: object) -> bool:
    return isinstance(values, Collection) and all(map(_is_int, values))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
