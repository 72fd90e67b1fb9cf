"""Requests, their sampling parameters and their sequences."""

from __future__ import annotations

import enum
import os
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Integral, Real

__all__ = ["FinishReason", "Request", "SamplingParams", "Sequence"]


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The sequence reached max_tokens or the engine's max_length."""
    ABORT = "abort"
    """The caller aborted the request."""
    ERROR = "error"
    """The request could not be served. ``RequestOutput.error`` has the exception."""


@dataclass(frozen=True)
class SamplingParams:
    """How an engine samples the tokens of one request.

    Args:
        max_tokens: Maximum number of new tokens per sequence, >= 1.
        temperature: Divisor of the logits, >= 0. Below 1e-5 sampling is greedy.
        top_k: Sample from the k likeliest tokens. 0 means all.
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

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
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

    def __post_init__(self) -> None:
        def check(
            holds: bool, name: str, expected: str, error: type[Exception] = ValueError
        ) -> None:
            if not holds:
                raise error(
                    f"SamplingParams: {name}: expected {expected}, got {getattr(self, name)!r}"
                )

        for name in ("max_tokens", "top_k", "n"):
            check(_is_int(getattr(self, name)), name, "an integer", TypeError)
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            check(is_number, name, "a number", TypeError)
        check(self.seed is None or _is_int(self.seed), "seed", "an integer or None", TypeError)
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= self.temperature < float("inf"), "temperature", "a number >= 0")
        check(self.top_k >= 0, "top_k", "0 (all) or more")
        check(0 < self.top_p <= 1, "top_p", "more than 0, up to 1")
        check(0 < self.repetition_penalty < float("inf"), "repetition_penalty", "more than 0")
        check(self.n >= 1, "n", "at least 1")
        check(
            isinstance(self.stop_token_ids, Collection) and all(map(_is_int, self.stop_token_ids)),
            "stop_token_ids", "a list of integers", TypeError,
        )  # fmt: skip
        check(not isinstance(self.stop, str), "stop", "a list of strings")
        check(
            isinstance(self.stop, Collection) and all(isinstance(x, str) for x in self.stop),
            "stop", "a list of strings", TypeError,
        )  # fmt: skip
        check(all(self.stop), "stop", "strings that are not empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the sampler takes the likeliest token.

        A smaller temperature leaves no other token a chance, and the division may overflow.
        """
        return self.temperature < 1e-5


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(eq=False)
class Request:
    """A prompt and its sequences. Times are in seconds, from time.perf_counter()."""

    id: int
    prompt: list[int]
    params: SamplingParams
    arrival: float
    salt: str | bytes | None = None  # only requests with the same salt share cached prefixes
    sequences: list[Sequence] = field(default_factory=list)
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int | None = None  # prompt tokens in the prefix cache at admission
    error: Exception | None = None  # why it ended with FinishReason.ERROR
    num_failures: int = 0  # failed passes with this request since its last token
    num_failures_alone: int = 0  # failed passes without other requests since its last token
    is_paused: bool = False  # keeps the request out of passes

    @property
    def is_finished(self) -> bool:
        """Whether all sequences are finished."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_output(self) -> int:
        """The number of new tokens of all sequences."""
        return sum(sequence.num_output for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt."""

    id: int
    request: Request
    index: int  # 0 .. n - 1
    tokens: list[int]  # prompt and output
    num_computed: int = 0  # number of leading tokens with keys and values in the cache
    num_pending: int = 0  # number of sampled tokens that are not in ``tokens`` yet
    text: str = ""  # text of the output; needs a tokenizer
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        seed = self.request.params.seed
        secret = os.urandom(16) if seed is None else f"{seed}/{self.index}".encode()
        self._key = blake2b(secret).digest()

    def random_number(self) -> float:
        """Returns the random number of the next token, in [0, 1).

        It depends only on the seed and the position, so a repeated pass draws the same token.
        """
        digest = blake2b(b"%d" % self.num_output, key=self._key, digest_size=8)
        return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53

    @property
    def output(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_output(self) -> int:
        """The number of new tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_to_compute(self) -> int:
        """The number of tokens without keys and values. It is 1 while decoding."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def width(self) -> int:
        """The number of batch rows to reserve: ``n`` until the prompt is computed, then 1."""
        return self.request.params.n if len(self.request.sequences) == 1 else 1
