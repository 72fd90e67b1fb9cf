"""paged_attention and sample at random points of all their axes at once.

test_paged_attention_random.py runs them, too.

    python tests/ops/random_points.py --device cuda --seconds 300 --processes 14
    python tests/ops/random_points.py --device cuda 4711        one point again

A point is a number: it gives the kind of the check and all arguments.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
# ruff: noqa: E402 (imports behind sys.path)
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    sys.path.append(str(HERE.parent.parent))  # last: PYTHONPATH may have another build

import torch
from paged_attention_cases import (
    EIGHT_BITS,
    Case,
    alone,
    assert_right,
    make_case,
    per_head,
    query_scales,
    with_e4m3_query,
    with_token_scales,
    with_token_zeros,
)
from sampling_cases import check, check_logprobs, random_sample

import vllm_kernels


def random_case(device: str) -> Case:
    kv_heads = random.choice([1, 2, 3, 5, 7, 8, 12, 20])
    heads = kv_heads * random.choice([1, 2, 3, 4, 5, 7, 8, 16])
    if kv_heads == 1:
        heads = random.choice([1, 4, 16, 64, 71])
    stored = random.choice([None, None, *EIGHT_BITS])
    block_size = 2 ** random.randrange(9)
    near = [0, 1, block_size, block_size + 1]
    lens = [random.choice([*near, random.randrange(1, 900)]) for _ in range(random.randrange(1, 6))]
    queries = None
    if random.random() < 0.5:
        queries = [random.choice([0, 1, 1, 2, 3, random.randrange(9)]) for _ in lens]
    options: dict[str, object] = {}
    for name, value in (
        ("sliding_window", random.choice([1, block_size, 90, 2000])),
        ("softcap", 20.0),
        ("alibi_slopes", per_head(heads, 0.01, 0.4)),
        ("sinks", per_head(heads, -1, 1)),
        ("causal", False),
    ):
        if random.random() < 0.3:
            options[name] = value
    if device == "cpu" and queries is not None and "causal" not in options:  # as it must be there
        lens = [length and max(length, count) for length, count in zip(lens, queries)]
    case = make_case(
        device,
        random.choice([torch.float32, torch.bfloat16, torch.float16]),
        lens,
        queries,
        heads=heads,
        kv_heads=kv_heads,
        head_size=random.randrange(32, 257, 16 if stored else 8),
        block_size=block_size,
        stored=stored,
        layout=random.choice(["vllm", "NHD", "HND"]),
        scales_per_head=stored is not None and random.random() < 0.5,
        **options,
    )
    return maybe_with_e4m3_query(maybe_with_token_scales(maybe_with_tree(case)))


def maybe_with_e4m3_query(case: Case) -> Case:
    if case.key_cache.dtype != torch.float8_e4m3fn or case.query.dtype == torch.float32:
        return case
    scales = [None, query_scales(1), query_scales(case.kv_heads())]
    return case if random.random() < 0.5 else with_e4m3_query(case, random.choice(scales))


def maybe_with_tree(case: Case) -> Case:
    options = case.options
    plain = options.get("causal", True) and not options.get("sliding_window")
    if not plain or "query_start_loc" not in options or random.random() < 0.6:
        return case
    words = torch.randint(2**31, (len(case.query),), dtype=torch.int64)
    if random.random() < 0.5:
        words = words.int()
    return case.with_options(tree_mask=words.to(case.query.device))


def maybe_with_token_scales(case: Case) -> Case:
    if case.key_cache.dtype != torch.int8 or random.random() < 0.5:
        return case
    scaled = with_token_scales(case, random.choice([4.0, 1e6]))
    fits_int4 = case.query.shape[-1] in range(32, 257, 32)
    return with_token_zeros(scaled) if fits_int4 and random.random() < 0.5 else scaled


def fixed_split_case(device: str) -> Case:
    """A batch with fixed_split_size: lengths from one token to hundreds of splits."""
    kv_heads = random.choice([1, 1, 2, 4])
    heads = kv_heads * random.choice([1, 4, 8, 16, 16])
    stored = random.choice([None, *EIGHT_BITS])
    block_size = random.choice([16, 16, 64, 256])
    longest = random.choice([300, 3000, 26000])
    lens = [random.randrange(1, longest) for _ in range(random.randrange(2, 5))]
    most = random.choice([1, 1, 3])
    queries = [random.randrange(1, most + 1) for _ in lens]
    case = make_case(
        device,
        random.choice([torch.bfloat16, torch.float16]),
        lens,
        [min(pair) for pair in zip(queries, lens, strict=True)],
        heads=heads,
        kv_heads=kv_heads,
        head_size=random.choice([48, 64, 80, 96, 128, 192, 256]),
        block_size=block_size,
        stored=stored,
        layout=random.choice(["vllm", "NHD", "HND"]),
        fixed_split_size=random.choice([100, 256, 1000, 2048]),
        causal=random.random() < 0.85,
    )
    return maybe_with_token_scales(replace(case, max_query_len=most))


# --- the checks; each raises AssertionError


def check_case(device: str) -> None:
    """Near the float64 reference, with lse and without."""
    torch.set_num_threads(random.choice([1, 2, 3, 7]) if device == "cpu" else 1)
    case = random_case(device)
    with_lse, plain = case.run_with_lse(), case.run()
    assert_right(case, with_lse, plain)
    assert device != "cpu" or torch.equal(with_lse[0], plain), "lse changes out"


def check_fixed_split(device: str) -> None:
    """A sequence has the same bits in a batch, alone, and again."""
    case = fixed_split_case(device)
    try:
        got = case.run()
    except RuntimeError as error:
        assert "fixed_split_size: block_tables has room" in str(error)
        return
    assert torch.equal(case.run(), got), "a second call"
    for seq in range(len(case.seq_lens)):
        one, rows = alone(case, seq)
        differ = (one.run() != got[rows]).sum().item()
        assert differ == 0, f"sequence {seq}: {differ} of {got[rows].numel()}"


def check_graph(device: str) -> None:
    """A graph replayed at other lengths, and calls on two streams at once, change no bit."""
    case = random_case(device)
    if len(case.query) == 0:
        return
    out = case.unset_out()
    graph = torch.cuda.CUDAGraph()
    call = replace(case, seq_lens=case.seq_lens.clone()).with_options(out=out)
    tensors, options = call.tensors(), {**call.options, "max_query_len": call.max_query_len}
    vllm_kernels.paged_attention(*tensors, **options)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        vllm_kernels.paged_attention(*tensors, **options)
    shorter = torch.minimum(call.seq_lens, torch.randint_like(call.seq_lens, 1, 900))
    for lens in (shorter, case.seq_lens):
        call.seq_lens.copy_(lens)
        want = replace(case, seq_lens=lens).run()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want), "replay"
    results = []
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            results.append(case.run())
    torch.cuda.synchronize()
    assert all(torch.equal(one, results[0]) for one in results), "streams"


def check_sample(device: str) -> None:
    """The tokens of the reference, and their log-probabilities."""
    logits, request = random_sample(device)
    tokens = check(logits, request)
    check_logprobs(logits, request, random.choice([0, 1, 5, 20, 128]), tokens=tokens)


def kind_of(device: str, point: int) -> Callable[[str], None]:
    """Of ten points six are cases, one draws tokens, two are fixed splits and one is a graph, on a
    GPU."""
    place = point % 10
    if place == 6:
        return check_sample
    if place < 7 or (place == 9 and device == "cpu"):
        return check_case
    return check_fixed_split if place < 9 else check_graph


def check_point(check: Callable[[str], None], device: str, point: int) -> None:
    random.seed(point)
    torch.manual_seed(point)
    try:
        check(device)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(f"point {point}: {error}") from error


# --- processes


def child(device: str, first: int, step: int, seconds: float) -> None:
    """Checks first, first + step, ...; prints what is wrong, and last the point after the last."""
    end, point = time.monotonic() + seconds, first
    while time.monotonic() < end:
        try:
            check_point(kind_of(device, point), device, point)
        except AssertionError as error:
            print(f"{error}".replace("\n", " ")[:400], flush=True)
        point += step
    print(point)


def run(device: str, seconds: float, first: int, processes: int) -> int:
    """The number of wrong points. A process that dies counts as one."""
    arguments = [sys.executable, __file__, "--device", device, "--seconds", str(seconds)]
    running = [
        subprocess.Popen(
            [*arguments, "--child", str(first + index), str(processes)],
            stdout=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    count, wrong, last = 0, 0, first
    for index, process in enumerate(running):
        *faults, end = process.communicate()[0].splitlines() or [""]
        if process.returncode or not end.isdigit():
            faults, end = [*faults, f"process {index}: exit {process.returncode}"], str(first)
        for fault in faults:
            print(fault)
        count += max(0, int(end) - first - index) // processes
        wrong, last = wrong + len(faults), max(last, int(end) - processes)
    print(f"points {count}, wrong {wrong}, seeds {first}..{last}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("point", nargs="?", type=int, help="a point to check again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.device, *options.child, options.seconds)
    elif options.point is not None:
        check_point(kind_of(options.device, options.point), options.device, options.point)
        print(f"point {options.point}: right")
    else:
        wrong = run(options.device, options.seconds, options.first, options.processes)
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
