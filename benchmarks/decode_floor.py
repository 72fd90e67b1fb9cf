"""Floors of paged_attention's rows in ../shared/peers/bench.py, beside ours in the same run:
kernels that copy the same pages to shared memory and compute nothing (probes/decode_floor.cu).

    floor_wait   indices are read after the predecessor has ended, pages after them
    floor_guess  indices are read before: pages are copied as soon as the predecessor has ended
    floor_merge  the same, and split segments write partial results and merge them
    floor_many   many segments: 32 pages at a time, taken by whichever warp is ready

    OURS=benchmarks/decode_floor.py python3 $KIT/bench.py --peers 'ours_pa,floor*'
"""

from __future__ import annotations

import ctypes
import runpy
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
LOOK_UP, MERGE, DYNAMIC = 1, 2, 4
RING_BYTES = 192 << 10  # of a block's 8 warps


class Floor(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("key", "value", "pages")],
        *[
            (name, ctypes.c_int32)
            for name in ("count", "page_bytes", "stages", "items", "pieces", "rows", "flags")
        ],
        *[(name, ctypes.c_void_p) for name in ("partial", "counters", "out")],
    ]


def _library() -> ctypes.CDLL:
    library = Path(tempfile.mkdtemp(), "decode_floor.so")
    arguments = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared"]
    source = HERE / "probes/decode_floor.cu"
    subprocess.run(["nvcc", *arguments, "-Xcompiler", "-fPIC", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


LIBRARY = _library()


def _floor(flags: int):
    def prepare(w):
        keys, values = w.vl()
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
        segments = w.B * w.KH
        split = segments <= blocks and not flags & DYNAMIC
        if not split and flags != DYNAMIC | LOOK_UP:
            raise RuntimeError("more segments than multiprocessors: floor_many")
        rows = w.H // w.KH
        pages = torch.cat(
            [
                w.bt[b, : w.nbs[b]] * w.KH + head
                for b in range(w.B)
                for head in range(w.KH)
            ]
        ).int()  # fmt: skip
        pieces = blocks // segments if split else 1
        partial = torch.zeros(segments * pieces, rows, 128, device="cuda")
        counters = torch.zeros(1 + segments, dtype=torch.int32, device="cuda")
        result = torch.zeros(segments, rows, 128, device="cuda")
        out = torch.zeros_like(w.q)
        page_bytes = 16 * w.D * w.esz
        stages = min(8, RING_BYTES // (16 * page_bytes))

        def call(i):
            floor = Floor(
                keys[i].data_ptr(), values[i].data_ptr(), pages.data_ptr(), pages.numel(),
                page_bytes, stages, segments * pieces, pieces, rows, flags,
                partial.data_ptr(), counters.data_ptr(), result.data_ptr(),
            )  # fmt: skip
            stream = torch.cuda.current_stream().cuda_stream
            error = LIBRARY.decode_floor(ctypes.byref(floor), blocks, ctypes.c_void_p(stream))
            if error:
                raise RuntimeError(f"CUDA error {error}")
            return out

        return call

    return prepare


DECODE = {
    **runpy.run_path(str(HERE / "peers_ours.py"))["DECODE"],
    "floor_wait": ("vl", _floor(0)),
    "floor_guess": ("vl", _floor(LOOK_UP)),
    "floor_merge": ("vl", _floor(LOOK_UP | MERGE)),
    "floor_many": ("vl", _floor(LOOK_UP | DYNAMIC)),
}
