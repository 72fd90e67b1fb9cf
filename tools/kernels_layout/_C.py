"""Stands for the pybind11 module: loads the ops, and has its facts. The manager is not here."""

from pathlib import Path

import torch

from ._commit import CUDA_BUILD, VERSION

version = VERSION
cuda_build = CUDA_BUILD

torch.ops.load_library(str(Path(__file__).with_name("libvllm_kernels.so")))
