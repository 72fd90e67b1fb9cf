"""Fails when an object file of one CPU instruction-set level exports code another level could get.

An inline function with external linkage in csrc/cpu is emitted once per level as a weak symbol; the
linker keeps one of them for all, so a machine without AVX-512 would run AVX-512 code.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    build = Path(sys.argv[1])
    objects = sorted(build.glob("CMakeFiles/cpu_*.dir/csrc/cpu/**/*.o"))
    if not objects:
        print(f"check_cpu_symbols: no objects under {build}")
        return 1
    bad = []
    for path in objects:
        symbols = subprocess.run(
            ["nm", "-C", "--defined-only", str(path)], check=True, capture_output=True, text=True
        ).stdout
        bad += [
            f"{path.relative_to(build)}: {line}"
            for line in symbols.splitlines()
            if len(line) > 17 and line[17] in "WVu"
        ]
    for line in bad:
        print("weak symbol in a level's object:", line)
    print(f"check_cpu_symbols: {len(objects)} objects, {len(bad)} weak symbols")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
