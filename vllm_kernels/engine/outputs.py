"""What an engine returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_kernels.engine.request import FinishReason, Request
from vllm_kernels.engine.scheduler import SchedulerStatistics
from vllm_kernels.kv_cache import Statistics

__all__ = ["Completion", "EngineStatistics", "RequestOutput", "TokenOutput", "output_of"]


class TokenOutput(NamedTuple):
    """One new token of one sequence."""

    request_id: int
    index: int
    """Which of the request's n sequences."""
    token: int
    text: str
    """What became certain of the text with this token (may be empty); without a tokenizer ""."""
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """One sequence of a request, finished."""

    index: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class RequestOutput:
    """A request, finished. Times in seconds."""

    request_id: int
    prompt: list[int]
    completions: list[Completion]
    num_cached_tokens: int
    """Leading tokens of the prompt that were found in the prefix cache."""
    time_to_first_token: float
    total_time: float


@dataclass(frozen=True)
class EngineStatistics:
    """What the engine did so far, and how full its cache is now."""

    scheduler: SchedulerStatistics
    cache: Statistics
    num_running: int
    num_unfinished: int


def output_of(request: Request) -> RequestOutput:
    """What became of a request that is finished."""
    assert request.first_token_time is not None and request.finish_time is not None
    completions = []
    for sequence in request.sequences:
        assert sequence.finish_reason is not None
        completions.append(
            Completion(sequence.index, sequence.output, sequence.text, sequence.finish_reason)
        )
    return RequestOutput(
        request.id,
        request.prompt,
        completions,
        request.num_cached_tokens or 0,
        request.first_token_time - request.arrival,
        request.finish_time - request.arrival,
    )
