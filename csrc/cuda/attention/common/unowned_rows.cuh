// The rows of `out` and `lse` that no sequence owns: tokens before the first sequence, behind the
// last one, and past max_query_len. On CUDA starts may also be out of order.
#pragma once
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Whether the sequences own every row, one after the other. All lanes of a warp call it.
__device__ __forceinline__ bool owns_all_rows(const PagedAttentionParams& p, int lane) {
  const int32_t* starts = p.query_start_loc;
  bool owns = starts[0] == 0 && starts[p.num_seqs] == p.num_tokens;
#pragma unroll 1
  for (int seq = lane; seq < p.num_seqs; seq += 32) {
    const int32_t first = starts[seq], end = starts[seq + 1];
    owns &= first >= 0 && first <= end && end - first <= p.max_query_len;
  }
  return __all_sync(0xffffffffu, owns);
}

// Whether a sequence owns the row. All lanes of a warp call it.
__device__ __forceinline__ bool is_owned(const PagedAttentionParams& p, int32_t row, int lane) {
  bool owned = false;
#pragma unroll 1
  for (int first = 0; first < p.num_seqs && !owned; first += 32) {
    const int seq = first + lane;
    const RowRange range = seq < p.num_seqs ? query_range(p, seq) : RowRange{};
    owned = __any_sync(0xffffffffu, row >= range.first && row - range.first < range.count);
  }
  return owned;
}

// Writes lse -inf and, with p.zero_unowned, out 0. kValues: of an element of the cache.
template <int kValues = 1>
__device__ __forceinline__ void clear_row(const PagedAttentionParams& p, int64_t row, int thread,
                                          int threads) {
  if (p.zero_unowned) {  // the binding has checked that rows are aligned to 16 bytes
    const int bytes = size_of(p.dtype);
    auto* out = reinterpret_cast<uint4*>(static_cast<char*>(p.out) + row * p.out_stride * bytes);
#pragma unroll 1
    for (int at = thread; at < p.num_heads * p.kv.head_size * kValues * bytes / 16; at += threads) {
      out[at] = uint4{0, 0, 0, 0};
    }
  }
  if (p.lse == nullptr) return;
#pragma unroll 1
  for (int head = thread; head < p.num_heads; head += threads) {
    p.lse[row * p.num_heads + head] = -INFINITY;
  }
}

// Clears the rows that no sequence owns. Each CTA calls it with whole warps after its PDL wait:
// `thread` of `threads`. Most batches have no such row. Then it costs a look at the starts. (A fill
// by a kernel of its own takes 2 us: docs/lab/host_cost.md.)
template <int kValues = 1>
__device__ __forceinline__ void clear_unowned_rows(const PagedAttentionParams& p, uint32_t thread,
                                                   uint32_t threads) {
  if (p.query_start_loc == nullptr || p.concurrent) return;  // the first launch clears
  if (!p.zero_unowned && p.lse == nullptr) return;
  const int lane = thread % 32;
  if (owns_all_rows(p, lane)) return;
#pragma unroll 1
  for (uint32_t row = (blockIdx.x * threads + thread) / 32;
       row < static_cast<uint32_t>(p.num_tokens); row += gridDim.x * threads / 32) {
    if (!is_owned(p, row, lane)) clear_row<kValues>(p, row, lane, 32);
  }
}

}  // namespace vllm_kernels::cuda
