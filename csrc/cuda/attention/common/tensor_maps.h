// TMA tensor maps by the numbers that they are made of (sm_90 and later).
#pragma once
#include <cuda.h>

#include <cstdint>

namespace vllm_kernels::cuda {

// A tensor of `rank` dimensions of 16-bit elements, and a box of it. What `rank` leaves unused is
// zero.
struct TensorMapKey {
  const void* base;
  uint64_t sizes[5];
  uint64_t strides[4];  // bytes, of all dimensions but the first
  uint32_t box[5];
  uint32_t rank;
  uint32_t swizzle;    // CUtensorMapSwizzle
  uint32_t promotion;  // CUtensorMapL2promotion
};

// The map of these numbers. It depends on nothing else, so each thread remembers its latest ones
// and does not ask the driver again: every layer of a model has caches of its own.
CUtensorMap tensor_map(const TensorMapKey& key);

}  // namespace vllm_kernels::cuda
