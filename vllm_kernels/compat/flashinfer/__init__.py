"""FlashInfer's functions by their names: :mod:`vllm_kernels.compat.flashinfer.sampling`."""

from . import sampling

__all__ = ["sampling"]
