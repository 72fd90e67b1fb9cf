// Asking the second-level cache for what is not read yet. Before a wait for the predecessor, too:
// no result depends on it.
#pragma once
#include <cstdint>

#include "cuda/base/architecture.cuh"

namespace vllm_kernels::cuda {

// For the sector, or the line, that `at` lies in.
__device__ __forceinline__ void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// For `bytes` from `at` on, both multiples of 16. Only from sm_90 on, where a kernel may start
// before its predecessor has finished; before, nothing would come of it.
__device__ __forceinline__ void prefetch_l2(const void* at, uint32_t bytes) {
#if defined(VLLM_KERNELS_HAS_SM90)
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
#endif
}

}  // namespace vllm_kernels::cuda
