// Flag-in-data exchange of split partials. It is used where no CTA has two work tiles.
//
// Each split publishes its partial in the workspace, without a semaphore. The CTA of the query
// tile's last split polls the partials until all are present, and combines them. A partial is
// written in vectors of 8 or 16 bytes. Each vector is one store and one load, so it cannot tear.
// Its first word is never 0 (0 is stored as -0), and the workspace is 0 until then. So an exchange
// costs one store and one load, without a fence or an atomic. The reader clears the first words
// again: the workspace is 0 before and after every launch.
//
// Forward progress: a CTA waits only for CTAs of a lower index. GPUs start those first. CUDA does
// not promise this order, but the scans in CUDA's own libraries rely on it too. Those CTAs wait for
// nothing but the launch's primary kernel, so they end whatever else runs.
#pragma once
#include "cuda/base/ptx.cuh"

namespace vllm_kernels::cuda {

__device__ __forceinline__ bool is_published(float first_word) {
  return __float_as_uint(first_word) != 0;
}
__device__ __forceinline__ float never_zero(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float(bits == 0 ? 0x80000000u : bits);
}

__device__ __forceinline__ void publish(float2* to, float2 x) {
  store_relaxed(to, float2{never_zero(x.x), x.y});
}
__device__ __forceinline__ void publish(float4* to, float4 x) {
  store_relaxed(to, float4{never_zero(x.x), x.y, x.z, x.w});
}

__device__ __forceinline__ void clear_flag(float2* at) {
  store_relaxed(&at->x, 0.0f);
}
__device__ __forceinline__ void clear_flag(float4* at) {
  store_relaxed(&at->x, 0.0f);
}

}  // namespace vllm_kernels::cuda
