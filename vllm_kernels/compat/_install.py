"""``import flash_attn`` on this library's ops, for code whose imports are not yours."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from os import PathLike
from types import ModuleType
from typing import Any

import torch

from .. import _log
from ..errors import Unsupported
from . import bert_padding, flash_attn

_MODULES: dict[str, ModuleType] = {
    "flash_attn": flash_attn,
    "flash_attn.flash_attn_interface": flash_attn,  # FlashAttention 2's module of that name
    "flash_attn.bert_padding": bert_padding,
}


_FILES = {
    "METADATA": (
        f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {flash_attn.__version__}\n"
        "Summary: vllm_kernels.compat.install()\n"
    ),
    "top_level.txt": "flash_attn\n",
}


class _FlashAttn(metadata.Distribution):
    """The installed package ``flash-attn``, as importlib.metadata sees it."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Any:
        raise FileNotFoundError(f"flash-attn is vllm_kernels.compat.flash_attn and has no {path}")


class _Finder(metadata.DistributionFinder):
    """Finds no module, since sys.modules has them; finds the distribution."""

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        name = None if context is None else context.name
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == "flash-attn":
            yield _FlashAttn()


_finder = _Finder()


def install() -> None:
    """Makes ``import flash_attn`` find :mod:`vllm_kernels.compat.flash_attn` in this process.

    Also transformers' ``flash_attention_2`` and continuous batching, which look for an installed
    package flash-attn 2. Call it before or after ``import transformers``, but before another module
    imports ``flash_attn``. A second call does nothing. Without CUDA transformers refuses
    ``flash_attention_2``, whatever is installed.

    Raises:
        Unsupported: the real flash_attn is installed or imported.

    Example:
        >>> from vllm_kernels import compat
        >>> compat.install()
        >>> from flash_attn import flash_attn_func
        >>> compat.uninstall()

    Source: https://github.com/Dao-AILab/flash-attention
    """
    if _finder in sys.meta_path:
        return
    real = _real_flash_attn()
    if real is not None:
        raise Unsupported(
            f"install: expected no flash_attn, got {real}: uninstall it, or import "
            "vllm_kernels.compat.flash_attn by that name"
        )
    sys.modules.update(_MODULES)
    sys.meta_path.append(_finder)
    _forget_answers()
    if not torch.cuda.is_available():
        _log.logger.info("install: without CUDA transformers refuses flash_attention_2")


def uninstall() -> None:
    """Undoes :func:`install`: ``import flash_attn`` fails again. Does nothing without it.

    Modules that imported functions meanwhile keep them. A model of transformers that ran with
    ``flash_attention_2`` needs another ``set_attn_implementation`` before its next call.

    Example:
        >>> from vllm_kernels import compat
        >>> compat.install()
        >>> compat.uninstall()
    """
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name, module in _MODULES.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _forget_answers()


def _real_flash_attn() -> str | None:
    """Where it is, in words."""
    try:
        found = metadata.distribution("flash-attn")
    except metadata.PackageNotFoundError:
        pass
    else:
        return f"flash-attn {found.version} in {found.locate_file('')}"
    module = sys.modules.get("flash_attn")
    if module is not None:
        return None if module is flash_attn else f"the imported module {module!r}"
    spec = find_spec("flash_attn")
    return None if spec is None else f"{spec.origin or 'a folder of that name'}"


def _forget_answers() -> None:
    """transformers asks once whether flash-attn is there, and keeps what it imported."""
    asked = sys.modules.get("transformers.utils.import_utils")
    for name, function in list(vars(asked).items()) if asked else []:
        if ("flash_attn" in name or "distribution" in name) and hasattr(function, "cache_clear"):
            function.cache_clear()
    known = getattr(asked, "PACKAGE_DISTRIBUTION_MAPPING", None)  # of transformers 5.17
    if isinstance(known, dict):
        known.pop("flash_attn", None)
        if _finder in sys.meta_path:
            known["flash_attn"] = ["flash-attn"]
    loaded = sys.modules.get("transformers.modeling_flash_attention_utils")
    if getattr(loaded, "_loaded_implementation", None) == "flash_attention_2":
        setattr(loaded, "_loaded_implementation", None)  # noqa: B010
