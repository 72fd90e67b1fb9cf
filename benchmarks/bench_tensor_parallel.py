"""Engine over N GPUs (tensor parallelism) beside one GPU: a random Llama-3-8B in bfloat16.

    python -m benchmarks.bench_tensor_parallel FOLDER --make       writes the weights, 16 GB
    python -m benchmarks.bench_tensor_parallel FOLDER --json 1.json
    torchrun --nproc-per-node N -m benchmarks.bench_tensor_parallel FOLDER --json N.json
    python -m benchmarks.bench_tensor_parallel --compare 1.json N.json

Without a folder, a tiny model is made and measured. A decode step, in ms, has about 2k tokens of
context. `step` is the wall time of Engine.step(). `graph` is its pass in a CUDA graph.
`all-reduces` is a graph of the pass's sums over the ranks.

--compare shows how far greedy texts and their log-probabilities are apart. One GPU runs twice more:
`unfused` has the layers of transformers, and `split` has them and other splits of attention. Their
distance is what rounding alone does.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

import vllm_kernels
from benchmarks.bench_engine_h200 import (
    LLAMA_3_8B,
    SMOKE,
    decode_all,
    is_decoding,
    make_model,
)
from benchmarks.harness import capture, replay_seconds, run_record
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.hf.tensor_parallel import group_of_model

STEPS, REPLAYS = 60, 40


def load(folder: Path, ranks: int) -> PreTrainedModel:
    """The model of this rank. One rank has the whole."""
    if ranks == 1:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=ranks)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=config
    ).eval()


def prompts_of(model: PreTrainedModel, batch: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).tolist()


def graph_ms(call: Callable[[], object]) -> float | None:
    """Median time of a call in a CUDA graph, with as many replays on every rank."""
    if not torch.cuda.is_available():
        return None
    graph = capture(call)
    return 1e3 * median(replay_seconds(graph) for _ in range(REPLAYS))


def decode_step(model: PreTrainedModel, batch: int, context: int) -> dict[str, float | None]:
    """Times of a step in ms."""
    passes = -(-batch * context // 4096)  # of the prompts
    tokens = passes + STEPS + 30
    length = context + tokens
    with Engine(
        model, max_batch_size=batch, max_batch_tokens=4096, max_length=length,
        num_blocks=batch * (-(-length // 16) + 1) + 16, prefix_caching=False,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        for prompt in prompts_of(model, batch, context - STEPS // 2):
            engine.add_request(prompt, params)
        decode_all(engine, batch)
        for _ in range(15):
            engine.step()
        samples = []
        for _ in range(STEPS - 30):
            start = time.perf_counter()
            engine.step()
            samples.append(1e3 * (time.perf_counter() - start))
        assert is_decoding(engine, batch)
        packed = engine._packed
        with torch.inference_mode():
            step = packed._single_step(batch, False)
            packed.pages.begin(step)
            result: dict[str, float | None] = {"step": median(samples)}
            result["graph"] = graph_ms(lambda: packed._forward(step, batch))
            group = group_of_model(model)
            if group is not None:
                size = batch, model.config.hidden_size
                x = torch.zeros(size, dtype=model.dtype, device=model.device)

                def all_reduces() -> None:
                    for _ in range(2 * model.config.num_hidden_layers):
                        dist.all_reduce(x, group=group)

                result["all-reduces"] = graph_ms(all_reduces)
        while engine.scheduler.num_unfinished:
            engine.step()
    return result


@contextmanager
def other_splits() -> Iterator[None]:
    """Decode attention whose splits end elsewhere, which rounds otherwise."""
    plain = vllm_kernels.paged_attention

    def split(*args: Any, **options: Any) -> Any:
        if options.get("max_query_len", 1) == 1:
            options["fixed_split_size"] = 256
        return plain(*args, **options)

    vllm_kernels.paged_attention = split
    try:
        yield
    finally:
        vllm_kernels.paged_attention = plain


Text = list[tuple[int, float]]
"""Tokens and their log-probabilities."""


def texts(model: PreTrainedModel, length: int, tokens: int, fused: bool = True) -> list[Text]:
    """Greedy continuations of 8 prompts. Fused layers have attention of their own for a step."""
    with Engine(
        model, max_batch_size=8, max_batch_tokens=4096, max_length=length + tokens + 8,
        num_blocks=8 * (-(-(length + tokens) // 16) + 2), prefix_caching=False, fused=fused,
    ) as engine:  # fmt: skip
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)
        outputs = engine.generate(prompts_of(model, 8, length), params)
    completions = [output.completions[0] for output in outputs]
    return [
        [(token, top[token].logprob) for token, top in zip(one.tokens, one.logprobs or [])]
        for one in completions
    ]


def compare(name: str, one: list[Text], other: list[Text]) -> None:
    """Prints how many tokens are equal before the first that differs, and how far they are off."""
    equal, differences = 0, []
    for left, right in zip(one, other):
        for (token, logprob), (other_token, other_logprob) in zip(left, right):
            if token != other_token:
                break
            equal += 1
            differences.append(abs(logprob - other_logprob))
    total = sum(map(len, one))
    print(
        f"{name}: {equal} of {total} tokens before the first difference of each text; "
        f"log-probabilities differ by {sum(differences) / max(1, len(differences)):.4f}, "
        f"at most {max(differences, default=0.0):.4f}"
    )


def make(folder: Path, smoke: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make_model(device, SMOKE if smoke else LLAMA_3_8B).save_pretrained(folder)


def measure(asked: argparse.Namespace) -> None:
    ranks, rank = (int(os.environ.get(name, at)) for name, at in (("WORLD_SIZE", 1), ("RANK", 0)))
    model = load(asked.folder, ranks)
    result = run_record(model.device.type) | {"steps": {}}
    for batch in asked.batch:
        result["steps"][batch] = step = decode_step(model, batch, asked.context)
        if rank == 0:
            shown = {name: value and round(value, 3) for name, value in step.items()}
            print(f"{ranks} ranks, {batch} x {asked.context}, ms: {shown}", flush=True)
    length = asked.context - asked.tokens
    result["texts"] = texts(model, length, asked.tokens)
    if ranks == 1:
        result["unfused"] = texts(model, length, asked.tokens, fused=False)
        with other_splits():
            result["split"] = texts(model, length, asked.tokens, fused=False)
        compare("other layers", result["texts"], result["unfused"])
        compare("other splits", result["unfused"], result["split"])
    if rank == 0 and asked.json:
        asked.json.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint; none: a tiny model")
    parser.add_argument("--make", action="store_true", help="writes random weights to the folder")
    parser.add_argument("--compare", type=Path, nargs=2, help="the files of one process, and of N")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64], help="sequences")
    parser.add_argument("--context", type=int, default=2048, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--smoke", action="store_true", help="with --make: a tiny model")
    parser.add_argument("--json", type=Path, help="for --compare")
    asked = parser.parse_args()
    if asked.compare:
        one, other = (json.loads(path.read_text()) for path in asked.compare)
        compare(f"{other['ranks']} ranks", one["texts"], other["texts"])
    elif asked.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            asked.folder, asked.batch, asked.context, asked.tokens = Path(folder), [4], 200, 16
            make(asked.folder, smoke=True)
            measure(asked)
    elif asked.make:
        make(asked.folder, asked.smoke)
    else:
        measure(asked)


if __name__ == "__main__":
    main()
