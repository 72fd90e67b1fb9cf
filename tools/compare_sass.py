"""Compares the machine code of two builds of the CUDA library, kernel names left aside.

A move or a rename must not change code. Each kernel is taken as its instructions, registers and
static shared memory; the two builds must have the same ones. Needs cuobjdump (CUDA Toolkit, or
triton/backends/nvidia/bin of the Triton wheel) on PATH or in CUOBJDUMP.

    python tools/compare_sass.py old/libvllm_kernels_cuda.so new/libvllm_kernels_cuda.so
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr


def sections(cubin: bytes) -> Iterator[tuple[str, bytes, int, int]]:
    """Name, content, size and sh_info of each section."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [SECTION.unpack_from(cubin, table + i * size) for i in range(count)]
    text = headers[names][4]
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        start = text + name
        label = cubin[start : cubin.index(b"\0", start)].decode()
        content = b"" if kind == 8 else cubin[offset : offset + length]  # SHT_NOBITS
        yield label, content, length, info


def kernels(library: Path) -> Counter[tuple[str, str]]:
    """(short name, digest of code, registers and shared memory) of every kernel."""
    found: Counter[tuple[str, str]] = Counter()
    tool = os.environ.get("CUOBJDUMP", "cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [tool, "-xelf", "all", str(library.resolve())],
            cwd=folder, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for path in Path(folder).glob("*.cubin"):
            parts = list(sections(path.read_bytes()))
            shared = {name[11:]: size for name, _, size, _ in parts if name[:11] == ".nv.shared."}
            for name, content, _, info in parts:
                if not name.startswith(".text."):
                    continue
                entry = name[6:]
                state = f"{info >> 24} registers, {shared.get(entry, 0)} bytes".encode()
                match = re.search(r"\d([a-z][a-z_0-9]*_kernel)(?=[IE])", entry)
                digest = hashlib.sha256(content + state).hexdigest()
                found[match.group(1) if match else entry, digest] += 1
    return found


def main() -> int:
    old, new = (kernels(Path(path)) for path in sys.argv[1:3])
    codes = [Counter[str](), Counter[str]()]
    for side, build in zip(codes, (old, new), strict=True):
        for (_, digest), count in build.items():
            side[digest] += count
    differing = 0
    for label, mine, other in (("only in old", *codes), ("only in new", *reversed(codes))):
        names = Counter[str]()
        for (name, digest), count in (old if label == "only in old" else new).items():
            names[name] += min(count, max(0, mine[digest] - other[digest]))
        for name, count in sorted(names.items()):
            if count:
                print(f"{label}: {count} of {name}")
        differing += sum((mine - other).values())
    print(
        f"compare_sass: {sum(codes[0].values())} kernels in old, {sum(codes[1].values())} in new, "
        f"{differing} differ"
    )
    return 1 if differing or not codes[0] else 0


if __name__ == "__main__":
    sys.exit(main())
