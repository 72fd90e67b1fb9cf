"""Timing for the benchmarks: medians, buffers that rotate past the caches, one line a result.

CPU: wall time of calls. CUDA: a graph of calls over the rotated buffers, timed by events, so that
neither Python nor the launch queue is in the figure.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vllm_kernels

CACHE_BYTES = {"cpu": 256 << 20, "cuda": 800 << 20}
"""Rotated buffers together are at least this large, so that no cache serves them."""


def machine(device: str) -> str:
    """What was measured on, for the head of a table."""
    versions = f"torch {torch.__version__}, vllm_kernels {vllm_kernels.__version__}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    from vllm_kernels import _C

    return (
        f"{model}, {torch.get_num_threads()} threads of {os.cpu_count()}, level {_C.cpu_level()}, "
        f"{versions}"
    )


def run_record(device: str) -> dict[str, Any]:
    """What a file of figures says of its run: machine, number of ranks, command, NCCL's options."""
    return {
        "machine": machine(device),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "command": " ".join(sys.argv),
        "NCCL": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
    }


def synchronize(device: str) -> None:
    """Waits for the device. A CPU is never behind."""
    if device == "cuda":
        torch.cuda.synchronize()


def copies_for(device: str, bytes_per_call: int, rotate: bool = True) -> int:
    """How many sets of buffers to rotate through."""
    return max(1, -(-CACHE_BYTES[device] // max(bytes_per_call, 1))) if rotate else 1


def _time_cpu(call: Callable[[int], object], copies: int, seconds: float) -> list[float]:
    samples: list[float] = []
    for i in range(min(copies, 3)):
        call(i)
    began = time.perf_counter()
    while len(samples) < 7 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call(len(samples) % copies)
        samples.append(time.perf_counter() - start)
    return samples


def capture(
    call: Callable[[], object], warm_up: Callable[[], object] | None = None
) -> torch.cuda.CUDAGraph:
    """Captures a call in a CUDA graph, after ``warm_up``. None: the call twice."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for each in (call, call) if warm_up is None else (warm_up,):
            each()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Time of one replay, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _time_cuda(call: Callable[[int], object], copies: int, seconds: float) -> list[float]:
    calls = max(copies, 20)  # a graph long enough that its own launch does not count
    graph = capture(
        lambda: [call(i % copies) for i in range(calls)],
        lambda: [call(i) for i in range(min(copies, 3))],
    )
    graph.replay()
    torch.cuda.synchronize()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 7 or time.perf_counter() - began < seconds:
        samples.append(replay_seconds(graph) / calls)
    return samples


def median_seconds(
    call: Callable[[int], object], device: str, copies: int, seconds: float = 0.5
) -> float:
    """Median time of `call(i)`, which works on buffer set i of `copies`."""
    time_device = _time_cuda if device == "cuda" else _time_cpu
    return statistics.median(time_device(call, copies, seconds))


def medians(
    calls: dict[str, Callable[[int], object]], device: str, copies: int, seconds: float = 0.5
) -> dict[str, float]:
    """`median_seconds` of each. On a CPU they run in turns, so that all see the same machine."""
    if device == "cuda":
        return {name: median_seconds(call, device, copies, seconds) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for i in range(min(copies, 3)):
            call(i)
    began, rounds = time.perf_counter(), 0
    while rounds < 7 or time.perf_counter() - began < seconds * len(calls):
        for name, call in calls.items():
            start = time.perf_counter()
            call(rounds % copies)
            samples[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(times) for name, times in samples.items()}
