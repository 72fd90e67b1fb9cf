// How the pieces of a split segment reach the block that merges them where no block has two items.
//
// They are posted to the workspace and not counted: the block of the segment's last piece asks for
// them until they are there. What a lane loads at once, up to 16 bytes, is not parted, and its
// first word is never 0 (a 0 goes as -0), where the workspace has zeros until then. So a piece
// takes one way to memory and one back, without a fence, a counter and their trips. Whoever takes
// it puts the zero back: they are there before and after every launch.
//
// A block waits for blocks of lower number only. Those are started before it and wait for nothing
// but the launch's predecessor, so they end whatever else the device runs.
#pragma once
#include "cuda/ptx.cuh"

namespace vllm_kernels::cuda {

__device__ __forceinline__ bool is_posted(float first_word) {
  return __float_as_uint(first_word) != 0;
}
__device__ __forceinline__ float never_zero(float x) {
  return x == 0.0f ? -0.0f : x;
}

__device__ __forceinline__ void post(float2* to, float2 x) {
  store_relaxed(to, float2{never_zero(x.x), x.y});
}
__device__ __forceinline__ void post(float4* to, float4 x) {
  store_relaxed(to, float4{never_zero(x.x), x.y, x.z, x.w});
}

__device__ __forceinline__ void take_back(float2* at) {
  store_relaxed(&at->x, 0.0f);
}
__device__ __forceinline__ void take_back(float4* at) {
  store_relaxed(&at->x, 0.0f);
}

}  // namespace vllm_kernels::cuda
