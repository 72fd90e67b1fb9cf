// Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867): the steps of one row that all
// attention kernels share. Loops over fragments and reductions over lanes stay in the kernels.
#pragma once
#include "cuda/base/ptx.cuh"

namespace vllm_kernels::cuda {

// Conditional rescaling, as in FlashAttention-4: row_max is raised only when a logit exceeds it by
// more than this (log2 units). row_max need only keep p from overflow and underflow, and p up to
// 2^8 does neither in fp16.
constexpr float kRescaleThreshold = 8.0f;

// Sets row_max to `updated`, which is no less. Returns the factor for earlier sums and outputs.
__device__ __forceinline__ float update_row_max(float& row_max, float updated) {
  const float factor = exp2_approx(row_max - updated);
  row_max = updated;
  return factor;
}

}  // namespace vllm_kernels::cuda
