"""The ops in torch.ops. A folder for Hugging Face's kernels has another namespace here."""

from __future__ import annotations

import torch

NAMESPACE = "vllm_kernels"

library_ops = getattr(torch.ops, NAMESPACE)
library_checks = getattr(torch.ops, f"{NAMESPACE}_checks")
"""The same ops for meta tensors: they check their arguments."""
