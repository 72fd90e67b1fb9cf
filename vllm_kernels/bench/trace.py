"""Requests to replay: made from a seed, or read from a file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short_repr

__all__ = ["TraceRequest", "made_trace", "read_trace"]

PROMPT_MEAN, OUTPUT_MEAN = 161, 338
"""Tokens of a request in ShareGPT, as the vLLM paper counts them (arXiv:2309.06180, figure 11)."""
_SIGMA = 1.0  # of the logarithm of lengths
MAX_ARRIVAL = 365 * 24 * 3600
"""Seconds, a year: later requests never come in a replay."""


@dataclass(frozen=True)
class TraceRequest:
    """A request that is to come."""

    arrival: float  # seconds after the start
    prompt: str | list[int]
    max_tokens: int  # tokens of the answer
    line: int | None = None  # of the file it is from


def made_trace(
    num_requests: int,
    *,
    seed: int,
    vocabulary: int,
    max_length: int,
    rate: float = math.inf,
    rounds: float = 1.0,
    prompt_mean: float = PROMPT_MEAN,
    output_mean: float = OUTPUT_MEAN,
) -> list[TraceRequest]:
    """Conversations of log-normal lengths; the same seed gives the same requests everywhere.

    Args:
        num_requests: in all.
        vocabulary: tokens are drawn from 2 to vocabulary - 1, evenly.
        max_length: prompt and answer together are at most so long.
        rate: requests a second, at exponential distances; infinity: all at once.
        rounds: requests of a conversation on average (geometric). Each later one repeats all that
            was said before, with other words for the answers, and its own tokens.
        prompt_mean, output_mean: mean tokens of what a request adds, and of its answer.
    """
    numbers = random.Random(seed)

    def length(mean: float, at_most: int) -> int:
        drawn = numbers.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
        return max(1, min(round(drawn), at_most))

    def words(count: int) -> list[int]:
        return [numbers.randrange(2, vocabulary) for _ in range(count)]

    requests: list[TraceRequest] = []
    said: list[int] = []
    arrival = 0.0
    for _ in range(num_requests):
        prompt = said + words(length(prompt_mean, max_length // 2))
        if len(prompt) > max_length // 2:  # a new conversation
            prompt = prompt[len(said) :]
        answer = length(output_mean, max_length - len(prompt))
        requests.append(TraceRequest(arrival, prompt, answer))
        goes_on = numbers.random() < 1 - 1 / rounds
        said = prompt + words(answer) if goes_on else []
        arrival += numbers.expovariate(rate) if rate < math.inf else 0.0
    return requests


def read_trace(file: Path, max_tokens: int) -> list[TraceRequest]:
    """One request a line of JSON: ``{"prompt": "text", "max_tokens": 100, "arrival": 1.5}``.

    The prompt may be a list of token ids; arrival is in seconds. The other two may be left out, and
    stand for ``max_tokens`` and 0 then. Only a newline ends a line.
    Other fields are refused, so that none is ignored.

    Raises:
        ValueError: naming the line and what is wrong with it.
    """
    requests = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(line, max_tokens, number))
        except ValueError as error:
            raise ValueError(f"{file}:{number}: {error}") from None
    if not requests:
        raise ValueError(f"{file}: expected at least one request, got none")
    return sorted(requests, key=lambda request: request.arrival)


def _request(line: bytes, max_tokens: int, number: int) -> TraceRequest:
    """The request that a line stands for."""
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        text = short_repr(line.decode(errors="replace"))
        raise ValueError(f"expected a prompt in JSON, got {text}: {error}") from None
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise ValueError(f"expected a prompt in JSON, got {short_repr(entry)}")
    others = sorted(entry.keys() - {"prompt", "max_tokens", "arrival"})
    if others:
        raise ValueError(f"expected prompt, max_tokens and arrival, got {', '.join(others)}")
    prompt = entry["prompt"]
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_tokens:
        raise ValueError(f"prompt: expected text or a list of token ids, got {short_repr(prompt)}")
    if isinstance(prompt, str):
        _refuse_surrogates(prompt)
    count = entry.get("max_tokens", max_tokens)
    if type(count) is not int:
        raise ValueError(f"max_tokens: expected an integer, got {short_repr(count)}")
    arrival = entry.get("arrival", 0)
    if type(arrival) not in (int, float) or not 0 <= arrival <= MAX_ARRIVAL:
        raise ValueError(
            f"arrival: expected seconds, 0 to {MAX_ARRIVAL} (a year), got {short_repr(arrival)}"
        )
    return TraceRequest(float(arrival), prompt, count, number)


def _refuse_surrogates(prompt: str) -> None:
    """Raises ValueError for half a character, which JSON can hold and no tokenizer takes."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: expected text, got {short_repr(prompt)}: a lone surrogate at character "
            f"{error.start}"
        ) from None
