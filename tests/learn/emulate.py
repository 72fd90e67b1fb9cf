"""Compiles a CUDA step of examples/learn for the emulator: emulator/cuda_runtime.h."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
STEPS = HERE.parents[1] / "examples/learn"
LAUNCH = re.compile(r"(\w+)<<<(.*?)>>>\((.*?)\);", re.S)
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];")
OPTIONS = [
    "-std=c++17", "-O1", "-fPIC", "-shared", "-x", "c++", "-fsanitize-undefined-trap-on-error",
    "-fsanitize=alignment,bounds,shift,integer-divide-by-zero",
]  # fmt: skip


class EmulatedStep:
    """A function like that of the compiled step. `seed` chooses the order of threads and copies."""

    def __init__(self, name: str, folder: Path, edit: Callable[[str], str] = lambda text: text):
        """`edit` changes every source file, so that a test can plant a fault."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in (STEPS / f"{name}.cu", *STEPS.glob("*.h"), *STEPS.glob("*.cuh")):
            text = LAUNCH.sub(r"emulator::launch({\2}, [&] { \1(\3); });", edit(path.read_text()))
            text = DYNAMIC.sub(r"char* const \1 = emulator::dynamic_shared;", text)
            (folder / path.name).write_text(text)
        for path in (HERE / "emulator").iterdir():
            shutil.copy(path, folder / path.name)  # ptx.cuh in place of the step's
        library = folder / f"{name}.so"
        command = ["g++", *OPTIONS, "-I", folder, folder / f"{name}.cu", "-o", library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(library))
        self._library.emulator_error.restype = ctypes.c_char_p
        self._function = getattr(self._library, name)
        self.__name__ = name
        self.seed = 0

    def __call__(self, *arguments: object) -> int:
        self._library.emulator_seed(self.seed)
        return self._function(*arguments)

    def error(self) -> str:
        return self._library.emulator_error().decode()
