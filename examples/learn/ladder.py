"""Compiles the steps of docs/learn, checks each against PyTorch in float64, and times it.

python examples/learn/ladder.py           all steps; without a GPU, the C++ twins of 1, 2 and 4
python examples/learn/ladder.py 3 5       steps 3 and 5
python examples/learn/ladder.py --write   also the tables and the plot of docs/learn
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import ladder_report  # noqa: E402
from ladder_report import Record  # noqa: E402

import vllm_kernels  # noqa: E402
from benchmarks import harness  # noqa: E402
from vllm_kernels import reference  # noqa: E402

Function: TypeAlias = Callable[..., int]
STEPS = {
    1: "step1_naive",
    2: "step2_online",
    3: "step3_tiles",
    4: "step4_paged",
    5: "step5_splits",
    6: "step6_tensor_cores",
    7: "step7_bulk_copies",
    8: "paged_attention",  # the library's
}
CPU_STEPS = [1, 2, 4]
WORKLOADS = {"b64_c2k": [2048] * 64, "b1_c1k": [1024]}
"""Lengths of the sequences. The pages of b64_c2k lie in random order, those of b1_c1k in a row."""
HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 32, 8, 128, 16
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""Relative, of norms. bfloat16 has 8 bits, so that each rounding may cost 2^-9 = 2e-3."""


class Attention(ctypes.Structure):
    """`struct Attention` of attention.h."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("query", "key", "value", "out", "seq_lens", "block_table", "scratch")
        ],
        *[
            (name, ctypes.c_int32)
            for name in (
                "num_seqs", "num_heads", "num_kv_heads", "head_size", "max_len", "page_size",
                "table_width", "num_splits",
            )
        ],
        ("scale", ctypes.c_float),
    ]  # fmt: skip


@dataclass
class Problem:
    """Inputs of a call. What no step may use is NaN, and the table ends in pages far outside."""

    query: Tensor  # [num_seqs, num_heads, head_size]
    contiguous: Tensor  # K and V, [2, num_seqs, num_kv_heads, max_len, head_size]
    pages: Tensor  # K and V, [2, num_pages, num_kv_heads, page_size, head_size]
    block_table: Tensor  # [num_seqs, table_width]
    seq_lens: Tensor  # [num_seqs]
    num_splits: int

    def scratch_floats(self, step: int) -> int:
        num_seqs, num_heads, head_size = self.query.shape
        if step == 1:  # S and P
            return 2 * num_seqs * num_heads * self.contiguous.shape[3]
        return num_seqs * num_heads * self.num_splits * (head_size + 1)

    def arguments(self, step: int, out: Tensor, scratch: Tensor) -> Attention:
        """Steps 1 to 3 read contiguous keys and values, the others pages."""
        keys, values = self.contiguous if step <= 3 else self.pages
        num_seqs, num_heads, head_size = self.query.shape
        return Attention(
            self.query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            self.seq_lens.data_ptr(), self.block_table.data_ptr(), scratch.data_ptr(),
            num_seqs, num_heads, keys.shape[1], head_size, self.contiguous.shape[3], PAGE_SIZE,
            self.block_table.shape[1], self.num_splits, head_size**-0.5,
        )  # fmt: skip

    def run(self, step: int, function: Function) -> Tensor:
        """One call; the memory that it must write is NaN before."""
        out = torch.full_like(self.query, torch.nan)
        scratch = torch.full((self.scratch_floats(step),), torch.nan, device=out.device)
        launch(function, self.arguments(step, out, scratch))
        return out

    def expected(self) -> Tensor:
        """By the reference, in float64."""
        keys, values = self.pages
        out, _ = reference.paged_attention(
            self.query, keys, values, self.block_table, self.seq_lens, layout="HND"
        )
        return out


def make_problem(
    lens: list[int],
    num_heads: int = HEADS,
    num_kv_heads: int = KV_HEADS,
    head_size: int = HEAD_SIZE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    num_splits: int = 1,
) -> Problem:
    width = max(1, -(-max(lens) // PAGE_SIZE))
    shape = (2, len(lens) * width, num_kv_heads, PAGE_SIZE, head_size)
    query = torch.randn(len(lens), num_heads, head_size, device=device, dtype=dtype)
    pages = torch.randn(shape, device=device, dtype=dtype)
    order = torch.arange(shape[1]) if len(lens) == 1 else torch.randperm(shape[1])
    table = order.int().to(device).view(len(lens), width)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    tokens = torch.arange(width * PAGE_SIZE, device=device).view(width, 1, PAGE_SIZE, 1)
    for ids, length in zip(table.long(), lens):
        pages[:, ids] = pages[:, ids].masked_fill(tokens >= length, torch.nan)
    of_seqs = pages[:, table.flatten().long()].unflatten(1, table.shape)
    contiguous = of_seqs.transpose(2, 3).flatten(3, 4).contiguous()
    table.masked_fill_(tokens.view(width, -1)[:, 0] >= seq_lens[:, None], 2**30)
    return Problem(query, contiguous, pages, table, seq_lens, num_splits)


def launch(function: Function, arguments: Attention) -> None:
    cuda = torch.cuda.is_available()
    stream = torch.cuda.current_stream().cuda_stream if cuda else None
    error = function(ctypes.byref(arguments), ctypes.c_void_p(stream))
    if error:
        raise RuntimeError(f"{function.__name__}: CUDA error {error}")


def error_of(out: Tensor, expected: Tensor) -> float:
    """The largest of a sequence. NaN in `out` gives NaN, which is not below any bound."""
    norm = expected.flatten(1).norm(dim=1).clamp_min(1e-30)  # an empty sequence must give 0
    return ((out.double() - expected).flatten(1).norm(dim=1) / norm).max().item()


def build(step: int, folder: Path, *, cpu: bool = False, arch: str = "native") -> Function:
    """Compiles a step to a shared library unless that is newer, and returns its function."""
    name, suffix = STEPS[step], "cpp" if cpu else "cu"
    library = folder / f"{name}_{'cpu' if cpu else arch}.so"
    newest = max(path.stat().st_mtime for path in (HERE / f"{name}.{suffix}", *HERE.glob("*.*h")))
    if not library.exists() or library.stat().st_mtime < newest:
        compiler = ["nvcc", "-O3", f"-arch={arch}", "-Xcompiler=-fPIC"]
        if cpu:
            compiler = ["g++", "-O2", "-fPIC"]
        files = [f"{HERE / name}.{suffix}", "-o", str(library)]
        if shutil.which(compiler[0]) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run([*compiler, "-std=c++17", "-shared", *files], check=True)
        elif not library.exists():  # one from another machine may look old
            raise SystemExit(f"needs {compiler[0]} on the PATH, or {library}")
    function: Function = getattr(ctypes.CDLL(str(library)), name)
    return function


def bytes_of(step: int, problem: Problem) -> tuple[int, int]:
    """What a step must read and write at least, by the arithmetic of docs/learn."""
    num_seqs, num_heads, head_size = problem.query.shape
    tokens, size = int(problem.seq_lens.sum()), problem.query.element_size()
    query = problem.query.numel() * size
    keys_and_values = 2 * tokens * problem.pages.shape[2] * head_size * size
    more = 0  # that is written and read again
    if step == 1:
        more = 2 * tokens * num_heads * 4
    elif 5 <= step <= 7 and problem.num_splits > 1:
        more = num_seqs * num_heads * problem.num_splits * (head_size + 1) * 4
    return query + keys_and_values + more, query + more


def splits_for(lens: list[int]) -> int:
    """Enough for 4 blocks a multiprocessor, and at least 64 tokens each."""
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    return max(1, min(blocks // (len(lens) * KV_HEADS), max(lens) // 64))


def measure(step: int, problems: list[Problem], function: Function | None) -> tuple[float, float]:
    """Error, and seconds. The problems have copies of K and V, so that no cache holds them."""
    out = torch.empty_like(problems[0].query)
    scratch = torch.empty(problems[0].scratch_floats(step), device=out.device)
    prepared = [problem.arguments(step, out, scratch) for problem in problems]

    def call(i: int) -> None:
        if function is not None:
            launch(function, prepared[i])
            return
        p, (keys, values) = problems[i], problems[i].pages
        vllm_kernels.paged_attention(
            p.query, keys, values, p.block_table, p.seq_lens, layout="HND", out=out
        )

    out.fill_(torch.nan)
    call(0)
    error = error_of(out, problems[0].expected())
    return error, harness.median_seconds(call, "cuda", len(problems))


def run_on_gpu(steps: list[int], folder: Path, arch: str) -> list[Record]:
    functions = {step: build(step, folder, arch=arch) for step in steps if step < 8}
    records = []
    for workload, lens in WORKLOADS.items():
        first = make_problem(lens, device="cuda", num_splits=splits_for(lens))
        problems = [first]
        for _ in range(harness.copies_for("cuda", first.pages.nbytes) - 1):
            problems.append(
                Problem(
                    first.query, first.contiguous.clone(), first.pages.clone(),
                    first.block_table, first.seq_lens, first.num_splits,
                )
            )  # fmt: skip
        for step in steps:
            error, seconds = measure(step, problems, functions.get(step))
            records.append(
                Record(workload, step, STEPS[step], error, seconds * 1e6, *bytes_of(step, first))
            )
    return records


def run_on_cpu(steps: list[int], folder: Path) -> bool:
    """Checks the twins in float32; True if all are right."""
    problem = make_problem([300, 17, 1], dtype=torch.float32)
    expected, right = problem.expected(), True
    for step in (step for step in steps if step in CPU_STEPS):
        error = error_of(problem.run(step, build(step, folder, cpu=True)), expected)
        right &= error <= LARGEST_ERROR[torch.float32]
        print(f"{STEPS[step]}.cpp: relative error {error:.1e}")
    return right


def possible_steps(steps: list[int]) -> list[int]:
    """Says which of them this machine cannot run, and why."""
    lacking = {}
    if torch.cuda.get_device_capability() < (9, 0):
        lacking[7] = "a GPU of sm_90 or newer"
    if not vllm_kernels.cuda_loaded:
        lacking[8] = "the CUDA library of vllm_kernels, which is not loaded"
    for step in sorted(lacking.keys() & set(steps)):
        print(f"Step {step} is left out: it needs {lacking[step]}.")
    return [step for step in steps if step not in lacking]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("steps", nargs="*", type=int, metavar="STEP", help="1 to 8; default: all")
    parser.add_argument("--ceiling", type=float, default=4.34, help="TB/s; 4.34 is an H200's read")
    parser.add_argument("--arch", default="native", help="nvcc's -arch, for example sm_90a")
    parser.add_argument("--compile", action="store_true", help="only compile; no GPU: with --arch")
    parser.add_argument("--build", type=Path, default=ROOT / "build/learn", help="folder")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    parser.add_argument("--write", action="store_true", help="write measured.json and docs/learn")
    arguments = parser.parse_args()
    steps = sorted(set(arguments.steps)) or list(STEPS)
    if not set(steps) <= set(STEPS):
        parser.error("steps are 1 to 8")
    if arguments.write and steps != list(STEPS):
        parser.error("--write needs all steps")
    if arguments.compile:
        for step in steps:
            if step < 8:
                build(step, arguments.build, arch=arguments.arch)
        return 0
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        print("No GPU: the C++ twins of steps 1, 2 and 4 run.")
        return 0 if run_on_cpu(steps, arguments.build) else 1
    records = run_on_gpu(possible_steps(steps), arguments.build, arguments.arch)
    measured = {
        "machine": harness.machine("cuda"),
        "date": datetime.date.today().isoformat(),
        "ceiling": arguments.ceiling,
        "records": [vars(record) for record in records],
    }
    print(ladder_report.tables(measured))
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
    if arguments.write:
        ladder_report.write(measured)
    wrong = [r for r in records if not r.error <= LARGEST_ERROR[torch.bfloat16]]
    for record in wrong:
        print(f"WRONG: {record.name}, {record.workload}: relative error {record.error:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
