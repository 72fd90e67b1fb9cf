"""An engine over a random-weight Llama-3-8B in bfloat16: what a decode step costs beyond its matrix
products and attention, and throughput beside transformers' own continuous batching.

    python -m benchmarks.bench_engine_h200 [--part step shared trace] [--batch 64] [--context 2048]
                                           [--requests 256] [--trace-batch 256] [--max-length 2048]
                                           [--layout vllm NHD] [--out engine.json]
                                           [--device cpu --smoke]

step: `step` is the wall time of Engine.step() in steady decoding, `graph` the GPU's time of the
pass alone (its CUDA graph by events), `products` that of all matrix products of a pass in a graph
of their own (every layer's weights as the engine has them: query, key and value as one, gate and up
as one), `attention` that of paged attention over the same pages in all layers. shared: the same of
sequences that begin with the same tokens, with cascades and without. trace: ShareGPT-like lengths
from a fixed seed, all requests at once, greedy, each with its own length of answer; the peer's
attention is named as transformers chose it.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

from benchmarks.harness import capture, machine, replay_seconds, synchronize
from vllm_kernels.bench.engine import Replay, print_replay, replay
from vllm_kernels.bench.trace import TraceRequest, made_trace
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
PARTS = ["step", "shared", "trace"]
SMOKE = LLAMA_3_8B | {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make_model(device: str, settings: dict[str, object], family: str = "llama") -> PreTrainedModel:
    """Random weights in bfloat16."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


# --- one decode step


def decode_step(
    model: PreTrainedModel,
    batch: int,
    context: int,
    layout: str,
    seconds: float,
    shared: int = 0,
    cascade: bool = True,
) -> dict[str, float]:
    """Times in milliseconds. ``shared``: tokens that all sequences begin with."""
    steps = 200
    engine = Engine(
        model,
        layout=layout,
        max_batch_size=batch,
        max_batch_tokens=max(4096, batch),
        max_length=context + steps + 8,
        num_blocks=batch * (-(-(context - shared + steps + 8) // 16) + 1) + shared // 16 + 16,
        prefix_caching=shared > 0,
        cascade=cascade,
    )
    with engine:
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size
        prompt_length = context - steps // 2  # the context in the middle of the run
        beginning = torch.randint(vocabulary, (shared,), generator=generator).tolist()
        if shared:
            engine.generate([[*beginning, 0]], SamplingParams(max_tokens=1))  # it is cached then
        for _ in range(batch):
            own = torch.randint(vocabulary, (prompt_length - shared,), generator=generator)
            engine.add_request(beginning + own.tolist(), SamplingParams(max_tokens=steps + 80))
        decode_all(engine, batch)
        for _ in range(20):
            engine.step()
        synchronize(model.device.type)
        samples = []
        for _ in range(steps - 40):
            start = time.perf_counter()
            engine.step()  # with overlap: ends when the tokens of the pass before are there
            samples.append(time.perf_counter() - start)
        synchronize(model.device.type)
        packed = engine._packed
        pages = packed.pages
        step = packed._single_step(batch, cascade and shared > 0)
        result = {"step": 1e3 * median(samples)}
        with torch.inference_mode():
            layers = packed._llama._layers
            x = torch.randn(batch, model.config.hidden_size, dtype=model.dtype, device=model.device)
            attended = x.new_ones(batch, layers[0].out.shape[1])
            activated = x.new_ones(batch, layers[0].down.shape[1])
            pages.begin(step)

            def products() -> Tensor:
                for layer in layers:
                    linear(x, layer.qkv)
                    linear(attended, layer.out)
                    linear(x, layer.gate_up)
                    linear(activated, layer.down)
                return model.lm_head(x)

            heads = (batch, model.config.num_attention_heads, model.config.head_dim)
            query = torch.randn(heads, dtype=model.dtype, device=model.device)

            def attention() -> None:
                for index, layer in enumerate(layers):
                    pages.attend(index, query, layer.options)

            result["graph"] = 1e3 * _time(lambda: packed._forward(step, batch), model, seconds)
            result["products"] = 1e3 * _time(products, model, seconds)
            result["attention"] = 1e3 * _time(attention, model, seconds)
    alone = result["products"] + result["attention"]
    result["step / (products + attention)"] = result["step"] / alone
    result["graph / (products + attention)"] = result["graph"] / alone
    return result


def is_decoding(engine: Engine, batch: int) -> bool:
    running = engine.scheduler._queues.running
    return len(running) == batch and all(s.num_output for s in running)


def decode_all(engine: Engine, batch: int) -> None:
    """Runs passes until all of ``batch`` requests decode.

    Raises:
        ValueError: A request ended before the last one began to decode.
    """
    while not is_decoding(engine, batch):
        if engine.scheduler.num_unfinished < batch:
            raise ValueError(f"expected max_tokens for {batch} requests that decode at once")
        engine.step()


def _release() -> None:
    """Gives memory back to the device, for who sizes a cache by what is free there."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _time(call: Callable[[], object], model: PreTrainedModel, seconds: float) -> float:
    """Median seconds of a call; on a GPU of a CUDA graph that holds it."""
    if model.device.type != "cuda":
        samples = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return median(samples)
    graph = capture(call)
    samples = []
    began = time.perf_counter()
    while len(samples) < 10 or time.perf_counter() - began < seconds:
        samples.append(replay_seconds(graph))
    return median(samples)


# --- a trace


def by_engine(
    model: PreTrainedModel, trace: list[TraceRequest], layout: str, batch: int, console: Console
) -> Replay:
    options = {"num_blocks": 2048} if model.device.type == "cpu" else {}
    engine = Engine(model, layout=layout, max_batch_size=batch, max_batch_tokens=8192, **options)
    with engine:
        engine.warm_up()
        warm_up = [TraceRequest(0.0, [1, 2, 3], 4)] * 8
        params = SamplingParams(ignore_eos=True)
        replay(engine, warm_up, params, Console(quiet=True))
        engine.reset()
        result = replay(engine, trace, params, console)
        print_replay(console, result, 16)
    return result


def by_transformers(
    model: PreTrainedModel, trace: list[TraceRequest], batch: int, at_most: float
) -> tuple[float, int, int, str]:
    """Seconds, output tokens, finished requests, and the attention that it ran with. If it is not
    done after ``at_most`` seconds, tokens are those of all requests, as if it were."""
    options = {"max_requests_per_batch": batch}
    if model.device.type == "cpu":
        options |= {"num_blocks": 64, "max_batch_tokens": 256}
    with model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=512),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        block=True,
        timeout=5,
    ) as manager:
        for warm in (True, False):
            requests = [TraceRequest(0.0, [1, 2, 3], 4)] * 8 if warm else trace
            start = time.perf_counter()
            for request in requests:
                manager.add_request(
                    list(request.prompt), max_new_tokens=request.max_tokens, eos_token_id=-1
                )
            tokens = done = 0
            while done < len(requests):
                if time.perf_counter() - start > at_most:
                    tokens = sum(request.max_tokens for request in requests)
                    break
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    done += 1
                    tokens += len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended")
            seconds = time.perf_counter() - start
        attention = model.config._attn_implementation
    return seconds, tokens, done, attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--shared", type=int, default=7168, help="tokens of a shared prompt")
    parser.add_argument("--own", type=int, default=512, help="tokens behind it, of each sequence")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--layout", nargs="+", default=["vllm", "NHD"])
    parser.add_argument("--trace-batch", type=int, default=256, help="sequences in a pass")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a sequence of it")
    parser.add_argument("--peer-seconds", type=float, default=300.0, help="the peer's at most")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timing")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("bench_engine_h200: needs a GPU; --device cpu --smoke shows that it runs")
        return
    console = Console(width=120)
    console.print(machine(arguments.device), highlight=False)
    model = make_model(arguments.device, SMOKE if arguments.smoke else LLAMA_3_8B)
    console.print(f"Llama, {model.num_parameters() / 1e9:.2f} billion parameters, bfloat16")
    results: dict[str, object] = {}
    if "step" in arguments.part:
        for layout in arguments.layout:
            step = decode_step(model, arguments.batch, arguments.context, layout, arguments.seconds)
            results[f"step, {layout}"] = step
            console.print(f"decode step, {arguments.batch} x {arguments.context}, {layout}, ms:")
            console.print({name: round(value, 3) for name, value in step.items()})
            _release()
    if "shared" in arguments.part:
        context = arguments.shared + arguments.own
        sizes = arguments.batch, context, arguments.layout[0], arguments.seconds
        for cascade in (False, True):
            step = decode_step(model, *sizes, arguments.shared, cascade)
            results[f"shared, cascade={cascade}"] = step
            console.print(
                f"decode step, {arguments.batch} x {context} tokens, the first {arguments.shared} "
                f"shared, {arguments.layout[0]}, cascade={cascade}, ms:"
            )
            console.print({name: round(value, 3) for name, value in step.items()})
            _release()
    if "trace" in arguments.part:
        trace = made_trace(
            arguments.requests,
            seed=0,
            vocabulary=model.config.vocab_size,
            max_length=arguments.max_length,
            **({"prompt_mean": 20, "output_mean": 10} if arguments.smoke else {}),
        )
        ours = by_engine(model, trace, arguments.layout[0], arguments.trace_batch, console)
        _release()
        seconds, tokens, done, attention = by_transformers(
            model, trace, arguments.trace_batch, arguments.peer_seconds
        )
        rates = ours.output_tokens / ours.seconds, tokens / seconds
        results["trace"] = {
            "engine, output tokens/s": rates[0],
            "transformers, output tokens/s": rates[1],
            "transformers, finished requests": f"{done} of {len(trace)} in {seconds:.1f} s",
            "transformers' attention": attention,
            "engine / transformers": rates[0] / rates[1],
        }
        console.print(results["trace"])
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
