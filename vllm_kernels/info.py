"""What this installation is made of and what it can use here."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from . import _C, _library, _version

VARIABLES = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_CUDA_ARCH_LIST")
"""Besides those that begin with VLLM_KERNELS_."""


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return lines[0].strip() if lines else None


def built_architectures() -> list[str]:
    """Of the CUDA library, in torch's words; none if there is none."""
    found = re.search(r"architectures ([\w.,+]+)", _C.cuda_build)
    return found[1].split(",") if found and _library.CUDA_LIBRARY.exists() else []


def gpu_problem(built: list[str], major: int, minor: int) -> str | None:
    """The line that mends a build without code for a GPU; None where it has some."""
    for entry in built:
        plain = entry.removesuffix("+PTX")
        numbers = plain.rstrip("af").split(".")
        of_major, of_minor = int(numbers[0]), int(numbers[1])
        if plain[-1].isdigit():
            if of_major == major and of_minor <= minor:
                return None
            if entry.endswith("+PTX") and (of_major, of_minor) <= (major, minor):
                return None
        elif of_major == major and (of_minor == minor or (plain[-1] == "f" and of_minor <= minor)):
            return None
    if not built:
        return None
    names = ", ".join(f"sm_{entry.replace('.', '')}" for entry in built)
    wanted = f"{major}.{minor}{'a' if (major, minor) == (9, 0) else ''}"
    return (
        f"built for {names}, this GPU is sm_{major}{minor}: build with "
        f"TORCH_CUDA_ARCH_LIST={wanted}"
    )


def _gpus() -> list[dict[str, str | None]]:
    if not torch.cuda.is_available():
        return []
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    built = built_architectures()
    return [
        {
            "name": gpu.name,
            "architecture": f"sm_{gpu.major}{gpu.minor}",
            "problem": gpu_problem(built, gpu.major, gpu.minor),
        }
        for gpu in gpus
    ]


def _cpu_level() -> str:
    try:
        return _C.cpu_level()
    except RuntimeError as error:
        return f"none: {error}"


def _built_by() -> str | None:
    """The compiler that the CPU library names."""
    try:
        library = _library.CPU_LIBRARY.read_bytes()
    except OSError:
        return None
    found = re.search(rb"(GCC: \([^)]*\) [\d.]+|clang version [\d.]+)", library)
    return found[1].decode() if found else None


def collect() -> dict[str, object]:
    """What ``info --json`` prints."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in VARIABLES or name.startswith("VLLM_KERNELS_")
    }
    return {
        "vllm_kernels": _version.version,
        "commit": _version.commit or None,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "glibc": platform.libc_ver()[1] or None,
        "torch": torch.__version__,
        "built_with_torch": _C.built_with_torch,
        "built_with_compiler": _built_by(),
        "numpy": _installed("numpy"),
        "transformers": _installed("transformers"),
        "cpu_library": str(_library.CPU_LIBRARY),
        "cpu_level": _cpu_level(),
        "cpu_threads": torch.get_num_threads(),
        "cuda_build": _C.cuda_build,
        "cuda_architectures": built_architectures(),
        "cuda_library": str(_library.CUDA_LIBRARY) if _library.cuda_loaded else None,
        "cuda_not_loaded_because": _library.cuda_reason or None,
        "cuda_of_torch": torch.version.cuda,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "gpus": _gpus(),
        "g++": _first_line("g++", "--version"),
        "variables": variables,
    }


def collect_info() -> dict[str, str]:
    """Lines of ``python -m vllm_kernels info``: what, and its value."""
    known = collect()
    gpus, variables = known["gpus"], known["variables"]
    assert isinstance(gpus, list) and isinstance(variables, dict)
    cuda = known["cuda_library"] or f"not loaded: {known['cuda_not_loaded_because']}"
    lines = {
        "vllm_kernels": str(known["vllm_kernels"]),
        "commit": str(known["commit"] or "unknown"),
        "Python": f"{known['python']} on {known['machine']}, glibc {known['glibc']}",
        "torch": f"{known['torch']} (built with {known['built_with_torch']})",
        "transformers": str(known["transformers"] or "not installed"),
        "compiler": str(known["built_with_compiler"] or "unknown"),
        "CUDA build": str(known["cuda_build"]),
        "CPU library": str(known["cpu_library"]),
        "CUDA library": str(cuda),
        "CPU level": str(known["cpu_level"]),
        "CPU threads": str(known["cpu_threads"]),
        "driver": str(known["driver"] or "none"),
        "GPU": ", ".join(f"{gpu['name']} ({gpu['architecture']})" for gpu in gpus) or "none",
        "variables": " ".join(f"{name}={value}" for name, value in variables.items()) or "none",
    }
    for number, gpu in enumerate(gpus):
        if gpu["problem"]:
            lines[f"GPU {number}"] = str(gpu["problem"])
    return lines


def print_info(as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(collect(), indent=2))
        return
    for name, value in collect_info().items():
        print(f"{name:<13} {value}")
