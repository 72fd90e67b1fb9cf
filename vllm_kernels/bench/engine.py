"""Replays requests through an engine and says how it went."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median, quantiles

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from transformers import PreTrainedModel

from ..engine.engine import Engine
from ..engine.outputs import EngineStatistics
from ..engine.request import SamplingParams
from .trace import TraceRequest

__all__ = ["WARM_UP", "Replay", "compare", "draw", "print_comparison", "print_replay", "replay"]

WARM_UP = [TraceRequest(0.0, [2, 3, 4], 4)] * 4
"""What everything that is measured runs first."""


@dataclass
class Replay:
    """What a run gave. Times in seconds."""

    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)  # of each request's answer
    prompt_tokens: int = 0
    first_token: list[float] = field(default_factory=list)  # after arrival, of each request
    per_token: list[float] = field(default_factory=list)  # after the first, of each with two
    samples: list[tuple[float, EngineStatistics]] = field(default_factory=list)  # after each step

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(map(len, self.tokens))


def replay(
    engine: Engine, trace: list[TraceRequest], params: SamplingParams, console: Console
) -> Replay:
    """Sends the requests when their time comes, and steps the engine until all are served.

    Args:
        trace: by arrival.
        params: of all; max_tokens is each request's own.
    """
    result = Replay(tokens=[[] for _ in trace])
    arrived: dict[int, int] = {}  # the engine's id: place in the trace
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    waiting = list(enumerate(trace))[::-1]
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    )
    columns += (TimeElapsedColumn(), TextColumn("{task.fields[state]}"))
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        bar = progress.add_task("requests", total=len(trace), state="")
        start = time.perf_counter()
        while waiting or engine.has_unfinished:
            now = time.perf_counter() - start
            while waiting and waiting[-1][1].arrival <= now:
                place, request = waiting.pop()
                one = replace(params, max_tokens=request.max_tokens)
                arrived[engine.add_request(request.prompt, one)] = place
            if not engine.has_unfinished:
                time.sleep(min(0.01, waiting[-1][1].arrival - now))
                continue
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                place = arrived[output.request_id]
                result.tokens[place].append(output.token)
                first.setdefault(place, now)
                last[place] = now
                if output.finish_reason is not None:
                    progress.advance(bar)
            statistics = engine.statistics()
            result.samples.append((now, statistics))
            progress.update(bar, state=f"{statistics.num_running} running")
        result.seconds = time.perf_counter() - start
    for place, request in enumerate(trace):
        result.first_token.append(first[place] - request.arrival)
        if len(result.tokens[place]) > 1:
            steps = len(result.tokens[place]) - 1
            result.per_token.append((last[place] - first[place]) / steps)
    result.prompt_tokens = result.samples[-1][1].scheduler.num_prompt_tokens
    return result


def print_replay(console: Console, result: Replay, block_size: int) -> None:
    """A table of it."""
    final = result.samples[-1][1]
    used = [s.cache for _, s in result.samples if s.cache.used_blocks]
    waste = mean(100 * s.waste_slots / (s.used_blocks * block_size) for s in used) if used else 0
    batch = [s.num_running for _, s in result.samples]
    scheduler = final.scheduler
    hits = 100 * scheduler.num_cached_tokens / max(scheduler.num_prompt_tokens, 1)
    requests = len(result.tokens)
    rows = {
        "requests": f"{requests} in {result.seconds:.2f} s",
        "throughput, requests/s": f"{requests / result.seconds:.2f}",
        "throughput, output tokens/s": f"{result.output_tokens / result.seconds:.0f}",
        "throughput, all tokens/s": (
            f"{(result.output_tokens + result.prompt_tokens) / result.seconds:.0f}"
        ),
        "time to first token, ms (mean, median, 95 %)": _three(result.first_token),
        "time per output token, ms (mean, median, 95 %)": _three(result.per_token),
        "sequences in a pass (mean, largest)": f"{mean(batch):.1f}, {max(batch)}",
        "passes": str(scheduler.num_steps),
        "waste in used blocks": f"{waste:.1f} %",
        "prefix cache hit rate": f"{hits:.1f} %",
        "preemptions (swapped, computed again)": (
            f"{scheduler.num_swapped}, {scheduler.num_recomputed}"
        ),
        "blocks used at most": f"{final.cache.peak_used_blocks} of {final.cache.total_blocks}",
    }
    table = Table(title="Engine", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _three(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    high = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
    return ", ".join(f"{1e3 * value:.1f}" for value in (mean(seconds), median(seconds), high))


def draw(file: Path, result: Replay) -> None:
    """Memory use and batch size over time, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [now for now, _ in result.samples]
    caches = [statistics.cache for _, statistics in result.samples]
    total = caches[0].total_blocks
    used = [100 * cache.used_blocks / total for cache in caches]
    kept = [100 * (total - cache.free_blocks) / total for cache in caches]
    figure, (memory, batch) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5))
    memory.fill_between(times, kept, color="#c6dbef", label="and kept as prefixes")
    memory.fill_between(times, used, color="#3182bd", label="used by sequences")
    memory.set_ylabel("blocks, %")
    memory.set_ylim(0, 100)
    memory.legend(loc="upper right")
    batch.plot(times, [s.num_unfinished for _, s in result.samples], "#bdbdbd", label="unfinished")
    batch.plot(times, [s.num_running for _, s in result.samples], "#e6550d", label="running")
    batch.set_ylabel("sequences")
    batch.set_xlabel("seconds")
    batch.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


# Beside transformers.


@dataclass(frozen=True)
class Comparison:
    """The same prompts all at once; output tokens a second, and whether tokens were equal."""

    name: str
    tokens_per_second: float
    equal: bool | None


def compare(
    model: PreTrainedModel, trace: list[TraceRequest], ours: Replay, batch_size: int
) -> list[Comparison]:
    """Generates greedily by transformers, one request after the other and in padded batches, each
    warmed up as the engine was.

    Args:
        trace: with token ids for prompts.
        ours: the engine's run of it, at once and greedy.
        batch_size: of the padded batches, which go on until their longest answer is complete.
    """
    results = [
        Comparison("Engine", ours.output_tokens / ours.seconds, None),
        _by_transformers("transformers, one by one", model, trace, ours, 1),
        _by_transformers(f"transformers, batches of {batch_size}", model, trace, ours, batch_size),
    ]
    return results


def _by_transformers(
    name: str, model: PreTrainedModel, trace: list[TraceRequest], ours: Replay, batch_size: int
) -> Comparison:
    _generate(model, WARM_UP, batch_size)
    start = time.perf_counter()
    tokens = _generate(model, trace, batch_size)
    seconds = time.perf_counter() - start
    return Comparison(name, sum(map(len, tokens)) / seconds, tokens == ours.tokens)


@torch.inference_mode()
def _generate(
    model: PreTrainedModel, trace: list[TraceRequest], batch_size: int
) -> list[list[int]]:
    """The tokens of each request's answer."""
    tokens: list[list[int]] = []
    for at in range(0, len(trace), batch_size):
        batch = trace[at : at + batch_size]
        columns = max(len(request.prompt) for request in batch)
        rows = [[0] * (columns - len(request.prompt)) + list(request.prompt) for request in batch]
        mask = [[0] * (columns - len(r.prompt)) + [1] * len(r.prompt) for r in batch]
        longest = max(request.max_tokens for request in batch)
        out = model.generate(  # type: ignore[operator]
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        ).cpu()
        tokens += [
            row[columns : columns + request.max_tokens].tolist() for row, request in zip(out, batch)
        ]
    return tokens


def print_comparison(console: Console, results: list[Comparison]) -> None:
    """A table of it."""
    table = Table(title="the same requests, all at once, greedy")
    for name in ("", "output tokens/s", "Engine's tokens"):
        table.add_column(name, justify="right" if name else "left")
    for result in results:
        equal = {None: "", True: "equal", False: "[bold red]DIFFERENT[/]"}[result.equal]
        table.add_row(result.name, f"{result.tokens_per_second:.0f}", equal)
    console.print(table)
