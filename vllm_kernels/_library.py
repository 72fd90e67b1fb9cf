"""Loads the compiled libraries, and says in one sentence why one cannot be loaded."""

from __future__ import annotations

import sysconfig
import warnings
from pathlib import Path

import torch

from . import _log
from ._ops import NAMESPACE
from .errors import Unsupported

_PACKAGE = Path(__file__).parent
_OLDEST_TORCH = (2, 11)

CPU_LIBRARY = _PACKAGE / "libvllm_kernels.so"
CUDA_LIBRARY = _PACKAGE / "libvllm_kernels_cuda.so"

cuda_loaded: bool = False
"""Whether the CUDA ops are registered."""
cuda_reason: str = ""
"""Why they are not, as one sentence."""


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _load_core() -> None:
    """Registers the schemas and the CPU ops by importing ``_C``."""
    if _torch_version() < _OLDEST_TORCH:
        raise ImportError(
            f"vllm_kernels needs torch >= {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]}, "
            f"found torch {torch.__version__}."
        )
    try:
        from . import _C  # noqa: F401
    except ImportError as error:
        if not (_PACKAGE / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
            others = sorted(path.name for path in _PACKAGE.glob("_C.*.so"))
            hint = (
                f"{_PACKAGE} is a source tree that was "
                f"{f'built for another Python ({others[0]})' if others else 'not built'}: "
                "start Python outside of it to use the installed package, or run `make build` there"
            )
        elif not CPU_LIBRARY.exists():
            hint = f"{CPU_LIBRARY} is missing: reinstall the package"
        else:
            hint = f"torch {torch.__version__} may not fit the one it was built for"
        raise ImportError(f"vllm_kernels cannot load its C++ library: {error}; {hint}.") from error


def _load_cuda() -> tuple[bool, str]:
    """Registers the CUDA ops where torch has CUDA; returns (loaded, why not)."""
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} is a build without CUDA."
    if not CUDA_LIBRARY.exists():
        from . import _C

        return False, f"this build of vllm_kernels has no CUDA library: {_C.cuda_build}."
    try:
        torch.ops.load_library(str(CUDA_LIBRARY))
    except OSError as error:
        reason = f"vllm_kernels cannot load its CUDA library, only CPU ops work: {error}."
        warnings.warn(reason, stacklevel=3)
        return False, reason
    return True, ""


def explain_missing_cuda(op_names: list[str]) -> None:
    """Where the CUDA library is absent, makes every op say why when it meets a CUDA tensor."""
    if cuda_loaded or torch.version.cuda is None:
        return

    library = torch.library.Library(NAMESPACE, "IMPL", "CUDA")
    _keep_alive.append(library)
    for name in op_names:

        def refuse(*args: object, _name: str = name, **kwargs: object) -> None:
            raise Unsupported(f"{_name}: no CUDA implementation: {cuda_reason}")

        library.impl(name, refuse)


_keep_alive: list[torch.library.Library] = []

_log.set_up()
_load_core()
cuda_loaded, cuda_reason = _load_cuda()
_log.logger.info("CPU library: %s", CPU_LIBRARY)
_log.logger.info("CUDA library: %s", CUDA_LIBRARY if cuda_loaded else cuda_reason)
