"""Continuous batching of requests for a transformers model, on this library's kernels."""
