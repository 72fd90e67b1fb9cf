"""Calls every op once on the GPU, one shape per kernel: what compute-sanitizer watches."""

from __future__ import annotations

import torch

import vllm_kernels

torch.manual_seed(0)
CUDA = torch.device("cuda")


def norms() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for hidden in (7, 64, 4096, 16384, 32768):
            x = torch.randn(3, hidden, device=CUDA, dtype=dtype)
            weight = torch.randn(hidden, device=CUDA, dtype=dtype)
            vllm_kernels.rms_norm(torch.empty_like(x), x, weight, 1e-6)


def main() -> None:
    for group in (norms,):
        group()
        torch.cuda.synchronize()
        print(group.__name__, "done", flush=True)


if __name__ == "__main__":
    main()
