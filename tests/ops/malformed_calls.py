"""Calls of every op with changed arguments, each by its number. test_malformed_calls.py runs them.

    python tests/ops/malformed_calls.py 4711              call 4711 again, with its arguments
    python tests/ops/malformed_calls.py --seconds 600     calls 0, 1, ... in processes of their own
    python tests/ops/malformed_calls.py --calls 1000000   that many

A call passes with an error that has the op's name, and no byte changed. Or it succeeds: then it
writes only tensors that the schema marks, gives what it gives for copies of its arguments without
strides, aliases and canaries around them, and is close to vllm_kernels.reference.
"""

from __future__ import annotations

import argparse
import inspect
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# ruff: noqa: E402 (imports behind sys.path)
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    sys.path.append(str(HERE.parent.parent))  # last: PYTHONPATH may have another build

import torch
from argument_changes import LARGEST, NUMERIC, change
from guarded_memory import GuardedMemory, each_tensor, is_plain
from torch import Tensor
from valid_calls import VALID_CALLS, Call

import vllm_kernels
from vllm_kernels import reference

OPS = sorted(VALID_CALLS)
SECONDS_OF_A_CALL = 300  # more is a hang; call 295448 has 2^31 - 1 heads and takes 111 s
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
PAGE_LIST = {"block_tables": "kv_indices", "seq_lens": "last_page_len"}
# What ASan and UBSan say first, and the library's frames.
SANITIZERS = re.compile("ERROR: AddressSanitizer|runtime error:| in vllm_kernels::")
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc")


class FaultError(Exception):
    """What a call did and must not do."""


@cache
def schema_of(op: str) -> Any:
    return getattr(torch.ops.vllm_kernels, op).default._schema


@cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


@cache
def written_names(op: str) -> list[str]:
    marks = ((argument.name, argument.alias_info) for argument in schema_of(op).arguments)
    return [name for name, info in marks if info is not None and info.is_write]


def typed_arguments(op: str, call: Call) -> Call:
    """The arguments of vllm_kernels.<op>, which may lack some of the schema's."""
    parameters = parameters_of(getattr(vllm_kernels, op))
    names = [argument.name for argument in schema_of(op).arguments]
    if len(names) == len(parameters) and op != "softmax":  # they may have other names
        return {p: call[n] for p, n in zip(parameters, names) if n in call}
    if op == "paged_attention" and call["kv_indptr"] is not None:
        call = {PAGE_LIST.get(name, name): value for name, value in call.items()}
    given = {name: call[name] for name in parameters if name in call}
    if op == "sample" and "logprobs" in call:
        given["num_logprobs"] = call["logprobs"].shape[1] - 1
    if op == "select_pages":  # the schema's tables say it by their size
        given["budget"] = call["tables"].shape[-1] * call["block_size"]
        given["per_kv_head"] = call["tables"].dim() == 3
    makes_out = "out" in parameters and parameters["out"].default is None
    if makes_out and random.random() < 0.5:
        given["out"] = None
    if "return_lse" in parameters:
        given["return_lse"] = random.random() < 0.5
    return given


@dataclass
class Attack:
    """One call: its op, its arguments and what was changed."""

    op: str
    typed: bool
    call: Call
    changes: list[str]
    structural: bool  # no element of a tensor and no number is changed

    def run(self, call: Call) -> list[Any]:
        """Calls the op. Returns what it returns, as a list."""
        if self.typed:
            result = getattr(vllm_kernels, self.op)(**call)
        else:
            result = getattr(torch.ops.vllm_kernels, self.op)(**call)
        return [result] if isinstance(result, Tensor) else list(result or [])

    def __str__(self) -> str:
        name = f"vllm_kernels.{self.op}" if self.typed else f"torch.ops.vllm_kernels.{self.op}"
        lines = [f"  {name}: {key}={text(value)}" for key, value in self.call.items()]
        return "\n".join([f"  changed: {'; '.join(self.changes) or 'nothing'}", *lines])


def text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text, value))}]"
    if not isinstance(value, Tensor):
        return repr(value)
    if not is_plain(value):
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{value.dtype} {shape} on {value.device}, {value.layout}, {type(value).__name__}"
    shown = f"{value.dtype} {list(value.shape)} strides {value.stride()}"
    small = value.numel() <= 12 and value.untyped_storage().nbytes()
    return f"{shown} at {value.data_ptr():#x}" + (f" {value.tolist()}" if small else "")


def make(number: int) -> Attack:
    random.seed(number)
    torch.default_generator.manual_seed(number)  # torch.manual_seed() takes 2 ms
    op = random.choice(OPS)
    call = VALID_CALLS[op](op)
    typed = random.random() < 0.5
    if typed:
        call = typed_arguments(op, call)
    count = random.choice([0, 1, 1, 1, 2, 3])
    kinds = [change(call) for _ in range(count)]
    call = {name: printable(value, name, op) for name, value in call.items()}
    return Attack(op, typed, call, kinds, not any(kind.split()[1] in NUMERIC for kind in kinds))


def printable(value: Any, name: str, op: str) -> Any:
    """torch prints a tensor in place of a number, and ends the process if it was freed."""
    kinds = [str(a.type) for a in schema_of(op).arguments if a.name == name]
    if any("Tensor" in kind for kind in kinds) or not isinstance(value, Tensor):
        return value
    return value if is_plain(value) else "not plain"


def check(number: int, memory: GuardedMemory) -> Attack:
    """Makes the call of this number. Raises FaultError."""
    attack = make(number)
    memory.reset()
    attack.call = {name: each_tensor(value, memory.place) for name, value in attack.call.items()}
    copies = {
        name: each_tensor(value, partial(plain_copy, name)) for name, value in attack.call.items()
    }
    memory.remember()
    try:
        results = attack.run(attack.call)
    except Exception as error:
        check_error(attack, error)
        if memory.changed() and not has_negated_views(attack):
            raise FaultError(f"memory changed before the error: {error}") from error
        return attack
    check_results(attack, copies, results, memory)
    return attack


def plain_copy(name: str, x: Tensor) -> Tensor:
    """In its own memory, contiguous. (The strides of `scales` have a meaning.)"""
    x = x.detach().resolve_neg()
    if not is_plain(x) or x.numel() > LARGEST:
        return x
    keep = torch.preserve_format if name == "scales" else torch.contiguous_format
    return x.clone(memory_format=keep)


def has_negated_views(attack: Attack) -> bool:
    """torch materializes them around the op, and fails after it where they are written."""
    return any(x.is_neg() for value in attack.call.values() for x in listed(value))


def from_printing(error: Exception) -> bool:
    """Whether torch refused the call, and failed to print a tensor of a list: one freed in part."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.endswith("_tensor_str.py") for frame in frames)


def check_error(attack: Attack, error: Exception) -> None:
    message = str(error)
    named = message.startswith(f"{attack.op}: ") and "\n" not in message
    if any(words in message for words in OUT_OF_MEMORY):
        return
    if not attack.typed and (has_negated_views(attack) or from_printing(error)):
        return
    if attack.typed and not (named and isinstance(error, vllm_kernels.Error)):
        raise FaultError(f"an error without the op's name: {error!r}") from error
    if not named and f"vllm_kernels::{attack.op}" not in message:
        raise FaultError(f"an error without the op's name: {error!r}") from error


def check_results(attack: Attack, copies: Call, results: list[Any], memory: GuardedMemory) -> None:
    """Of a call that raised nothing."""
    names = written_names(attack.op)
    pairs = [
        (name, x, copy)
        for name in names
        for x, copy in zip(listed(attack.call.get(name)), listed(copies.get(name)), strict=True)
        if is_plain(x.detach())
    ]
    written = [(name, x) for name, x, _ in pairs]
    got = [(name, x.detach().clone()) for name, x in written + [("the result", x) for x in results]]
    for _, x in written:
        repeats = any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape))
        if memory.holds(x) and not repeats:  # attention_with_kvcache takes those, and reads them
            memory.undo(x)
    if memory.changed():
        raise FaultError("bytes outside of the written tensors changed")
    tensors = [x for value in attack.call.values() for x in listed(value)]
    if any(x.is_meta for x in tensors):
        return
    if attack.op == "swap_blocks" and len({x.untyped_storage().data_ptr() for x in tensors}) < 3:
        return  # within one tensor a copy reads what the one before wrote
    if attack.op == "convert_fp8" and attack.call["output"].shape != attack.call["input"].shape:
        return  # pairs elements in the order of memory
    expected = reference_of(attack, copies)
    before = {name: copies[name].clone() for name in expected if copies.get(name) is not None}
    again = attack.run(copies)
    wanted = [copy for _, _, copy in pairs] + again
    for (name, x), other in zip(got, wanted, strict=True):
        if not same(x, other):
            raise FaultError(f"{name}: {difference(x, other)} without strides and aliases")
    for name, want in expected.items():
        result = copies[name] if name in before else again[0]
        if name in before and name == "out":
            want = kept(copies, want, before[name])
        query = copies.get("query")
        is_rounded = isinstance(query, Tensor) and query.dtype == torch.float8_e4m3fn  # to 16 bits
        if not near(result, want, torch.bfloat16 if is_rounded else result.dtype):
            raise FaultError(f"{name} is not the reference's: {difference(result, want)}")


def kept(call: Call, want: Tensor, before: Tensor) -> Tensor:
    """want, with the rows that no sequence owns as they were, unless the call zeroes them."""
    starts = call.get("query_start_loc")
    if starts is None or call.get("zero_unowned"):
        return want
    owned = torch.zeros(len(want), dtype=torch.bool)
    owned[starts[0] : starts[-1]] = True
    return torch.where(owned.view(-1, *[1] * (want.dim() - 1)), want, before.to(want.dtype))


def listed(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, Tensor)]


def same(one: Tensor, other: Tensor) -> bool:
    """Equal, with NaN for NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        one, other = one.float(), other.float()
        return torch.equal(one.nan_to_num(nan=7e7), other.nan_to_num(nan=7e7))
    return torch.equal(one, other)


def difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"{list(one.shape)} in place of {list(other.shape)}"
    places = (one.float().nan_to_num(nan=7e7) != other.float().nan_to_num(nan=7e7)).nonzero()
    first = tuple(places[0].tolist())
    return f"{len(places)} elements differ, first {first}: {one[first]} is {other[first]}"


def near(got: Tensor, want: Tensor, computed: torch.dtype) -> bool:
    bound = TOLERANCE.get(computed)
    if bound is None:  # 8 bits: rounding may go either way
        return (got.view(torch.uint8) != want.view(torch.uint8)).sum() <= 0.1 * got.numel() + 1
    a, b = got.double(), want.double()
    wrong = ~((a - b).abs() <= bound * (1 + b.abs())) & (a != b) & ~(a.isnan() & b.isnan())
    return not wrong.any()


LIKE_VLLM = ("paged_attention_v1", "paged_attention_v2")
WRITES = {
    "fused_decode_attention": ["out", "key_cache", "value_cache"],  # qkv is scratch
    "attention_with_kvcache": ["the result", "key_cache", "value_cache"],
}
SHARED_OPTIONS = (
    "scale", "softcap", "alibi_slopes", "sinks", "sliding_window", "causal", "window_right",
)  # fmt: skip
WITHOUT_REFERENCE = (
    "copy_blocks", "rotary_embedding", "batched_rotary_embedding",  # other arguments or results
    "sample",  # its lists have other names
    "copy_slots",  # its result is a list
)  # fmt: skip


def reference_of(attack: Attack, copies: Call) -> Call:
    """What the reference expects in the written tensors of a call with ordinary numbers."""
    name = "naive_paged_attention" if attack.op in LIKE_VLLM else attack.op
    function = getattr(reference, name, None)
    tensors = [x for value in copies.values() for x in listed(value)]
    if (
        function is None
        or not attack.structural
        or attack.op in WITHOUT_REFERENCE
        or any("token_to_seq" in kind for kind in attack.changes)  # contradicts cu_seq_lens
    ):
        return {}
    if not all(ordinary(x) for x in tensors) or leaves_no_choice(attack, copies):
        return {}
    call = {key: each_tensor(value, Tensor.clone) for key, value in copies.items()}
    call["x"] = call.get("input")
    call |= {name: call[other] for name, other in PAGE_LIST.items() if other in call}
    if not attack.typed and "window_right" in call:
        call["causal"] = call["window_right"] == 0
        call["window"] = (call.get("window_left"), call["window_right"])
    if attack.op == "token_logprobs":
        call["num_top"] = call["logprobs"].shape[1] - 1 if "logprobs" in call else 0
    if attack.op == "select_pages" and "tables" in call:
        if call["tables"].shape[-1] > call["block_tables"].shape[-1]:
            return {}  # the reference's tables end with the sequence's
        call["budget"] = call["tables"].shape[-1] * call["block_size"]
        call["per_kv_head"] = call["tables"].dim() == 3
    parameters = parameters_of(function)
    options = {k: v for k, v in call.items() if k in parameters}
    if attack.op in LIKE_VLLM and call["kv_cache_dtype"] == "auto":  # its scales are not used
        options |= {"k_scale": 1.0, "v_scale": 1.0}
    if attack.op in WRITES:
        options |= {name: call[name] for name in SHARED_OPTIONS if name in call}
    try:
        wanted = function(**options)
    except (RuntimeError, IndexError, KeyError):  # it takes less than the op
        return {}
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    names = WRITES.get(attack.op, written_names(attack.op))
    return {
        name: want for name, want in zip(names, wanted)
        if call.get(name) is not None or name == "the result" or (attack.typed and name == "out")
    }  # fmt: skip


def ordinary(x: Tensor) -> bool:
    if not is_plain(x) or not 0 < x.numel() <= LARGEST:
        return False
    return not x.is_floating_point() or bool((x.float().abs() < 1e3).all())


def leaves_no_choice(attack: Attack, call: Call) -> bool:
    """Whether SparQ's scores are all 0 in float32: times 1e-45, say."""
    scale = call.get("k_scale") if attack.op == "sparq_attention" else None
    return scale is not None and bool((scale.abs() < 1e-30).all())


# --- processes


def child(first: int, step: int, end: int, seconds: float, progress: str) -> None:
    """Makes the calls first, first + step, ... before `end`, until `seconds` are over. Writes the
    number of each to the file `progress` before it, and prints what fails."""
    torch.set_num_threads(1)
    limit_memory()
    memory = GuardedMemory()
    stop = time.monotonic() + seconds
    with open(progress, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    number = first
    while number < end and time.monotonic() < stop:
        shared[:8] = number.to_bytes(8, "little")
        signal.alarm(SECONDS_OF_A_CALL)
        try:
            check(number, memory)
        except Exception as error:
            print(
                f"call {number}: {make(number).op}: {error!r}".replace("\n", " ")[:400], flush=True
            )
        number += step
    signal.alarm(0)
    shared[:8] = number.to_bytes(8, "little")


def limit_memory() -> None:
    if "libasan" in os.environ.get("LD_PRELOAD", ""):  # it reserves terabytes of addresses
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * mmap.PAGESIZE + 4 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


@dataclass
class Report:
    calls: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        again = f"python {Path(__file__).relative_to(HERE.parent.parent)} NUMBER"
        faults = "".join(f"{fault}\n" for fault in self.faults)
        return f"{faults}{self.calls} calls, {len(self.faults)} faults; again: {again}"


def run(seconds: float, calls: int = sys.maxsize, first: int = 0, processes: int = 1) -> Report:
    """Makes up to `calls` calls in child processes. One that dies is started anew behind its last
    call."""
    report, stop = Report(), time.monotonic() + seconds
    end = min(first + calls, sys.maxsize)
    starts = {index: first + index for index in range(processes)}
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, subprocess.Popen[str]] = {}
        files = [Path(folder, str(index)) for index in range(processes)]
        while starts or running:
            for index, start in starts.items():
                files[index].write_bytes(start.to_bytes(8, "little"))
                left = str(max(0.0, stop - time.monotonic()))
                arguments = [str(start), str(processes), str(end), left, str(files[index])]
                running[index] = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", __file__, "--child", *arguments],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )  # fmt: skip
            begun, starts = starts, {}
            for index, process in list(running.items()):
                output, errors = process.communicate()
                number = int.from_bytes(files[index].read_bytes(), "little")
                report.faults += output.splitlines()
                del running[index]
                dead = process.returncode != 0
                origin = begun.get(index, first + index)
                report.calls += (number - origin) // processes + dead
                if dead:
                    how = describe(process.returncode, errors)
                    report.faults.append(f"call {number}: {how}")
                    if time.monotonic() < stop:
                        starts[index] = number + processes
    return report


def describe(code: int, errors: str) -> str:
    if code == -signal.SIGALRM:
        return f"did not end within {SECONDS_OF_A_CALL} s"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    told = [line.strip() for line in errors.splitlines() if SANITIZERS.search(line)]
    return f"the process ended with {name}: {'; '.join(told[:9]) or errors.strip()[-600:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, help="a call to make again")
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--calls", type=int, default=sys.maxsize)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        *numbers, seconds, progress = options.child
        child(*map(int, numbers), float(seconds), progress)
    elif options.number is not None:
        print(make(options.number))
        attack = check(options.number, GuardedMemory())
        print(f"call {options.number}: {attack.op}: passed")
    else:
        seconds = options.seconds or (60 if options.calls == sys.maxsize else 1e6)
        report = run(seconds, options.calls, options.first, options.processes)
        print(report)
        sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
