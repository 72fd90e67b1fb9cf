"""Writes stubs of glibc to link with: `glibc_stubs.py COMPILER FOLDER` prints their paths, by ";".

glibc 2.34 moved the functions of libpthread, libdl and librt into libc and gave them that version.
The old versions are still there, but the linker takes the newest. A stub has functions of the same
names at the version of glibc 2.28 or before, so that a library linked with it loads there too. No
stub is loaded at run time: it has the SONAME of glibc's own library.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

OLDEST = (2, 28)
# glibc's libraries of before 2.34, by how their functions' names begin.
LIBRARIES = {
    "libpthread.so.0": ("pthread_", "sem_"),
    "libdl.so.2": ("dl",),
    "librt.so.1": ("aio_", "clock_", "mq_", "shm_", "timer_"),
}

Version = tuple[int, ...]


def moved_functions(libc: str) -> dict[str, Version]:
    """Functions whose newest version is after OLDEST, with their last version until then."""
    listed = subprocess.run(
        ["readelf", "-W", "--dyn-syms", libc], capture_output=True, text=True, check=True
    ).stdout
    versions = defaultdict(list)
    for name, version in re.findall(r" I?FUNC .* (\w+)@@?GLIBC_([\d.]+)", listed):
        versions[name].append(tuple(int(number) for number in version.split(".")))
    return {
        name: max(version for version in found if version <= OLDEST)
        for name, found in versions.items()
        if min(found) <= OLDEST < max(found)
    }


def write_stub(compiler: str, path: Path, functions: dict[str, Version]) -> None:
    source, script = path.with_suffix(".c"), path.with_suffix(".map")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    by_version = defaultdict(list)
    for name, version in functions.items():
        by_version[".".join(map(str, version))].append(name)
    script.write_text(
        "".join(f"GLIBC_{v} {{ global: {'; '.join(n)}; }};\n" for v, n in by_version.items())
    )
    subprocess.run(
        [
            *(compiler, "-x", "c", "-w", "-fno-builtin", "-fPIC", "-shared", "-nostdlib"),
            *(f"-Wl,-soname,{path.name}", f"-Wl,--version-script={script}"),
            *("-o", str(path), str(source)),
        ],
        check=True,
    )


def main() -> None:
    compiler, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-print-file-name=libc.so.6"]
    libc = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    moved, paths = moved_functions(libc), []
    for name, prefixes in LIBRARIES.items():
        functions = {function: v for function, v in moved.items() if function.startswith(prefixes)}
        if functions:
            write_stub(compiler, folder / name, functions)
            paths.append(str(folder / name))
    print(";".join(paths))


if __name__ == "__main__":
    main()
