"""Two engines, one of which runs out of cache blocks: it borrows, recomputes or swaps.

    torchrun --nproc-per-node 2 -m benchmarks.bench_lending [--device cuda] [--smoke] [--eager]
                                                            [--rounds 3] [--json FILE]

Each rank is an instance with the whole model, a paged cache and sequences of its own. Instance 0
has a long sequence and short ones. Together they outgrow its blocks while they decode. Instance 1
has half of the short ones. Each mode runs the same trace:

    room       instance 0 has enough blocks
    lend       the end of its long sequence moves to blocks of instance 1, which attends to them
    recompute  it drops the sequence that came last, and computes it again later
    swap       as recompute, but the blocks go to the host and back

Every sequence has a fixed number of tokens, so the schedule depends on lengths alone. Each rank
plans both instances, and so both know what the other one does without a message. They run
step n together only if it has a loan. Tokens are greedy and stay on the device. They must equal
those of room in float32. In bfloat16 another batch rounds in another way, and the rows say how many
are equal.

`done` is when an instance has its last token. `mean` is when a sequence of instance 0 has its last
one, on average, and `pause` is the longest wait of one for its next token. Medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding, linear

import vllm_kernels as vk
from benchmarks.harness import run_record, synchronize
from benchmarks.lending import (
    BLOCK,
    BORROWER,
    LARGE,
    LENDER,
    SMALL,
    TINY,
    Clock,
    Loan,
    Model,
    Plan,
    Schedule,
    Sequence,
    Sizes,
    blocks_for,
    blocks_of,
    make_trace,
)
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager
from vllm_kernels.kv_cache.tensors import KVCache, KVShape

MODES = ("room", "lend", "recompute", "swap")
EPSILON = 1e-6


# --- a rank


class Batch:
    """A step's integers on the device: two copies from the host, and views of them.

    A step that only decodes is padded to ``max_rows`` rows, and its tensors are static. So one CUDA
    graph serves all steps with the same ``key``.
    """

    def __init__(self, max_rows: int, columns: int, budget: int, device: torch.device) -> None:
        self.device, self.max_rows = device, max_rows
        self.buffers = BatchBuffers.zeros(max_rows, columns, max(budget, max_rows))
        self.loan_table = torch.zeros(columns, dtype=torch.int32)
        self.static: dict[tuple[tuple[bool, bool], torch.dtype], Tensor] = {}

    def fill(
        self, manager: KVCacheManager, plan: Plan, loan: Loan | None, first: int, stride: int
    ) -> None:
        """``first``: the id of row 0 of the tokens; ``stride``: tokens of a row."""
        rows, host = plan.rows, self.buffers
        counts = [count for _, count in rows]
        manager.build([sequence.id for sequence, _ in rows], counts, host)
        self.has_rows, self.has_loan = bool(rows), loan is not None
        self.max_query = max(counts, default=1)
        self.key = (self.has_rows, self.has_loan) if self.max_query == 1 else None
        num = self.max_rows if self.key else len(rows)
        size = num if self.key else sum(counts)
        positions, slots = host.positions[:size].clone(), host.slot_mapping[:size].clone()
        longs = [positions, slots, *self._indices(rows, size, num, first, stride)]
        ints = [host.query_start_loc[: num + 1], host.seq_lens[:num]]
        ints.append(host.block_tables[:num].flatten())
        if loan:
            if rows and rows[0][0] is loan.sequence:  # its new token is not at home
                positions[0], slots[0] = loan.sequence.length - 1, -1
            self.loan_table[: len(loan.blocks)] = torch.from_numpy(loan.blocks)
            longs.append(torch.tensor([loan.sequence.length - 1, loan.slot]))
            ints += [torch.tensor([loan.tokens], dtype=torch.int32), self.loan_table]
        self.positions, self.slots, self.source, self.last, self.target, *lent = self._upload(longs)
        self.starts, self.lens, tables, *lent_ints = self._upload(ints)
        self.tables = tables.view(num, -1)
        if loan:
            self.loan_position, self.loan_slot = lent[0].split(1)
            self.loan_lens, self.loan_tables = lent_ints[0], lent_ints[1][None]

    def _indices(
        self, rows: list[tuple[Sequence, int]], size: int, num: int, first: int, stride: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where each token is read, which one is the last of a row, and where the next one goes.

        Padded rows read and write a row of tokens that no sequence has.
        """
        nowhere = self.max_rows * stride
        source, target = torch.full((size,), nowhere), torch.full((num,), nowhere)
        last = torch.zeros(num, dtype=torch.int64)
        begin = 0
        for row, (sequence, count) in enumerate(rows):
            start = (sequence.id - first) * stride + sequence.computed
            source[begin : begin + count] = torch.arange(start, start + count)
            begin += count
            last[row] = begin - 1
            if sequence.computed + count == sequence.length:
                target[row] = start + count
        return source, last, target

    def _upload(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        together = torch.cat(tensors)
        if self.device.type == "cuda":
            together = together.pin_memory()  # so that the host does not wait for the copy
        if self.key:
            name = self.key, together.dtype
            if name not in self.static:
                self.static[name] = torch.empty_like(together, device=self.device)
            on_device = self.static[name].copy_(together, non_blocking=True)
        else:
            on_device = together.to(self.device, non_blocking=True)
        return on_device.split([len(tensor) for tensor in tensors])


def write_and_attend(
    model: Model, cache: KVCache, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor,
    tables: Tensor, lens: Tensor, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes the new tokens' keys and values, and attends. Returns the result and its lse."""
    query, key, value = qkv.split(model.heads, 1)
    w = model.layers[layer]
    cache.rope_and_write(
        layer, positions, query, key, value, model.cos_sin, slots,
        q_weight=w["q_norm"], k_weight=w["k_norm"], epsilon=EPSILON,
    )  # fmt: skip
    return vk.paged_attention(
        query, cache.key_caches[layer], cache.value_caches[layer], tables, lens,
        layout=cache.shape.layout, return_lse=True, **options,
    )  # fmt: skip


class Link:
    """Attention to lent blocks: a broadcast to the lender in each layer, and one back.

    Both ranks call the same broadcasts in the same order, so neither waits for the other forever.
    """

    def __init__(self, model: Model, cache: KVCache, rank: int) -> None:
        self.model, self.cache, self.rank = model, cache, rank
        sizes, weight = model.sizes, model.norm
        self.question = weight.new_empty(sum(model.heads), sizes.head_size)
        size = sizes.heads * sizes.head_size
        self.answer = weight.new_empty(size + sizes.heads * 4 // weight.element_size())
        self.out = self.answer[:size].view(1, sizes.heads, sizes.head_size)
        self.lse = self.answer[size:].view(torch.float32)[None]
        self.works: list[Any] = []

    def ask(self, qkv: Tensor) -> None:
        """The borrower sends the new token's query, key and value, before their rotation."""
        self.question.copy_(qkv)
        self._broadcast(self.question, BORROWER)
        self._broadcast(self.answer, LENDER)

    def serve(self, layer: int, batch: Batch) -> None:
        """The lender writes the token and attends to the lent blocks."""
        self._broadcast(self.question, BORROWER)
        self.wait()  # for the last answer, too
        _, lse = write_and_attend(
            self.model, self.cache, layer, self.question[None], batch.loan_position,
            batch.loan_slot, batch.loan_tables, batch.loan_lens, out=self.out,
        )  # fmt: skip
        self.lse.copy_(lse)
        self._broadcast(self.answer, LENDER)

    def combine(self, out: Tensor, lse: Tensor) -> None:
        """The borrower merges the answer into its own result of the row."""
        self.wait()
        partials, lses = torch.stack([out, self.out]), torch.stack([lse, self.lse])
        vk.combine_attn_partials(out, partials, lses)

    def move(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Copies whole blocks of all layers from the borrower to the lender."""
        caches = [*self.cache.key_caches, *self.cache.value_caches]
        blocks = torch.from_numpy(source if self.rank == BORROWER else target).long()
        blocks = blocks.to(caches[0].device)
        contents = torch.stack([cache[blocks] for cache in caches])
        self._broadcast(contents, BORROWER)
        self.wait()
        if self.rank == LENDER:
            for cache, content in zip(caches, contents):
                cache[blocks] = content

    def wait(self) -> None:
        """Lets what follows on the device wait, and with gloo the host."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        self.works.append(dist.broadcast(tensor, source, async_op=True))


class Rank:
    """Runs the plans of one instance."""

    def __init__(self, model: Model, trace: list[list[Sequence]], blocks: int, budget: int) -> None:
        self.rank, self.model = dist.get_rank(), model
        sizes, weight = model.sizes, model.norm
        shape = KVShape(
            sizes.layers, sizes.kv_heads, sizes.head_size, weight.dtype, BLOCK, layout="HND"
        )
        self.device = weight.device
        self.cache = KVCache(shape, blocks, device=self.device, num_host_blocks=blocks)
        self.link = Link(model, self.cache, self.rank)
        self.first, self.num = trace[self.rank][0].id, len(trace[self.rank])
        self.stride = max(sequence.end for sequences in trace for sequence in sequences) + 1
        self.batch = Batch(self.num, blocks_of(self.stride), budget, self.device)
        generator = torch.Generator().manual_seed(1 + self.rank)
        prompts = torch.randint(sizes.vocabulary, (self.num + 1, self.stride), generator=generator)
        self.tokens = prompts.to(self.device)
        self.graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph | None] = {}
        self.use_graphs = False

    def run(self, plan: Plan, manager: KVCacheManager, loan: Loan | None) -> None:
        """A step. The lender of a loan serves it, even without rows of its own."""
        for is_out, pairs in plan.swaps:
            (self.cache.swap_out if is_out else self.cache.swap_in)(pairs)
        if plan.rows or loan:
            self.batch.fill(manager, plan, loan, self.first, self.stride)
            self.launch(self.batch.key)

    def launch(self, key: tuple[bool, bool] | None) -> None:
        """Runs the batch. From the third step with a key on, a CUDA graph does it."""
        if not (self.use_graphs and key):
            self.compute()
        elif key not in self.graphs:
            self.graphs[key] = None  # this step connects NCCL, and the next one is captured
            self.compute()
        else:
            graph = self.graphs[key]
            if graph is None:
                graph = self.graphs[key] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.compute()
            graph.replay()

    def compute(self) -> None:
        if self.batch.has_rows:
            self.forward(self.batch)
        else:
            for layer in range(self.model.sizes.layers):
                self.link.serve(layer, self.batch)
        self.link.wait()

    def forward(self, batch: Batch) -> None:
        """Computes the batch's tokens, and writes each sequence's next one behind them."""
        flat = self.tokens.view(-1)
        x = embedding(flat[batch.source], self.model.embeddings)
        residual = torch.zeros_like(x)
        for layer, w in enumerate(self.model.layers):
            vk.fused_add_rms_norm(x, residual, w["norm_1"], EPSILON)
            x = linear(self.attend(layer, x, batch).flatten(1), w["out"])
            vk.fused_add_rms_norm(x, residual, w["norm_2"], EPSILON)
            gate_up = linear(x, w["gate_up"])
            activated = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
            vk.silu_and_mul(activated, gate_up)
            x = linear(activated, w["down"])
        x, residual = x[batch.last], residual[batch.last]
        vk.fused_add_rms_norm(x, residual, self.model.norm, EPSILON)
        flat[batch.target] = linear(x, self.model.embeddings).argmax(-1)

    def attend(self, layer: int, x: Tensor, batch: Batch) -> Tensor:
        asks = batch.has_loan and self.rank == BORROWER
        qkv = linear(x, self.model.layers[layer]["qkv"]).unflatten(
            1, (-1, self.model.sizes.head_size)
        )
        if asks:
            self.link.ask(qkv[0])
        elif batch.has_loan:
            self.link.serve(layer, batch)
        out, lse = write_and_attend(
            self.model, self.cache, layer, qkv, batch.positions, batch.slots, batch.tables,
            batch.lens, query_start_loc=None if batch.max_query == 1 else batch.starts,
            max_query_len=batch.max_query,
        )  # fmt: skip
        if asks:
            self.link.combine(out[:1], lse[:1])
        return out


# --- modes


@dataclass
class Row:
    """What a mode took, and how many tokens are those of room."""

    mode: str
    wall: float  # until both instances are done
    tokens_per_second: float
    done: list[float]  # of each instance, in seconds
    pause: float  # the longest one between two tokens of a sequence of instance 0
    mean_done: float  # of the sequences of instance 0
    preemptions: int
    lent_blocks: int
    equal_sequences: int = 0
    sequences: int = 0
    equal_tokens: int = 0  # before the first difference of a sequence
    tokens: int = 0


def run_mode(rank: Rank, schedule: Schedule, sequences: list[Sequence]) -> list[Any]:
    """Runs the trace. Returns of each rank: its seconds, and the latency of its sequences."""
    mine, done = rank.rank, 0.0
    rank.batch.buffers.invalidate()  # they are of another mode's manager
    synchronize(rank.device.type)
    dist.barrier()
    begin, clock = time.perf_counter(), Clock(rank.device)
    while not (schedule.is_done(BORROWER) and schedule.is_done(LENDER)):
        plans, loan = schedule.step()
        if schedule.moved:
            rank.link.move(*schedule.moved)
        rank.run(plans[mine], schedule.managers[mine], loan)
        clock.mark()
        schedule.advance(plans)
        if schedule.is_done(mine) and not done:
            synchronize(rank.device.type)
            done = time.perf_counter() - begin
    synchronize(rank.device.type)
    schedule.check_end()
    return gathered((done, clock.latency(sequences)))


def gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def generated(rank: Rank, sequences: list[Sequence]) -> list[list[int]]:
    """The tokens behind the prompts of this rank. It clears them for the next mode."""
    tokens = []
    for row, sequence in enumerate(sequences):
        behind = rank.tokens[row, sequence.prompt : sequence.end]
        tokens.append(behind.tolist())
        behind.zero_()
    return tokens


def compare(row: Row, expected: list[list[int]], tokens: list[list[int]]) -> None:
    """Counts equal sequences and tokens of both ranks."""
    counts = []
    for want, got in zip(expected, tokens):
        same = [a == b for a, b in zip(want, got)]
        counts.append((all(same), 1, [*same, False].index(False), len(want)))
    sums = np.sum([one for of_rank in gathered(counts) for one in of_rank], 0).tolist()
    row.equal_sequences, row.sequences, row.equal_tokens, row.tokens = sums


def measure(arguments: argparse.Namespace, device: torch.device) -> list[Row]:
    shape = arguments.long, arguments.short, arguments.shorts, arguments.tokens
    trace = make_trace(*shape)
    blocks = {mode: blocks_for(trace[BORROWER], arguments.share) for mode in MODES}
    blocks["room"] = blocks_for(trace[BORROWER], 1)
    length = max(sequence.end for sequences in trace for sequence in sequences)
    dtype = getattr(torch, arguments.dtype)
    model = Model(TINY if arguments.smoke else Sizes(), dtype, device, length)
    rank = Rank(model, trace, blocks["room"], arguments.budget)
    rank.use_graphs = device.type == "cuda" and not arguments.eager
    total = sum(sequence.end - sequence.prompt for sequences in trace for sequence in sequences)
    runs: dict[str, list[Row]] = {mode: [] for mode in MODES}
    expected: list[list[int]] = []
    for turn in range(arguments.rounds + 1):  # turn 0 warms up
        for mode in MODES:
            new = make_trace(*shape)
            schedule = Schedule(mode, new, blocks[mode], arguments.budget)
            times = run_mode(rank, schedule, new[rank.rank])
            tokens = generated(rank, trace[rank.rank])
            expected = expected or tokens
            done = [seconds for seconds, _ in times]
            pause, mean_done = times[BORROWER][1]
            counts = schedule.preemptions, schedule.lent
            row = Row(mode, max(done), total / max(done), done, pause, mean_done, *counts)
            compare(row, expected, tokens)
            if turn or not arguments.rounds:
                runs[mode].append(row)
    return [summary(rows) for rows in runs.values()]


def summary(rows: list[Row]) -> Row:
    """Median times, and the fewest equal tokens."""
    row = min(rows, key=lambda row: row.equal_tokens)
    for name in ("wall", "tokens_per_second", "pause", "mean_done"):
        setattr(row, name, median(getattr(each, name) for each in rows))
    row.done = [median(times) for times in zip(*(each.done for each in rows))]
    return row


def report(arguments: argparse.Namespace, rows: list[Row], device: str) -> None:
    heads = "wall s", "tokens/s", "0 done s", "1 done s", "0 mean s", "0 pause s"
    titles = [f"{head:>9}" for head in (*heads, "preempted", "lent")]
    print(f"{'mode':10}", *titles, "equal to room")
    for row in rows:
        times = row.wall, row.tokens_per_second, *row.done, row.mean_done, row.pause
        print(
            f"{row.mode:10}", *(f"{time:9.3f}" for time in times),
            f"{row.preemptions:9} {row.lent_blocks:9} {row.equal_sequences} of {row.sequences}"
            f" sequences, {row.equal_tokens} of {row.tokens} tokens",
        )  # fmt: skip
    if arguments.json:
        record = run_record(device) | {
            "arguments": vars(arguments) | {"json": str(arguments.json)},
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 on cuda")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model, which --device cpu implies"
    )
    parser.add_argument("--long", type=int, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, help="tokens of a short prompt")
    parser.add_argument("--shorts", type=int, help="short sequences of instance 0")
    parser.add_argument("--tokens", type=int, help="that a sequence generates at most")
    parser.add_argument("--budget", type=int, help="tokens of a step")
    parser.add_argument("--share", type=float, help="of output that has blocks")
    parser.add_argument("--rounds", type=int, help="after one that warms up; 0: only that one")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs of decoding steps")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.smoke |= arguments.device == "cpu"
    defaults = SMALL if arguments.smoke else LARGE
    for name, value in defaults._asdict().items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    arguments.dtype = arguments.dtype or ("float32" if arguments.smoke else "bfloat16")
    return arguments


def main() -> int:
    arguments = parse()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", "2", "-m", "benchmarks.bench_lending"]
        return subprocess.run([*command, *sys.argv[1:]], check=False).returncode
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # ranks may capture in different steps
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    if dist.get_world_size() != 2:
        raise SystemExit(f"bench_lending: expected 2 processes, got {dist.get_world_size()}")
    with torch.inference_mode():
        rows = measure(arguments, device)
    if dist.get_rank() == 0:
        report(arguments, rows, device.type)
    dist.destroy_process_group()
    unequal = any(row.equal_tokens < row.tokens for row in rows)
    return int(unequal and arguments.dtype == "float32")


if __name__ == "__main__":
    sys.exit(main())
