"""Other packages' functions, by their names and arguments, on this library's ops.

- :mod:`vllm_kernels.compat.flash_attn`: FlashAttention 2 (``flash_attn``)
- :mod:`vllm_kernels.compat.flash_attn_interface`: FlashAttention 3 (``flash_attn_interface``), with
  what ``sgl_kernel.flash_attn`` adds
- :mod:`vllm_kernels.compat.flashinfer`: FlashInfer (``flashinfer``)

On CPU and CUDA, for inference. A codebase written for one of them changes its import. Where the
import is not yours, :func:`install` makes ``import flash_attn`` find FlashAttention 2's functions.
"""

from ._install import install as install
from ._install import uninstall as uninstall

__all__ = ["install", "uninstall"]
