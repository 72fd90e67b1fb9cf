"""The logger ``vllm_kernels``, which VLLM_KERNELS_LOGLEVEL turns on. Off, a call costs nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .errors import InvalidArgument

__all__ = ["calls_are_logged", "logged", "logger", "set_up"]

logger = logging.getLogger("vllm_kernels")
calls_are_logged = False
"""Whether ops are logged, which is decided once, at import."""

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def set_up() -> None:
    """Reads the variable. DEBUG turns VLLM_KERNELS_LOG on, too, unless that is set.

    Raises:
        InvalidArgument: another word.
    """
    global calls_are_logged
    level = os.environ.get("VLLM_KERNELS_LOGLEVEL", "").upper()
    if not level:
        return
    if level not in _LEVELS:
        raise InvalidArgument(
            f"VLLM_KERNELS_LOGLEVEL={level}: expected {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}"
        )
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    calls_are_logged = level == "DEBUG"
    if calls_are_logged:  # the libraries read it at their first call
        os.environ.setdefault("VLLM_KERNELS_LOG", "1")


def logged(op: str, names: list[str], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, after a line with the op and its arguments."""

    def log_and_call(*arguments: object) -> object:
        if logger.isEnabledFor(logging.DEBUG):
            text = ", ".join(f"{name} {_text(value)}" for name, value in zip(names, arguments))
            logger.debug("%s(%s)", op, text)
        return call(*arguments)

    return log_and_call


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {value.device}"
    if isinstance(value, list | tuple) and value:
        return f"{len(value)} x {_text(value[0])}"
    return repr(value)
