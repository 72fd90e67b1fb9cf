"""Packages that only parts of the library need, and the sentence where one is missing."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TRANSFORMERS = ((5, 17), (5, 24))
"""From, and below; as in pyproject.toml."""


def install_line(extra: str) -> str:
    """The command that installs an extra: of a wheel, or in the clone that this package lies in."""
    clone = Path(__file__).parent.parent
    if (clone / "pyproject.toml").exists():
        return f"in {clone}, pip install --no-build-isolation '.[{extra}]'"
    return f"pip install 'vllm_kernels[{extra}]'"


def require_transformers(module: str) -> None:
    """Raises ImportError, with the range and the remedy, unless a fitting one is installed."""
    oldest, too_new = TRANSFORMERS
    wanted = f">= {oldest[0]}.{oldest[1]}, < {too_new[0]}.{too_new[1]}"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise ModuleNotFoundError(
            f"{module} needs transformers {wanted}, found none: {install_line('engine')}",
            name="transformers",
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not oldest <= (int(numbers[1]), int(numbers[2])) < too_new:
        raise ImportError(
            f"{module} needs transformers {wanted}, found {found}: {install_line('engine')}"
        )
