"""A decode step in a CUDA graph: one graph serves every batch of up to 8 sequences.

Without a GPU the program says so and runs the same step without a graph.
"""

import torch

import vllm_kernels as vk
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

has_gpu = torch.cuda.is_available() and vk.cuda_loaded
device = "cuda" if has_gpu else "cpu"
max_seqs, heads, kv_heads, head_size, block_size = 8, 8, 2, 128, 16

# Static tensors: a graph reads and writes the same addresses in every replay.
shape = (2, 64, block_size, kv_heads, head_size)  # K and V, layout NHD
key_cache, value_cache = torch.zeros(shape, device=device)
one = torch.ones(1, device=device)
manager = KVCacheManager(num_blocks=64, block_size=block_size)
batch = BatchBuffers.zeros(max_seqs, 32, max_seqs, pin_memory=has_gpu)
tables = torch.empty_like(batch.block_tables, device=device)
lengths = torch.empty_like(batch.seq_lens, device=device)
slots = torch.empty_like(batch.slot_mapping, device=device)
query = torch.randn(max_seqs, heads, head_size, device=device)
key, value = torch.randn(2, max_seqs, kv_heads, head_size, device=device)
out = torch.empty_like(query)


def upload(ids):
    """One more token for each of these sequences; rows without a sequence are padding."""
    manager.step(ids, 1, batch)
    tables.copy_(batch.block_tables)
    lengths.copy_(batch.seq_lens)
    slots.copy_(batch.slot_mapping)


def attend():
    """What the graph contains. An engine captures all layers of its model."""
    vk.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", one, one)
    vk.paged_attention(query, key_cache, value_cache, tables, lengths, layout="NHD", out=out)


manager.allocate_batch([1, 2, 3], 0)
upload([1, 2, 3])
if has_gpu:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records 8 rows; nothing runs yet
        attend()
    replay = graph.replay
else:
    print("No GPU: the step runs without a graph.")
    replay = attend

replay()  # 3 of 8 rows are used
print(out.abs().amax((1, 2)).gt(0).tolist())
upload([1, 3])
replay()  # 2 of 8 rows are used, by the same graph
print(out.abs().amax((1, 2)).gt(0).tolist())
