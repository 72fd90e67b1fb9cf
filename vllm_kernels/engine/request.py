"""What an engine is asked to do, and the sequences it makes of it."""

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
    """max_tokens, or the model's longest sequence."""
    ABORT = "abort"
    """The caller's wish."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Args:
        max_tokens: new tokens of a sequence, >= 1.
        temperature: what logits are divided by; below 1e-5: always the likeliest token (greedy).
        top_k: only the k likeliest tokens; 0: all.
        top_p: of those, only the likeliest whose probabilities together reach p (Holtzman et al.
            2019, arXiv:1904.09751); 1: all.
        seed: of the request's own random numbers: the same logits then give the same tokens,
            whatever else is in the batch. None: random.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive,
            multiplied where negative (Keskar et al. 2019, arXiv:1909.05858); 1: none.
        n: sequences that continue the prompt, sharing its blocks.
        stop_token_ids: tokens that end a sequence, beside the model's end-of-sequence tokens. The
            token is part of the output.
        stop: strings that end a sequence; the text is cut before them. Needs a tokenizer.
        ignore_eos: whether the model's end-of-sequence tokens are tokens like others.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
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
            check(isinstance(getattr(self, name), Real), name, "a number", TypeError)
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
        """Whether the likeliest token is taken. So small a temperature leaves no other a chance,
        and logits divided by it might overflow."""
        return self.temperature < 1e-5


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(eq=False)
class Request:
    """A prompt and what becomes of it. Times are seconds of time.perf_counter()."""

    id: int
    prompt: list[int]
    params: SamplingParams
    arrival: float
    salt: str | bytes | None = None  # its prefixes are found by requests with the same one alone
    sequences: list[Sequence] = field(default_factory=list)
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache when admitted

    @property
    def is_finished(self) -> bool:
        """Whether all of its sequences are."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt."""

    id: int
    request: Request
    index: int  # among the request's n
    tokens: list[int]  # prompt and output
    num_computed: int = 0  # leading tokens whose keys and values are in the cache
    num_pending: int = 0  # tokens behind ``tokens`` that are sampled and not fetched yet
    text: str = ""  # of the output, where there is a tokenizer
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        seed = self.request.params.seed
        secret = os.urandom(16) if seed is None else f"{seed}/{self.index}".encode()
        self._key = blake2b(secret).digest()

    def random_number(self) -> float:
        """That of the next token, in [0, 1): the same one, however often it is asked for."""
        digest = blake2b(b"%d" % self.num_output, key=self._key, digest_size=8)
        return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53

    @property
    def output(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_output(self) -> int:
        """How many new tokens there are."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose keys and values are missing: 1 while decoding."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def width(self) -> int:
        """Sequences that this one stands for: all of its request's until the prompt is computed."""
        return self.request.params.n if len(self.request.sequences) == 1 else 1
