"""Continuous batching: many requests at once through a Hugging Face model on the kernels."""
