"""What each op means, in plain PyTorch. Tests and benchmarks import it; nothing here is fast.

Functions return their result instead of writing it, and compute in float64 where the op's own
rounding steps allow, so that a comparison measures the kernel's error and not the reference's.
"""

from vllm_kernels.reference.activation import *  # noqa: F403
from vllm_kernels.reference.attention import *  # noqa: F403
from vllm_kernels.reference.cache import *  # noqa: F403
from vllm_kernels.reference.norm import *  # noqa: F403
from vllm_kernels.reference.quant import *  # noqa: F403
from vllm_kernels.reference.rotary import *  # noqa: F403
from vllm_kernels.reference.sampling import *  # noqa: F403
