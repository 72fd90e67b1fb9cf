"""The ops as typed Python calls.

Names and argument order are those of vLLM's ``_custom_ops``, so a call site moves over by changing
the import; docs/from_vllm.md names the exceptions. Every op runs on CPU and CUDA tensors, writes
into tensors the caller owns, and is for inference only: under grad mode a tensor that requires grad
is refused.

``torch.ops.vllm_kernels.<op>`` are the same ops without the grad check.
"""

from __future__ import annotations

import torch

from vllm_kernels import _library
from vllm_kernels.ops import activation, attention, cache, cascade, norm, norm_quant, rotary
from vllm_kernels.ops._common import library_ops
from vllm_kernels.ops._explain import explain
from vllm_kernels.ops._fake import register_fakes
from vllm_kernels.ops.activation import *  # noqa: F403
from vllm_kernels.ops.attention import *  # noqa: F403
from vllm_kernels.ops.cache import *  # noqa: F403
from vllm_kernels.ops.cascade import *  # noqa: F403
from vllm_kernels.ops.norm import *  # noqa: F403
from vllm_kernels.ops.norm_quant import *  # noqa: F403
from vllm_kernels.ops.rotary import *  # noqa: F403

_rooms = (norm, norm_quant, rotary, activation, cache, attention)
_no_ops = [*cascade.__all__, "check", "explain", "paged_attention_workspace"]
__all__ = ["check", "explain", *(name for room in (*_rooms, cascade) for name in room.__all__)]

OPS = [name for name in __all__ if name not in _no_ops]
"""Every op of the library."""


def check() -> None:
    """Waits for the GPUs that run checks, and raises the error that check mode has found there.

    With ``VLLM_KERNELS_CHECK=1`` in the environment every CUDA op also scans its index tensors
    (slots, positions, lengths, block tables). The first bad value, which the kernels skip, is
    raised by a later op, or at once by this call; under CUDA-graph replay too. On the CPU every
    call checks its index tensors anyway, and this function does nothing.

    Raises:
        RuntimeError: naming op, argument, index and value.
    """
    if _library.cuda_loaded and torch.cuda.is_initialized():
        for device in library_ops.scanned_devices.default():
            torch.cuda.synchronize(device)
        library_ops.raise_bad_index.default()


register_fakes(OPS)
_library.explain_missing_cuda(OPS)
