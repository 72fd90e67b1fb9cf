// How the pieces of a split segment reach the block that merges them, where each block has one
// item.
//
// They go to the workspace and are not counted: the block of a segment's last piece asks for the
// others' until they are there. Whatever a lane loads at once has a word that is not 0 (a 0 goes as
// -0), where the workspace has 0 until then; loads and stores of up to 16 bytes are not parted. So
// a piece takes one way to memory and one back, without a fence, a counter and the trips of its
// own. The taker puts the zeros back.
//
// A block waits for blocks of lower number only. Those are started before it, and wait for their
// predecessor at most, so they end whatever else the device runs.
#pragma once
#include "cuda/ptx.cuh"

namespace vllm_kernels::cuda {

// What tells that it is there.
__device__ __forceinline__ float not_zero(float x) {
  return x == 0.0f ? -0.0f : x;
}
__device__ __forceinline__ bool is_posted(float x) {
  return __float_as_uint(x) != 0;
}

__device__ __forceinline__ void post(float2* to, float2 x) {
  store_relaxed(to, float2{not_zero(x.x), x.y});
}
__device__ __forceinline__ void post(float4* to, float4 x) {
  store_relaxed(to, float4{not_zero(x.x), x.y, x.z, x.w});
}

__device__ __forceinline__ void take_back(float2* at) {
  store_relaxed(&at->x, 0.0f);
}
__device__ __forceinline__ void take_back(float4* at) {
  store_relaxed(&at->x, 0.0f);
}

}  // namespace vllm_kernels::cuda
