#include "ops/copy_blocks.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// A task is a byte range of the blocks of one cache, for all pairs in their order.
int64_t pieces(int64_t block_bytes) {
  return ceil_div(block_bytes, kTaskBytes);
}

void copy_piece(const BlockCopy& copy, const int64_t* pairs, int64_t num_pairs, int64_t block_bytes,
                int64_t piece) {
  const int64_t begin = piece * kTaskBytes;
  const int64_t size = block_bytes - begin < kTaskBytes ? block_bytes - begin : kTaskBytes;
  for (int64_t i = 0; i < num_pairs; ++i) {
    std::memmove(copy.to + pairs[2 * i + 1] * copy.to_stride + begin,
                 copy.from + pairs[2 * i] * copy.from_stride + begin, size);
  }
}

int64_t num_tasks(const CopyBlocksParams& p) {
  return p.num_copies * pieces(p.block_bytes);
}

void run(const CopyBlocksParams& p, int64_t begin, int64_t end) {
  const int64_t per_copy = pieces(p.block_bytes);
  for (int64_t task = begin; task < end; ++task) {
    copy_piece(p.copies[task / per_copy], p.pairs, p.num_pairs, p.block_bytes, task % per_copy);
  }
}

int64_t num_swap_tasks(const SwapBlocksParams& p) {
  return pieces(p.block_bytes);
}

void run_swap(const SwapBlocksParams& p, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    copy_piece(p.copy, p.pairs, p.num_pairs, p.block_bytes, piece);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::CopyBlocksParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
VLLM_KERNELS_CPU_KERNEL(vllm_kernels::SwapBlocksParams, vllm_kernels::cpu::num_swap_tasks,
                        vllm_kernels::cpu::run_swap)
