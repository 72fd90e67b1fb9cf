"""8-bit caches: how much memory each takes, and how far attention is from that over float32."""

import torch

import vllm_kernels as vk

device = "cuda" if torch.cuda.is_available() and vk.cuda_loaded else "cpu"
heads, kv_heads, head_size, block_size, tokens = 8, 2, 64, 16, 100
torch.manual_seed(0)
key, value = torch.randn(2, tokens, kv_heads, head_size, device=device)
query = torch.randn(1, heads, head_size, device=device)
slots = torch.arange(tokens, device=device)  # blocks 0, 1, 2, ...
tables = torch.arange(7, dtype=torch.int32, device=device)[None]
lengths = torch.tensor([tokens], dtype=torch.int32, device=device)


def attend(cache_dtype, name, largest):
    """Stores K and V in a cache of this dtype, and attends over it.

    largest: the largest number that the dtype holds, or None for a cache without scales.
    """
    shape = (2, 7, block_size, kv_heads, head_size)  # K and V, layout NHD
    key_cache, value_cache = torch.zeros(shape, dtype=cache_dtype, device=device)
    if largest is None:
        k_scale = v_scale = torch.ones(1, device=device)
        scales = {}
    else:  # a stored element stands for element * scale
        k_scale = (key.abs().max() / largest).view(1)
        v_scale = (value.abs().max() / largest).view(1)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    caches = key_cache, value_cache
    vk.reshape_and_cache_flash(key, value, *caches, slots, name, k_scale, v_scale)
    out = vk.paged_attention(query, *caches, tables, lengths, layout="NHD", **scales)
    return out, key_cache.nbytes + value_cache.nbytes


exact, num_bytes = attend(torch.float32, "auto", None)
print(f"float32        {num_bytes:6} bytes")
for cache_dtype, name, largest in (
    (torch.float8_e4m3fn, "fp8", 448),
    (torch.float8_e5m2, "fp8_e5m2", 57344),
    (torch.int8, "int8", 127),
):
    out, num_bytes = attend(cache_dtype, name, largest)
    error = (out - exact).norm() / exact.norm()
    print(f"{str(cache_dtype).removeprefix('torch.'):14} {num_bytes:6} bytes, error {error:.1%}")
