"""``python -m vllm_kernels bench engine``, from its arguments on."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from importlib.util import find_spec

import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

import vllm_kernels

from ..engine.engine import Engine
from ..engine.request import SamplingParams
from .engine import (
    WARM_UP,
    compare,
    draw,
    print_comparison,
    print_replay,
    replay,
)
from .trace import TraceRequest, made_trace, read_trace

__all__ = ["BenchError", "run_bench"]


class BenchError(Exception):
    """The benchmark cannot start: a wrong argument, or something that is missing."""


def run_bench(arguments: argparse.Namespace) -> int:
    """The whole benchmark. Returns the exit code: 1 if compared tokens differ.

    Raises:
        BenchError: an argument that does not fit.
    """
    console = Console()
    _check(arguments)
    model, tokenizer = _load(arguments)
    trace = _trace(arguments, model, tokenizer)
    try:
        engine = Engine(
            model,
            tokenizer,
            block_size=arguments.block_size,
            num_blocks=arguments.num_blocks,
            host_bytes=arguments.host_bytes,
            layout=arguments.layout,
            cache_dtype=arguments.cache_dtype,
            k_scale=arguments.k_scale,
            v_scale=arguments.v_scale,
            max_batch_size=arguments.max_batch_size,
            max_batch_tokens=arguments.max_batch_tokens,
            max_length=arguments.max_length,
            compile=arguments.compile,
        )
    except (NotImplementedError, ValueError) as error:
        raise BenchError(str(error)) from None
    params = SamplingParams(ignore_eos=True)
    with engine:
        _refuse_unservable(arguments, engine, trace)
        console.print(
            f"vllm_kernels {vllm_kernels.__version__}, torch {torch.__version__}, "
            f"{arguments.device}; {arguments.model.name}: {model.num_parameters():,} parameters, "
            f"{arguments.dtype}; {len(trace)} requests, cache of {engine.manager.num_blocks} blocks"
        )
        engine.warm_up()
        quiet = Console(quiet=True)
        replay(engine, WARM_UP, params, quiet)
        engine.reset()
        result = replay(engine, trace, params, console)
    print_replay(console, result, arguments.block_size)
    if arguments.plot is not None:
        try:
            draw(arguments.plot, result)
        except (OSError, ValueError) as error:  # ValueError: a picture of no kind it knows
            raise BenchError(f"--plot: {error}") from None
        console.print(f"drawn: {arguments.plot}")
    if not arguments.compare:
        return 0
    comparison = compare(model, trace, result, arguments.max_batch_size)
    print_comparison(console, comparison)
    return 1 if any(one.equal is False for one in comparison) else 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuses numbers of which no trace can be made, and a picture that cannot be drawn."""
    for name, holds, expected in (
        ("requests", arguments.requests >= 1, "at least 1"),
        ("rate", arguments.rate > 0, "more than 0"),
        ("rounds", arguments.rounds >= 1, "at least 1"),
        ("prompt_mean", 0 < arguments.prompt_mean < math.inf, "more than 0 tokens"),
        ("output_mean", 0 < arguments.output_mean < math.inf, "more than 0 tokens"),
    ):
        if not holds:
            got = getattr(arguments, name)
            raise BenchError(f"--{name.replace('_', '-')}: expected {expected}, got {got}")
    if arguments.plot is not None:
        if arguments.plot.is_dir() or not arguments.plot.parent.is_dir():
            raise BenchError(f"--plot: expected a file in a folder, got {arguments.plot}")
        if find_spec("matplotlib") is None:
            raise BenchError("--plot needs matplotlib: pip install matplotlib")


def _refuse_unservable(
    arguments: argparse.Namespace, engine: Engine, trace: list[TraceRequest]
) -> None:
    """Asks the engine to take each request, before the first is run."""
    for number, request in enumerate(trace, 1):
        try:
            params = SamplingParams(max_tokens=request.max_tokens)
            engine.abort(engine.add_request(request.prompt, params))
        except ValueError as error:
            where = f"request {number} of the made trace"
            if request.line is not None:
                where = f"--trace: {arguments.trace}:{request.line}"
            raise BenchError(f"{where}: {error}") from None


def _load(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    if not (arguments.model / "config.json").is_file():
        raise BenchError(f"--model: expected a folder with a config.json, got {arguments.model}")
    if arguments.device == "cuda" and not (torch.cuda.is_available() and vllm_kernels.cuda_loaded):
        raise BenchError("--device cuda: there is no GPU, or the CUDA library is not loaded")
    if arguments.compare and (arguments.rate < math.inf or arguments.rounds > 1):
        raise BenchError("--compare: expected requests all at once, without --rate and --rounds")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), local_files_only=True
    )
    tokenizer = None
    if arguments.trace is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    model.to(arguments.device)  # pyright: ignore[reportArgumentType]
    return model.eval(), tokenizer


def _trace(
    arguments: argparse.Namespace, model: PreTrainedModel, tokenizer: object
) -> list[TraceRequest]:
    config = model.config.get_text_config(decoder=True)
    if arguments.trace is None:
        return made_trace(
            arguments.requests,
            seed=arguments.seed,
            vocabulary=config.vocab_size,
            max_length=arguments.max_length or config.max_position_embeddings,
            rate=arguments.rate,
            rounds=arguments.rounds,
            prompt_mean=arguments.prompt_mean,
            output_mean=arguments.output_mean,
        )
    try:
        trace = read_trace(arguments.trace, max(1, round(arguments.output_mean)))
    except (OSError, ValueError) as error:
        raise BenchError(f"--trace: {error}") from None
    return [
        replace(request, prompt=tokenizer(request.prompt)["input_ids"])  # type: ignore[operator]
        if isinstance(request.prompt, str)
        else request
        for request in trace
    ]
