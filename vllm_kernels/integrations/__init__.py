"""The public names that plug the kernels into other libraries."""

from .._requirements import require_transformers

require_transformers(__name__)
