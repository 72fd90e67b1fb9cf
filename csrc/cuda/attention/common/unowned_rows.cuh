// The rows of `out` and `lse` before the first sequence's tokens and after the last one's.
#pragma once
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Writes lse -inf and, with p.zero_unowned, out 0 to the rows that no sequence owns. Each CTA of
// the x dimension calls it with whole warps `warp` of `warps`, after its PDL wait. Most batches have
// no such row. Then it costs two loads, which a warp without other work should wait for: a kernel
// of its own takes 2 us (docs/lab/host_cost.md).
__device__ __forceinline__ void clear_unowned_rows(const PagedAttentionParams& p, int warp,
                                                   int warps) {
  const bool is_first_launch = !p.concurrent;
  if (p.query_start_loc == nullptr || !is_first_launch) return;
  if (!p.zero_unowned && p.lse == nullptr) return;
  const RowRange owned = owned_rows(p);
  const int lane = threadIdx.x % 32, count = p.num_tokens - owned.count;
#pragma unroll 1
  for (int i = blockIdx.x * warps + warp; i < count; i += gridDim.x * warps) {
    const int64_t row = i < owned.first ? i : i + owned.count;
    if (p.zero_unowned) {  // the binding has checked that rows are aligned to 16 bytes
      const int bytes = size_of(p.dtype);
      auto* out = reinterpret_cast<uint4*>(static_cast<char*>(p.out) + row * p.out_stride * bytes);
#pragma unroll 1
      for (int at = lane; at < p.num_heads * p.kv.head_size * bytes / 16; at += 32) {
        out[at] = uint4{0, 0, 0, 0};
      }
    }
    if (p.lse == nullptr) continue;
#pragma unroll 1
    for (int head = lane; head < p.num_heads; head += 32) {
      p.lse[row * p.num_heads + head] = -INFINITY;
    }
  }
}

}  // namespace vllm_kernels::cuda
