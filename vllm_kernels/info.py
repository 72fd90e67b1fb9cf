"""What this installation is made of and what it can use here."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from vllm_kernels import _C, _library


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name} (sm_{device.major}{device.minor})" for device in devices)


def _cpu_level() -> str:
    try:
        return _C.cpu_level()
    except RuntimeError as error:
        return f"none: {error}"


def collect_info() -> dict[str, str]:
    """Lines of ``python -m vllm_kernels info``: what, and its value."""
    cuda = str(_library.CUDA_LIBRARY) if _library.cuda_loaded else _library.cuda_reason
    return {
        "vllm_kernels": _C.version,
        "Python": f"{platform.python_version()} on {platform.machine()}",
        "torch": f"{torch.__version__} (built with {_C.built_with_torch})",
        "transformers": _installed("transformers"),
        "CUDA build": _C.cuda_build,
        "CPU library": str(_library.CPU_LIBRARY),
        "CUDA library": cuda if _library.cuda_loaded else f"not loaded: {cuda}",
        "CPU level": _cpu_level(),
        "CPU threads": str(torch.get_num_threads()),
        "GPU": _gpus(),
    }


def print_info() -> None:
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in collect_info().items():
        table.add_row(name, value)
    Console().print(table)
