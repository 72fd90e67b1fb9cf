// copy_blocks and swap_blocks: copy whole KV blocks by a list of (source, destination) pairs.
// A task is one byte range of every block of one cache. It copies all pairs in their order, so a
// later pair reads the result of an earlier one. swap_blocks_batch copies between addresses.
#include "ops/copy_blocks.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// Byte ranges of a block.
int64_t num_chunks(int64_t block_bytes) {
  return ceil_div(block_bytes, kTaskBytes);
}

void copy_chunk(const BlockCopy& copy, const int64_t* pairs, int64_t num_pairs, int64_t block_bytes,
                int64_t chunk) {
  const int64_t begin = chunk * kTaskBytes;
  const int64_t size = block_bytes - begin < kTaskBytes ? block_bytes - begin : kTaskBytes;
  for (int64_t i = 0; i < num_pairs; ++i) {
    std::memmove(copy.to + pairs[2 * i + 1] * copy.to_stride + begin,
                 copy.from + pairs[2 * i] * copy.from_stride + begin, size);
  }
}

Loop loop_of(const CopyBlocksParams& p) {
  return {.count = p.num_copies * num_chunks(p.block_bytes)};
}

void run(const CopyBlocksParams& p, int64_t first, int64_t last) {
  const int64_t per_copy = num_chunks(p.block_bytes);
  for (int64_t task = first; task < last; ++task) {
    copy_chunk(p.copies[task / per_copy], p.pairs, p.num_pairs, p.block_bytes, task % per_copy);
  }
}

// --- swap_blocks

Loop swap_loop(const SwapBlocksParams& p) {
  return {.count = num_chunks(p.block_bytes)};
}

void run_swap(const SwapBlocksParams& p, int64_t first, int64_t last) {
  for (int64_t chunk = first; chunk < last; ++chunk) {
    copy_chunk(p.copy, p.pairs, p.num_pairs, p.block_bytes, chunk);
  }
}

// --- swap_blocks_batch: a task is one copy

Loop batch_loop(const SwapBlocksBatchParams& p) {
  return {.count = p.num_copies};
}

void run_batch(const SwapBlocksBatchParams& p, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    std::memmove(reinterpret_cast<void*>(p.to[i]), reinterpret_cast<const void*>(p.from[i]),
                 p.bytes[i]);
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(CopyBlocksParams, loop_of, run)
VLLM_KERNELS_CPU_KERNEL(SwapBlocksParams, swap_loop, run_swap)
VLLM_KERNELS_CPU_KERNEL(SwapBlocksBatchParams, batch_loop, run_batch)

}  // namespace vllm_kernels::cpu
