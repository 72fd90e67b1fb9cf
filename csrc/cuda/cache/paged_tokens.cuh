// Finds the cache location (page, token in the page) of each row that a CTA gathers.
#pragma once
#include <cstdint>

#include "ops/gather_cache.h"

namespace vllm_kernels::cuda {

constexpr int kMaxTokens = 16;  // rows of a CTA

// Counts the values <= bound in an ascending array. A 32-way search: each round probes one value a
// lane. All lanes of a warp call it.
__device__ __forceinline__ int count_up_to(const int32_t* values, int count, int bound) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = count;  // the result lies in [low, high]
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int at = low + (lane + 1) * step - 1;  // last value of this lane's interval
    const bool within = at < high && values[at] <= bound;
    const uint32_t beyond = ~__ballot_sync(0xffffffffu, within);
    low += (beyond == 0 ? 32 : __ffs(beyond) - 1) * step;
    high = min(low + step - 1, high);
  }
  return low;
}

// Writes the location of row first + i to places[i], for i < tokens <= kMaxTokens. The first warp
// of the CTA calls it.
__device__ __forceinline__ void locate_rows(const PagedTokens& p, int first, int tokens,
                                            TokenLocation* places) {
  int seq = -1;  // sequence of row `first`
  if (p.token_to_seq == nullptr) seq = count_up_to(p.cu_seq_lens, p.num_seqs + 1, first) - 1;
  const int row = first + static_cast<int>(threadIdx.x % 32);
  if (row >= first + tokens) return;
  TokenLocation place{TokenLocation::kUnwritten, 0};
  if (row < p.num_rows) {
    if (p.token_to_seq != nullptr) {
      seq = p.token_to_seq[row];
    } else {
      while (seq < p.num_seqs && p.cu_seq_lens[seq + 1] <= row) ++seq;
    }
    place = p.locate(row, seq);
  }
  places[row - first] = place;
}

}  // namespace vllm_kernels::cuda
