"""A decoder layer with random weights: four matrix products, and this library's ops between them.

The layer computes a sequence of 21 tokens twice, once in one pass and once in two. Both ways give
the same output, so the program prints True.
"""

import torch
from torch.nn.functional import linear

import vllm_kernels as vk
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

device = "cuda" if torch.cuda.is_available() and vk.cuda_loaded else "cpu"
hidden, wide, heads, kv_heads, head_size, block_size = 256, 512, 8, 2, 32, 16
qkv_heads = [heads, kv_heads, kv_heads]
shapes = {"qkv": (sum(qkv_heads) * head_size, hidden), "out": (hidden, heads * head_size)}
shapes |= {"gate_up": (2 * wide, hidden), "down": (hidden, wide)}
w = {name: torch.randn(shape, device=device) / 16 for name, shape in shapes.items()}
norm_1, norm_2 = torch.rand(2, hidden, device=device)

# The rotary table: a row per position, the cosines before the sines.
angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(0, head_size, 2) / head_size)
cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)  # [positions, head_size]

# The cache of this layer: 8 blocks of 16 tokens. The manager decides who owns which block.
shape = (2, 8, block_size, kv_heads, head_size)  # K and V, layout NHD
key_cache, value_cache = torch.zeros(shape, device=device)
manager = KVCacheManager(num_blocks=8, block_size=block_size)
batch = BatchBuffers.zeros(max_sequences=1, max_blocks=4, max_tokens=64)


def decoder_layer(x, residual, positions, slots, tables, lengths, starts):
    """The layer over new tokens. x, residual and both results are [num_tokens, hidden]."""
    vk.fused_add_rms_norm(x, residual, norm_1, 1e-6)  # residual += x; x = norm(residual)
    qkv = linear(x, w["qkv"]).unflatten(1, (-1, head_size))
    query, key, value = qkv.split(qkv_heads, 1)  # slices: nothing is copied
    vk.rope_and_cache(
        positions, query, key, value, cos_sin, True, key_cache, value_cache, slots, layout="NHD"
    )
    out = vk.paged_attention(
        query, key_cache, value_cache, tables, lengths, query_start_loc=starts,
        max_query_len=len(x), layout="NHD",
    )  # fmt: skip
    x = linear(out.flatten(1), w["out"])
    vk.fused_add_rms_norm(x, residual, norm_2, 1e-6)
    activated = torch.empty(len(x), wide, device=device)
    vk.silu_and_mul(activated, linear(x, w["gate_up"]))
    return linear(activated, w["down"]), residual


def run(sequence, embeddings):
    """One pass over the next tokens of a sequence."""
    n = len(embeddings)
    manager.step([sequence], n, batch)  # fills the tensors of batch, which are on the CPU
    tensors = (
        batch.positions[:n], batch.slot_mapping[:n],  # for each new token
        batch.block_tables, batch.seq_lens, batch.query_start_loc,  # for each sequence
    )  # fmt: skip
    x = embeddings.clone()  # the norm overwrites it
    x, residual = decoder_layer(x, torch.zeros_like(x), *(tensor.to(device) for tensor in tensors))
    return x + residual


embeddings = torch.randn(21, hidden, device=device)
manager.allocate_batch([1, 2], 0)  # two sequences without tokens
at_once = run(1, embeddings)
in_two_passes = torch.cat([run(2, embeddings[:20]), run(2, embeddings[20:])])
print(torch.allclose(at_once, in_two_passes, atol=1e-4))
