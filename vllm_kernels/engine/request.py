"""Requests and their sequences."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from .sampling.params import LogitsMask, SamplingParams

if TYPE_CHECKING:
    from .sampling.constraints import Constraints
    from .sampling.logprobs import TopLogprobs
    from .sampling.token_counts import TokenCounts

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


@dataclass(eq=False)
class Request:
    """A prompt and its sequences. Times are in seconds, from time.perf_counter()."""

    id: int
    prompt: list[int]
    params: SamplingParams
    arrival: float
    salt: str | bytes | None = None  # only requests with the same salt share cached prefixes
    constraints: Constraints | None = None
    sequences: list[Sequence] = field(default_factory=list)
    first_token_time: float | None = None
    finish_time: float | None = None
    num_cached_tokens: int | None = None  # prompt tokens in the prefix cache at admission
    error: Exception | None = None  # why it ended with FinishReason.ERROR
    num_failures: int = 0  # failed passes with this request since its last token
    num_failures_alone: int = 0  # failed passes without other requests since its last token
    is_paused: bool = False  # keeps the request out of passes
    # By prompt token, as far as they are computed. The first token has none.
    prompt_logprobs: list[TopLogprobs | None] = field(default_factory=lambda: [None])

    @property
    def is_finished(self) -> bool:
        """Whether all sequences are finished."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_output(self) -> int:
        """The number of new tokens of all sequences."""
        return sum(sequence.num_output for sequence in self.sequences)

    def add_prompt_logprobs(self, start: int, logprobs: Items[TopLogprobs]) -> None:
        """Adds the log-probabilities from position ``start`` on, except for known ones."""
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]


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

    counts: TokenCounts | None = None  # made for the first penalty
    mask: LogitsMask | None = None  # made for the first masked token
    logprobs: list[TopLogprobs] = field(default_factory=list)  # of the output

    def __post_init__(self) -> None:
        seed = self.request.params.seed
        secret = os.urandom(16) if seed is None else f"{seed}/{self.index}".encode()
        digest = blake2b(secret, digest_size=8).digest()
        self.seed = int.from_bytes(digest, "little", signed=True)  # with the position, it draws

    @property
    def output(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_output(self) -> int:
        """The number of new tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def length(self) -> int:
        """The number of tokens, pending ones included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_sampled(self) -> int:
        """The number of new tokens, pending ones included."""
        return self.length - len(self.request.prompt)

    @property
    def num_to_compute(self) -> int:
        """The number of tokens without keys and values. It is 1 while decoding."""
        return self.length - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether all prompt tokens have keys and values."""
        return self.num_computed >= len(self.request.prompt)

    @property
    def may_draft(self) -> bool:
        """Whether the parameters of several next tokens are those of the next one."""
        params = self.request.params
        return not (
            params.has_penalties or params.needs_tokens or self.num_sampled < params.min_tokens
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next tokens to compute are prompt tokens whose logits are asked for."""
        params, prompt = self.request.params, self.request.prompt
        return params.prompt_logprobs is not None and len(self.request.prompt_logprobs) < len(
            prompt
        )

    @property
    def width(self) -> int:
        """The number of batch rows to reserve: ``n`` until the prompt is computed, then 1."""
        return self.request.params.n if len(self.request.sequences) == 1 else 1
