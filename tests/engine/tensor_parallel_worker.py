"""One rank of a test in test_tensor_parallel.py.

``tensor_parallel_worker.py CASE FOLDER DEVICE``, with the environment that torchrun sets. It loads
the models in the folder, and writes one line of JSON per result to ``CASE.RANK`` there.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from vllm_kernels.engine.async_engine import AsyncEngine
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.engine.speculative.options import DraftModel, PromptLookup
from vllm_kernels.integrations.transformers import (
    PagedCache,
    stop_paged_attention,
    use_paged_attention,
)

RANK = int(os.environ["RANK"])
CASE, FOLDER, DEVICE = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
OPTIONS: dict[str, Any] = {
    "num_blocks": 160 + RANK, "block_size": 8, "max_batch_size": 4, "max_batch_tokens": 24,
}  # fmt: skip
PARAMS = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.9, seed=3)]
PROMPTS = json.loads((FOLDER / "prompts.json").read_text())


def load(name: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        FOLDER / name,
        distributed_config=DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"])),
        attn_implementation="eager",
    )
    return model.eval()


def tell(**values: object) -> None:
    with (FOLDER / f"{CASE}.{RANK}").open("a") as file:
        print(json.dumps(values), file=file, flush=True)


def tell_error(name: str, call: Callable[[], object]) -> None:
    """Writes what a call raises, and the seconds until then."""
    begin = time.monotonic()
    try:
        call()
        error = None
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    tell(name=name, error=error, seconds=time.monotonic() - begin)


def tokens_of(engine: Engine, params: SamplingParams = PARAMS[0]) -> list[list[int]]:
    return [output.completions[0].tokens for output in engine.generate(PROMPTS, params)]


def models() -> None:
    """Every model gives the tokens of one process."""
    for name in json.loads((FOLDER / "models.json").read_text()):
        model = load(name)
        for options in ({"overlap": True}, *([{"fused": False}] if name == "llama" else [])):
            with Engine(model, **OPTIONS, **options) as engine:
                tokens = [tokens_of(engine, params) for params in PARAMS]
                drawn = tokens_of(engine, SamplingParams(max_tokens=8, temperature=5.0))
                blocks = engine.manager.num_blocks
            tell(model=name, tokens=tokens, drawn=drawn, blocks=blocks)


def paged_cache(model: PreTrainedModel) -> list[int]:
    """The tokens of ``generate`` for the first prompt."""
    use_paged_attention(model)
    ids = torch.tensor(PROMPTS[:1], device=DEVICE)
    with torch.inference_mode(), PagedCache(model, 16, 8) as cache:
        out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    stop_paged_attention(model)
    return out[0, ids.shape[1] :].tolist()


def calls() -> None:
    """Refusals, rank 0 alone takes requests, the ranks call differently."""
    tell_error("heads", lambda: Engine(load("one-kv-head"), **OPTIONS))
    model = load("llama")
    tell(name="cache", tokens=paged_cache(model))
    tell_error("compile", lambda: Engine(model, **OPTIONS, compile="eager"))
    tell_error("drafts", lambda: Engine(model, **OPTIONS, speculative=DraftModel(model)))
    with Engine(model, **OPTIONS, speculative=PromptLookup()) as engine:
        functions = SamplingParams(max_tokens=2, logits_processor=lambda ids, scores: scores)
        tell_error("functions", lambda: engine.add_request(PROMPTS[0], functions))
        asks = SamplingParams(max_tokens=12, prompt_logprobs=0)
        tell(name="drafted", tokens=tokens_of(engine, asks))
    with Engine(model, **OPTIONS) as engine:
        if RANK == 0:
            tell_error("follow on rank 0", engine.follow)
            tell(name="served", tokens=asyncio.run(serve(engine)))
        else:
            engine.follow()
    engine = Engine(model, **(OPTIONS | {"max_batch_size": 4 + RANK}))
    tell_error("other options", engine.step)
    tell_error("close", engine.close)
    engine = Engine(model, **OPTIONS, speculative=None if RANK else PromptLookup())
    tell_error("other drafts", engine.step)
    tell_error("close", engine.close)
    limit = dist.group.WORLD._get_backend(torch.device(DEVICE)).options._timeout
    tell(name="limit", seconds=limit.total_seconds())
    engine = Engine(model, **OPTIONS)
    tell_error("other calls", engine.warm_up if RANK else engine.close)
    engine.close()
    engine = Engine(model, **OPTIONS)
    engine.add_request(PROMPTS[RANK])
    # On a GPU, rank 0 launches a pass before it hears of the failure.
    tell_error("other prompts", lambda: [engine.step() for _ in range(3)])


def raises() -> None:
    """Rank 1 raises in its third pass, and its process goes on."""
    engine = Engine(load("llama"), **OPTIONS)

    def poison() -> None:
        raise KeyError("poison")

    in_third_pass(engine, poison)
    tell_error("generate", lambda: engine.generate(PROMPTS))
    tell_error("step", engine.step)
    tell(name="unfinished", number=engine.scheduler.num_unfinished)
    if RANK == 1:
        time.sleep(6)  # longer than the time limit


def constructor() -> None:
    """Rank 1 gives an option that is refused, and its process goes on."""
    options = OPTIONS | {"k_scale": 1.0 + RANK}
    tell_error("constructor", lambda: Engine(load("llama"), **options))
    if RANK == 1:
        time.sleep(6)  # longer than the time limit


def killed() -> None:
    """The process of rank 1 ends without a word."""
    engine = Engine(load("llama"), **OPTIONS)
    in_third_pass(engine, lambda: os.kill(os.getpid(), signal.SIGKILL))
    tell_error("generate", lambda: engine.generate(PROMPTS))


def in_third_pass(engine: Engine, call: Callable[[], None]) -> None:
    """Makes a call on rank 1 inside a pass."""
    passes = iter(range(100))
    if RANK == 1:
        engine.model.model.embed_tokens.register_forward_hook(
            lambda *_: call() if next(passes) == 2 else None
        )


async def serve(engine: Engine) -> list[list[int]]:
    """Requests of several clients, one refused, one that disconnects."""
    async with AsyncEngine(engine) as server:
        tell_error("refused", lambda: engine.add_request([1] * 2000))

        async def disconnects() -> None:
            async for _ in server.stream(PROMPTS[0], SamplingParams(max_tokens=100)):
                break

        outputs, _ = await asyncio.gather(server.generate(PROMPTS, PARAMS[0]), disconnects())
    return [output.completions[0].tokens for output in outputs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[CASE]()
    os._exit(0)  # a group with a failed rank cannot be destroyed in order
