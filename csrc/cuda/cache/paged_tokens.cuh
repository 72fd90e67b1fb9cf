// Finds the cache location (page, token in the page) of each row that a CTA gathers.
#pragma once
#include <cstdint>

#include "cuda/base/reduce.cuh"
#include "ops/gather_cache.h"

namespace vllm_kernels::cuda {

constexpr int kMaxTokens = 16;  // rows of a CTA

// Writes the location of row first + i to locations[i], for i < tokens <= kMaxTokens. The first
// warp of the CTA calls it.
__device__ __forceinline__ void locate_rows(const PagedTokens& p, int first, int tokens,
                                            TokenLocation* locations) {
  int seq = -1;  // sequence of row `first`
  if (p.token_to_seq == nullptr) seq = count_up_to(p.cu_seq_lens, p.num_seqs + 1, first) - 1;
  const int row = first + static_cast<int>(threadIdx.x % 32);
  if (row >= first + tokens) return;
  TokenLocation location{TokenLocation::kUnwritten, 0};
  if (row < p.num_rows) {
    if (p.token_to_seq != nullptr) {
      seq = p.token_to_seq[row];
    } else {
      while (seq < p.num_seqs && p.cu_seq_lens[seq + 1] <= row) ++seq;
    }
    location = p.locate(row, seq);
  }
  locations[row - first] = location;
}

}  // namespace vllm_kernels::cuda
