"""How the kernels plug into Hugging Face transformers. Knows nothing of the engine."""

from .._requirements import require_transformers

require_transformers(__name__)
