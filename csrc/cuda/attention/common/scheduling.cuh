// What the schedulers of the attention kernels share.
#pragma once
#include "cuda/base/launch.cuh"
#include "cuda/base/ptx.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Whether one round of a warp's lanes covers the batch.
__device__ __forceinline__ bool one_round(const PagedAttentionParams& p) {
  return p.num_seqs <= 32;
}

// Before anything is read that the predecessor may have written, and at a kernel's end. A launch
// beside its predecessor began after that one's predecessors had ended, and ends after it has.
__device__ __forceinline__ void wait_at_start(const PagedAttentionParams& p) {
  if (!p.concurrent) wait_for_primary_kernel();
}
__device__ __forceinline__ void wait_at_end(const PagedAttentionParams& p) {
  if (p.concurrent) wait_for_primary_kernel();
}

// a / b of a >= 0 and b > 0, quick where the quotient is small.
__device__ __forceinline__ int divide(int a, int b) {
  int quotient = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  int rest = a - quotient * b;
#pragma unroll 1
  for (; rest < 0; rest += b) --quotient;
#pragma unroll 1
  for (; rest >= b; rest -= b) ++quotient;
  return quotient;
}

}  // namespace vllm_kernels::cuda
