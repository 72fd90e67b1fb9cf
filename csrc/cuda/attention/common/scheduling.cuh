// Device functions that the schedulers of the decode and prefill kernels share.
#pragma once
#include "cuda/base/launch.cuh"
#include "cuda/base/ptx.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Whether a warp covers the batch with one sequence per lane.
__device__ __forceinline__ bool one_round(const PagedAttentionParams& p) {
  return p.num_seqs <= 32;
}

// Rounds of 32 sequences.
__device__ __forceinline__ int rounds_of(const PagedAttentionParams& p) {
  return (p.num_seqs + 31) / 32;
}

// wait_at_start() goes before the first read of memory that the primary kernel may write, and
// wait_at_end() at the kernel's end. A concurrent launch (p.concurrent) does not wait at its start:
// its primary kernel launches it after its own PDL wait, so all earlier kernels have ended. It
// waits at its end instead, so that it ends after its primary kernel.
__device__ __forceinline__ void wait_at_start(const PagedAttentionParams& p) {
  if (!p.concurrent) wait_for_primary_kernel();
}
__device__ __forceinline__ void wait_at_end(const PagedAttentionParams& p) {
  if (p.concurrent) wait_for_primary_kernel();
}

}  // namespace vllm_kernels::cuda
