"""The demo: a language model writes text through the kernels, checked against transformers.

The same prompts are continued twice, in float32: by transformers as it comes, and through a paged
cache with all kernels in. The tokens must be equal, every op must have run, and torch's attention
must not; otherwise the exit code is 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

import vllm_kernels

from .engine.op_counter import OpCounter
from .hf.llama_patch import FAMILIES
from .integrations.transformers import PagedCache, patched_layers, use_paged_attention
from .kv_cache import Statistics

PROMPTS = (
    "The for statement is used to",
    "A class definition",
    "When an exception occurs in the try suite, a handler",
    "Functions are",
)
NUM_BEAMS = 4
BLOCK_SIZE = 16
USED_OPS = (
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "reshape_and_cache",
    "paged_attention",
    "copy_blocks",
)


class DemoError(Exception):
    """The demo cannot start: a wrong argument, or something that is missing."""


@dataclass(frozen=True)
class Run:
    """One way to generate, by transformers and by us."""

    name: str
    prompts: list[str]
    num_beams: int


@dataclass
class Result:
    """What one run gave."""

    tokens: Tensor  # int64 [prompts, prompt and new columns]
    new_columns: int
    step_seconds: list[float]  # of each token but the first, which has the prompt to read
    statistics: Statistics | None = None  # of the paged cache, when it was fullest

    @property
    def tokens_per_second(self) -> float:
        """Of all prompts, by the median step: others may be using the machine."""
        return len(self.tokens) / median(self.step_seconds) if self.step_seconds else math.nan


class _Watch(StoppingCriteria):
    """Called by generate after each token: moves the bar, and never stops."""

    def __init__(self, on_token: Callable[[], None]) -> None:
        self.on_token = on_token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.on_token()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _Demo:
    """The model, its tokenizer, and where to print."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.console = Console()

    def generate(self, run: Run, title: str, cache: PagedCache | None = None) -> Result:
        """Continues the prompts; without a cache of ours, with the one transformers makes."""
        inputs = self.tokenizer(run.prompts, return_tensors="pt", padding=True)
        inputs = inputs.to(self.model.device)
        fullest: Statistics | None = None
        times: list[float] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        quiet = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=quiet) as progress:
            bar = progress.add_task(title, total=self.max_new_tokens)

            def on_token() -> None:
                nonlocal fullest
                self._synchronize()
                times.append(time.perf_counter())
                progress.advance(bar)
                if cache is not None:
                    now = cache.statistics()
                    if fullest is None or now.used_blocks >= fullest.used_blocks:
                        fullest = now

            tokens = self.model.generate(  # type: ignore[operator]
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                past_key_values=cache,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                num_beams=run.num_beams,
                stopping_criteria=StoppingCriteriaList([_Watch(on_token)]),
            )
        new_columns = tokens.shape[1] - inputs["input_ids"].shape[1]
        steps = [after - before for before, after in pairwise(times)]
        return Result(tokens.cpu(), new_columns, steps, fullest)

    def make_cache(self, run: Run) -> PagedCache:
        """Room for every beam of every prompt, shared or not."""
        longest = max(len(ids) for ids in self.tokenizer(run.prompts)["input_ids"])
        sequences = len(run.prompts) * run.num_beams
        blocks = PagedCache.blocks_needed(sequences, longest + self.max_new_tokens, BLOCK_SIZE)
        return PagedCache(self.model, blocks, BLOCK_SIZE)

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def load(folder: Path, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and its tokenizer, from a folder; nothing is downloaded."""
    if not (folder / "config.json").is_file():
        raise DemoError(f"--model: expected a folder with a config.json, got {folder}")
    if device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch sees no GPU")
    if device == "cuda" and not vllm_kernels.cuda_loaded:
        from . import _library

        raise DemoError(f"--device cuda: {_library.cuda_reason}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
    )
    if model.config.model_type not in FAMILIES:
        raise DemoError(
            f"--model: expected a model of type {', '.join(FAMILIES)}, "
            f"got {model.config.model_type}"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def run_demo(
    model_folder: Path, device: str, prompts: list[str] | None, max_new_tokens: int
) -> int:
    """The whole demo.

    Args:
        model_folder: a Llama-like checkpoint of transformers.
        device: "cpu" or "cuda".
        prompts: texts to continue; None: some that suit the toy model.
        max_new_tokens: >= 2.

    Returns:
        The exit code: 0 if everything was equal and every op ran, otherwise 1.

    Raises:
        DemoError: an argument that does not fit.
    """
    if max_new_tokens < 2:
        raise DemoError(f"--max-new-tokens: expected at least 2, got {max_new_tokens}")
    model, tokenizer = load(model_folder, device)
    demo = _Demo(model, tokenizer, max_new_tokens)
    texts = list(prompts or PROMPTS)
    if not all(tokenizer(texts)["input_ids"]):
        raise DemoError("--prompt: expected texts of at least one token")
    runs = [Run("greedy", texts, 1), Run(f"{NUM_BEAMS} beams", texts[:2], NUM_BEAMS)]
    demo.console.print(
        f"vllm_kernels {vllm_kernels.__version__}, torch {torch.__version__}, {device}; "
        f"{model_folder.name}: {model.num_parameters():,} parameters, float32"
    )

    with torch.inference_mode():
        # transformers first, before anything of ours touches the model.
        # Warm up.
        model.generate(  # type: ignore[operator]
            **_one_token(model), max_new_tokens=2, do_sample=False
        )
        theirs = [demo.generate(run, f"transformers, {run.name}") for run in runs]
        use_paged_attention(model)
        with patched_layers(model):
            counter, counted = _counted(demo, runs)
            ours = []
            for run in runs:
                with demo.make_cache(run) as cache:
                    ours.append(demo.generate(run, f"vllm_kernels, {run.name}", cache))

    _print_texts(demo, runs, ours)
    _print_table(demo.console, runs, theirs, ours)
    problems = _differences(demo, runs, theirs, counted) + _differences(demo, runs, theirs, ours)
    problems += _missing_calls(counter)
    _print_calls(demo.console, counter)
    for problem in dict.fromkeys(problems):
        demo.console.print(f"[bold red]FAILED[/] {escape(problem)}")
    if not problems:
        demo.console.print("[bold green]OK[/] every token equals transformers'")
    return 1 if problems else 0


def _one_token(model: PreTrainedModel) -> dict[str, Tensor]:
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    return {"input_ids": token, "attention_mask": token}


def _counted(demo: _Demo, runs: list[Run]) -> tuple[OpCounter, list[Result]]:
    """Every run once with calls counted, which takes time: the runs that are timed come after."""
    results = []
    with OpCounter() as counter:
        for run in runs:
            with demo.make_cache(run) as cache:
                results.append(demo.generate(run, f"counting calls, {run.name}", cache))
    return counter, results


def _differences(
    demo: _Demo, runs: list[Run], theirs: list[Result], ours: list[Result]
) -> list[str]:
    """One sentence for each prompt whose tokens are not transformers'."""
    problems = []
    for run, expected, got in zip(runs, theirs, ours):
        if torch.equal(expected.tokens, got.tokens):
            continue
        if expected.tokens.shape != got.tokens.shape:
            problems.append(
                f"{run.name}: expected {expected.new_columns} new tokens, got {got.new_columns}"
            )
            continue
        for prompt, row, other in zip(run.prompts, expected.tokens, got.tokens):
            if not torch.equal(row, other):
                at = int((row != other).nonzero()[0])
                place = at - (len(row) - expected.new_columns)
                words = [demo.tokenizer.decode(tokens[at : at + 1]) for tokens in (row, other)]
                problems.append(
                    f"{run.name}: {prompt!r}: new token {place}: expected {words[0]!r} "
                    f"(transformers), got {words[1]!r}"
                )
    return problems


def _missing_calls(counter: OpCounter) -> list[str]:
    problems = [f"{op}: was never called" for op in USED_OPS if counter.ours(op) == 0]
    for name, calls in counter.torch_attention().items():
        problems.append(f"{name}: torch's attention was called {calls} times")
    return problems


def _print_texts(demo: _Demo, runs: list[Run], results: list[Result]) -> None:
    for run, result in zip(runs, results):
        demo.console.rule(run.name)
        start = result.tokens.shape[1] - result.new_columns
        for prompt, row in zip(run.prompts, result.tokens):
            text = demo.tokenizer.decode(row[start:], skip_special_tokens=True)
            demo.console.print(f"[bold]{escape(prompt)}[/]{escape(str(text))}\n", highlight=False)


def _print_table(
    console: Console, runs: list[Run], theirs: list[Result], ours: list[Result]
) -> None:
    table = Table(title=f"blocks of {BLOCK_SIZE} tokens; their state when fullest")
    table.add_column()
    columns: list[list[str]] = []
    for run, expected, got in zip(runs, theirs, ours):
        table.add_column(run.name, justify="right")
        statistics = got.statistics
        assert statistics is not None
        waste = statistics.waste_slots / (statistics.used_blocks * BLOCK_SIZE)
        columns.append(
            [
                str(len(run.prompts)),
                "yes" if torch.equal(expected.tokens, got.tokens) else "NO",
                f"{expected.tokens_per_second:.0f}",
                f"{got.tokens_per_second:.0f}",
                str(statistics.used_blocks),
                f"{100 * waste:.0f} %",
                str(statistics.shared_blocks),
                str(statistics.num_copies),
            ]
        )
    names = (
        "prompts", "tokens equal", "decoded tokens/s, transformers",
        "decoded tokens/s, vllm_kernels",
        "blocks used", "waste in last blocks", "blocks shared", "blocks copied",
    )  # fmt: skip
    for name, *values in zip(names, *columns):
        table.add_row(name, *values)
    console.print(table)


def _print_calls(console: Console, counter: OpCounter) -> None:
    calls = ", ".join(f"{op} {counter.ours(op)}" for op in USED_OPS if counter.ours(op))
    console.print(f"calls: {calls}; torch attention {sum(counter.torch_attention().values())}")
