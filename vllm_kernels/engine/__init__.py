"""Continuous batching of requests for a transformers model, on this library's kernels."""

from .._requirements import require_transformers

require_transformers(__name__)
