// How the pieces of a split segment reach the block that merges them where no block has two items.
//
// They are posted to the workspace and not counted: the block of the segment's last piece asks for
// them until they are there. What a thread stores at once, 8 or 16 bytes, is loaded at once, and
// not parted; its first word is never 0 (a 0 goes as -0), where the workspace has zeros until then.
// So a piece takes one way to memory and one back, without a fence, a counter and their trips.
// Whoever takes it puts the zero back: they are there before and after every launch.
//
// A block waits for blocks of lower number only. Devices start those before it (CUDA does not
// promise that; its own libraries' scans build on it, too), and they wait for nothing but the
// launch's predecessor, so they end whatever else runs.
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
