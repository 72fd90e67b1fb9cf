// Caches [num_blocks, ...] as blocks in memory, for ops that copy within them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "torch_ops/base/check.h"

namespace vllm_kernels {

// Bytes of one page of a cache [num_blocks, ...]. Its dimensions may have any order in memory, but
// no gaps.
int64_t dense_block_bytes(const Argument& cache);

inline int64_t block_stride_bytes(const Argument& cache) {
  return cache.stride(0) * cache.element_size();
}

// A cache in memory, whose pages are contiguous.
struct PlacedCache {
  Argument argument;
  int64_t index;  // in its list

  int64_t start() const { return reinterpret_cast<int64_t>(argument.data()); }
  int64_t bytes() const { return dense_block_bytes(argument); }
  int64_t end() const { return start() + (argument.size(0) - 1) * pitch() + bytes(); }
  int64_t pitch() const { return block_stride_bytes(argument); }
  std::string text() const {
    return std::string(argument.name()) + "[" + std::to_string(index) + "]";
  }
};

// Requires that no two caches share memory. Caches of one packed tensor interleave: their ranges
// overlap, their pages do not. Sorts them by address.
void require_apart(const Expect& expect, std::vector<PlacedCache>& caches);

}  // namespace vllm_kernels
