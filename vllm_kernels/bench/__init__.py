"""``python -m vllm_kernels bench``: what the library does under a load of requests."""
