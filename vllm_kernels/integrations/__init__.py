"""How the kernels plug into other libraries."""
