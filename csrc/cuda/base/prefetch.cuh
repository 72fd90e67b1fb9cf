// Prefetches into L2. They are allowed before wait_for_primary_kernel(), because no result depends
// on them.
#pragma once
#include <cstdint>

#include "cuda/base/architecture.cuh"

namespace vllm_kernels::cuda {

// Prefetches the cache line, or its sector, that contains `at`.
__device__ __forceinline__ void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Prefetches `bytes` bytes at `at`; both are multiples of 16. It does nothing before sm_90: without
// PDL a kernel cannot start before its primary kernel ends, so a prefetch gains nothing.
__device__ __forceinline__ void prefetch_l2(const void* at, uint32_t bytes) {
#if defined(VLLM_KERNELS_HAS_SM90)
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes));
#endif
}

}  // namespace vllm_kernels::cuda
