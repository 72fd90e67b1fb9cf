"""Fails when a kernel of the CUDA library spills registers or uses a stack frame, unless ALLOWED
names it, or has its wgmma instructions serialized by ptxas. Also where the host may launch a kernel
that has no device code (docs/lab/compiler_traps.md).

Reads what ptxas said of every object of the build (tools/keep_output.sh keeps it beside them), and
the objects' symbols.
With --json FILE it also writes what every kernel takes, for a comparison of two builds.

    python tools/check_resources.py build/cmake-cpython-311 [--json resources.json]

ALLOWED lists small spills of other architectures than sm_90a, with the reason.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# "wgmma.mma_async instructions are serialized", "warpgroup.arrive is injected"
SERIALIZED = re.compile(r"\((?:C7510|C7519|C7520)\).*")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# (part of a source, target, part of a kernel's name) -> most bytes of stack frame, and of spills.
# Of the 3100 instructions in prefill's loop a few load a spilled value. The cure costs 1 to 10%:
# docs/lab/prefill/sm80.md.
ALLOWED = {
    (f"prefill/sm80/instantiations/{name}.cu", "sm_100", "Li128ELNS0_6KvFormE2E"): (16, 60)
    for name in ("bf16", "f16")
}
# A kernel template, up to the template arguments. The host's has internal linkage: an L.
TEMPLATE = re.compile(r"(_ZN\w*?)L?(\d+[a-z][a-z0-9_]*_kernel)(?=I)")
SOURCES = "CMakeFiles/cuda_kernels*.dir/csrc/cuda"


def is_allowed(kernel: dict[str, str | int]) -> bool:
    """Whether it has a stack frame, within what ALLOWED gives it."""
    for (source, target, name), (stack, spills) in ALLOWED.items():
        is_listed = source in str(kernel["source"]) and name in str(kernel["kernel"])
        if is_listed and target == kernel["target"]:
            return 0 < int(kernel["stack"]) <= stack and int(kernel["spills"]) <= spills
    return False


def without_device_code(object_file: Path, compiled: set[str]) -> list[str]:
    """The host's functions of kernel templates, but for those that ptxas compiled."""
    if not object_file.exists():
        return []
    listed = subprocess.run(
        ["nm", "--defined-only", "--format=posix", object_file],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    symbols = {line.split()[0] for line in listed.stdout.splitlines()}
    names = {TEMPLATE.sub(r"\1\2", symbol) for symbol in symbols if "." not in symbol}
    templates = tuple(f"{match.group()}I" for name in compiled if (match := TEMPLATE.match(name)))
    return sorted(name for name in names - compiled if name.startswith(templates))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--json", type=Path, help="write registers, shared memory and spills here")
    arguments = parser.parse_args()
    kernels: list[dict[str, str | int]] = []
    bad = serialized = allowed = missing = 0
    for folder in sorted(arguments.build.glob(SOURCES)):
        for log in sorted(folder.glob("**/*.log")):
            source = str(log.relative_to(folder)).removesuffix(".o.log")
            first = len(kernels)
            for line in log.read_text().splitlines():
                if match := KERNEL.search(line):
                    name, target = match.groups()
                    kernels.append({"source": source, "target": target, "kernel": name})
                elif match := STACK.search(line):
                    stack, stores, loads = map(int, match.groups())
                    kernels[-1] |= {"stack": stack, "spills": stores + loads}
                    last = kernels[-1]
                    if is_allowed(last):
                        allowed += 1
                    elif stack or stores or loads:
                        print(f"{source} {last['target']} {last['kernel']}: {match.group(0)}")
                        bad += 1
                elif match := SERIALIZED.search(line):
                    print(f"{source}: {match.group(0)}")
                    serialized += 1
                elif match := USED.search(line):
                    shared = SHARED.search(line)
                    kernels[-1]["registers"] = int(match.group(1))
                    kernels[-1]["shared"] = int(shared.group(1)) if shared else 0
            compiled = {str(kernel["kernel"]) for kernel in kernels[first:]}
            for name in without_device_code(log.with_suffix(""), compiled):
                print(f"{source} {name}: no device code")
                missing += 1
    if arguments.json:
        lines = ",\n".join(json.dumps(kernel) for kernel in kernels)
        arguments.json.write_text(f"[\n{lines}\n]\n")
    most = max((int(kernel.get("registers", 0)) for kernel in kernels), default=0)
    print(
        f"check_resources: {len(kernels)} kernels, {bad} with a stack frame or spills, "
        f"{allowed} with small ones that are allowed, {serialized} with serialized wgmma, "
        f"{missing} without device code, at most {most} registers"
    )
    return 1 if bad or serialized or missing or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
