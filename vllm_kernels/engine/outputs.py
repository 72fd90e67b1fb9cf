"""Results that an engine returns."""

from __future__ import annotations

from dataclasses import dataclass

from ..kv_cache import Statistics
from .plan import SchedulerStatistics
from .request import FinishReason, Request
from .sampling.logprobs import TopLogprobs

__all__ = [
    "Completion",
    "EngineStatistics",
    "RequestOutput",
    "TokenOutput",
    "output_of",
    "raise_if_all_failed",
]


@dataclass(slots=True)
class TokenOutput:
    """One new token of one sequence, or the error that ended the sequence."""

    request_id: int
    index: int
    """Index of the sequence among the request's ``n``."""
    token: int
    """Token id. It is -1 without a token, if ``finish_reason`` is ERROR."""
    text: str
    """Text that this token made final. It may be empty, and is "" without a tokenizer."""
    finish_reason: FinishReason | None
    error: Exception | None = None
    """The reason for ERROR."""
    logprobs: TopLogprobs | None = None
    """Log-probabilities by token id, of the token and the likeliest ones. None: not asked for."""


@dataclass(frozen=True)
class Completion:
    """One finished sequence of a request."""

    index: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TopLogprobs] | None = None
    """Log-probabilities of each token, as in ``TokenOutput``. None: not asked for."""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. Times are in seconds."""

    request_id: int
    prompt: list[int]
    completions: list[Completion]
    num_cached_tokens: int
    """Number of leading prompt tokens that the prefix cache had."""
    time_to_first_token: float | None
    """None if there was no token."""
    total_time: float
    error: Exception | None = None
    """The reason for ``FinishReason.ERROR``. It has ``request_ids`` if a pass failed."""
    prompt_logprobs: list[TopLogprobs | None] | None = None
    """Log-probabilities of each prompt token. The first one's are None. None: not asked for."""


@dataclass(frozen=True)
class EngineStatistics:
    """Counters since the start or the last reset, and the current use of the cache."""

    scheduler: SchedulerStatistics
    cache: Statistics
    num_running: int
    num_unfinished: int


def output_of(request: Request) -> RequestOutput:
    """Returns the output of a finished request."""
    assert request.finish_time is not None
    completions = []
    for sequence in request.sequences:
        assert sequence.finish_reason is not None
        logprobs = None if request.params.logprobs is None else sequence.logprobs
        completions.append(
            Completion(
                sequence.index, sequence.output, sequence.text, sequence.finish_reason, logprobs
            )
        )
    return RequestOutput(
        request.id,
        request.prompt,
        completions,
        request.num_cached_tokens or 0,
        None if request.first_token_time is None else request.first_token_time - request.arrival,
        request.finish_time - request.arrival,
        request.error,
        None if request.params.prompt_logprobs is None else request.prompt_logprobs,
    )


def raise_if_all_failed(outputs: list[RequestOutput]) -> None:
    """Raises the first error if every request ended with one."""
    errors = [output.error for output in outputs if output.error is not None]
    if errors and len(errors) == len(outputs):
        raise errors[0]
