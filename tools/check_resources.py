"""Fails when a kernel of the CUDA library spills registers, uses a stack frame or has its
warpgroup products held up by ptxas.

Reads what ptxas said of every object of the build (tools/keep_output.sh keeps it beside them).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# "wgmma.mma_async instructions are serialized", "warpgroup.arrive is injected"
HELD_UP = re.compile(r"\((?:C7510|C7519|C7520)\).*")
REGISTERS = re.compile(r"Used (\d+) registers")


def main() -> int:
    kernels, bad, held_up, most = 0, 0, 0, 0
    for log in sorted(Path(sys.argv[1]).glob("CMakeFiles/cuda_kernels.dir/csrc/cuda/*.log")):
        name = ""
        for line in log.read_text().splitlines():
            if match := KERNEL.search(line):
                name = f"{log.name.removesuffix('.o.log')} {match.group(2)} {match.group(1)}"
                kernels += 1
            elif (match := STACK.search(line)) and any(int(n) for n in match.groups()):
                print(f"{name}: {match.group(0)}")
                bad += 1
            elif match := HELD_UP.search(line):
                print(f"{log.name.removesuffix('.o.log')}: {match.group(0)}")
                held_up += 1
            elif match := REGISTERS.search(line):
                most = max(most, int(match.group(1)))
    print(
        f"check_resources: {kernels} kernels, {bad} with a stack frame or spills, "
        f"{held_up} warpgroup products held up, at most {most} registers"
    )
    return 1 if bad or held_up or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
