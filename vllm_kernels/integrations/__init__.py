"""The public names that plug the kernels into other libraries."""
