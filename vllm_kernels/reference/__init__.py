"""What each op means, in plain PyTorch. Tests and benchmarks import it; nothing here is fast.

Functions return their result instead of writing it, and compute in float64 where the op's own
rounding steps allow, so that a comparison measures the kernel's error and not the reference's.
"""

from .activation import *  # noqa: F403
from .attention import *  # noqa: F403
from .cache import *  # noqa: F403
from .norm import *  # noqa: F403
from .pages import *  # noqa: F403
from .quant import *  # noqa: F403
from .rotary import *  # noqa: F403
from .sampling import *  # noqa: F403
from .sparq import *  # noqa: F403
