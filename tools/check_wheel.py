"""Fails on a library that manylinux_2_28 cannot load: `check_wheel.py FILE|FOLDER...`.

FILE is a wheel or a library. Build with cmake/portable.cmake, which makes such libraries.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# PEP 600, and auditwheel's policy.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
SYMBOL = re.compile(r"UND (\w+)@(\w+?)_([\d.]+)")


def too_new(library: Path) -> list[str]:
    """Symbols that manylinux_2_28 lacks, as `name@VERSION`."""
    listed = subprocess.run(
        ["readelf", "-W", "--dyn-syms", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return [
        f"{name}@{of}_{version}"
        for name, of, version in SYMBOL.findall(listed)
        if of in NEWEST and tuple(map(int, version.split("."))) > NEWEST[of]
    ]


def libraries(path: Path, unpacked: Path) -> list[Path]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(unpacked)
        path = unpacked
    return sorted(path.rglob("*.so*")) if path.is_dir() else [path]


def main() -> int:
    count, bad = 0, []
    for argument in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as unpacked:
            for library in libraries(argument, Path(unpacked)):
                count += 1
                bad += [f"{library.name}: {symbol}" for symbol in too_new(library)]
    for line in bad:
        print("newer than manylinux_2_28:", line)
    if not count:
        print("check_wheel: no library")
    print(f"check_wheel: {count} libraries, {len(bad)} symbols that are too new")
    return 1 if bad or not count else 0


if __name__ == "__main__":
    sys.exit(main())
