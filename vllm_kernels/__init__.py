"""vllm_kernels: the kernels an LLM inference engine needs around its matrix products."""

from vllm_kernels import _library, ops
from vllm_kernels._C import version as __version__
from vllm_kernels.ops import *  # noqa: F403
from vllm_kernels.ops import OPS

__all__ = ["OPS", "__version__", *ops.__all__]

cuda_loaded: bool = _library.cuda_loaded
