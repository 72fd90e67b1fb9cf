"""One rank of test_processes.py: ``context_parallel_worker.py FOLDER DEVICE``, by torchrun.

It writes a line per result to the file ``RANK`` in the folder. On CPUs, rank 3 then ends in the
middle of the calls. On GPUs, the ranks replay a CUDA graph of a call and its collectives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "ops")]

from shards import Dealt, dealt_case  # noqa: E402

from vllm_kernels.distributed import ContextParallel  # noqa: E402

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER, DEVICE = Path(sys.argv[1]), sys.argv[2]
LENS, CHUNKS = [1, 7, 40, 129], [1, 5, 40, 3]


def tell(line: str) -> None:
    with (FOLDER / str(RANK)).open("a") as file:
        print(line, file=file, flush=True)


def attend(parallel: ContextParallel, dealt: Dealt, exchange: str) -> tuple[torch.Tensor, slice]:
    """The result of this rank's heads, and which these are."""
    assert parallel.group is not None
    rank = parallel.group.rank()
    count = dealt.case.query.shape[1] // parallel.size
    heads = slice(rank * count, (rank + 1) * count)
    options = dict(dealt.options)
    for name in {"sinks", "alibi_slopes"} & options.keys():
        options[name] = options[name][heads]
    mine = [tensors[rank] for tensors in dealt.arguments()]
    return parallel.attend(dealt.case.query[:, heads], *mine, exchange=exchange, **options), heads


def check(group: dist.ProcessGroup, exchange: str, kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(7)  # the same case on every rank
    positions = {"sliding_window": 30, "alibi_slopes": torch.rand(12).to(DEVICE) / 10}
    for interleave, settings, queries, all_stored in (
        (3, {}, None, False),
        (3, {}, CHUNKS, False),
        (4, positions, None, False),
        (4, positions, CHUNKS, False),
        (4, positions, CHUNKS, True),
    ):
        if all_stored and dtype == torch.bfloat16:  # "gather" rounds the whole result once more
            continue
        shared = ContextParallel(shards=group.size(), interleave=interleave)
        parallel = ContextParallel(group, interleave=interleave)
        dealt = dealt_case(
            shared, LENS, queries, DEVICE, dtype, kv_heads, all_stored=all_stored, heads=12,
            sinks=torch.randn(12).to(DEVICE), **settings,
        )  # fmt: skip
        if settings:
            dealt.options["seq_lens"] = dealt.case.seq_lens
        lens = (torch.tensor(LENS) - torch.tensor(queries or [0])).to(DEVICE)
        assert torch.equal(parallel.local_lens(lens), shared.local_lens(lens)[group.rank()])
        dealt.check(*attend(parallel, dealt, exchange))
    tell(f"{group.size()} {exchange} {kv_heads} {dtype}")


def replay(group: dist.ProcessGroup, exchange: str) -> None:
    """A CUDA graph of a decode step, replayed with other queries and shorter sequences."""
    torch.manual_seed(8)
    shared = ContextParallel(shards=group.size(), interleave=3)
    parallel = ContextParallel(group, interleave=3)
    dealt = dealt_case(shared, LENS, None, DEVICE, torch.bfloat16, 2, heads=12)
    attend(parallel, dealt, exchange)  # NCCL connects
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, heads = attend(parallel, dealt, exchange)
    shorter = torch.tensor([1, 6, 33, 128], dtype=torch.int32, device=DEVICE)
    dealt.case.query.copy_(torch.randn_like(dealt.case.query))
    dealt.case.seq_lens.copy_(shorter)
    dealt.local_lens.copy_(shared.local_lens(shorter))
    graph.replay()
    dealt.check(got, heads)
    tell(f"graph {exchange}")


def end_in_the_middle(world: dist.ProcessGroup) -> None:
    begin = time.monotonic()
    try:
        for step in range(1000):
            if RANK == 3 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            check(world, "all_to_all", 2, torch.float32)
    except RuntimeError as error:
        tell(f"raised {'gloo' in str(error)} {time.monotonic() - begin:.1f}")


def main() -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    world = dist.group.WORLD
    assert world is not None
    pairs = [dist.new_group([first, first + 1]) for first in range(0, SIZE, 2)]
    for group in (pairs[RANK // 2], world) if SIZE > 2 else (world,):
        for exchange in ("all_to_all", "gather"):
            for kv_heads in (1, 2, 6):  # of 12 heads: 3 heads a rank have parts of 2 KV heads
                check(group, exchange, kv_heads, torch.float32)
            check(group, exchange, 2, torch.bfloat16)
    dist.barrier()
    if DEVICE == "cpu":
        end_in_the_middle(world)
    else:
        for exchange in ("all_to_all", "gather"):
            replay(world, exchange)
        dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # a group with a dead rank cannot be destroyed in order
