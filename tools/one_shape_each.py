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


def attention() -> None:
    """v1 and v2: every pair of types, padded head size and page size, ragged lengths with 0."""
    lengths = [0, 1, 17, 530]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for cache_dtype in ("auto", "fp8_e4m3", "fp8_e5m2"):
            for heads, kv_heads, head_size, block_size in (
                (8, 2, 128, 16), (12, 1, 128, 32), (4, 4, 64, 8), (18, 2, 80, 16), (4, 1, 240, 16),
                (10, 1, 256, 32),
            ):  # fmt: skip
                _attention(dtype, cache_dtype, heads, kv_heads, head_size, block_size, lengths)


def _attention(dtype, cache_dtype, heads, kv_heads, head_size, block_size, lengths) -> None:
    size = dtype.itemsize if cache_dtype == "auto" else 1
    x, pages, num_seqs = 16 // size, 70, len(lengths)
    keys = torch.randn(pages, kv_heads, head_size // x, block_size, x, device=CUDA)
    values = torch.randn(pages, kv_heads, head_size, block_size, device=CUDA)
    if cache_dtype == "auto":
        keys, values = keys.to(dtype), values.to(dtype)
    else:
        stored = torch.float8_e4m3fn if cache_dtype == "fp8_e4m3" else torch.float8_e5m2
        keys, values = keys.to(stored).view(torch.uint8), values.to(stored).view(torch.uint8)
    tables = torch.randint(0, pages, (num_seqs, 67), device=CUDA, dtype=torch.int32)
    query = torch.randn(num_seqs, heads, head_size, device=CUDA, dtype=dtype)
    out, one = torch.empty_like(query), torch.ones(1, device=CUDA)
    seq_lens = torch.tensor(lengths, device=CUDA, dtype=torch.int32)
    slopes = torch.rand(heads, device=CUDA)
    arguments = (query, keys, values, kv_heads, 0.1, tables, seq_lens, block_size, max(lengths))
    vllm_kernels.paged_attention_v1(out, *arguments, None, cache_dtype, one, one)
    sums = torch.empty(num_seqs, heads, 2, device=CUDA)
    partial = torch.empty(num_seqs, heads, 2, head_size, device=CUDA, dtype=dtype)
    scratch = (out, sums, torch.empty_like(sums), partial)
    vllm_kernels.paged_attention_v2(*scratch, *arguments, slopes, cache_dtype, one, one)
    sparse = (0, 1, 2, 64, 1)
    vllm_kernels.paged_attention_v2(*scratch, *arguments, None, cache_dtype, one, one, *sparse)


def main() -> None:
    for group in (norms, attention):
        group()
        torch.cuda.synchronize()
        print(group.__name__, "done", flush=True)


if __name__ == "__main__":
    main()
