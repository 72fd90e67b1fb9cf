// What the CUDA steps share: the one shape they serve, bfloat16, and reductions over a warp.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "attention.h"

using bf16 = __nv_bfloat16;

constexpr int kHeadSize = 128;
constexpr int kGroup = 4;      // query heads of a KV head
constexpr int kPageSize = 16;  // tokens
constexpr int kVec = 8;        // bf16 elements of 16 bytes, the most that one thread loads at once
constexpr int kRow = kHeadSize + kVec;  // a row in shared memory: padded, against bank conflicts
constexpr unsigned kAllLanes = 0xffffffffu;

inline bool is_supported(const Attention<bf16>& a) {
  return a.head_size == kHeadSize && a.num_heads == kGroup * a.num_kv_heads &&
         a.page_size == kPageSize;
}

// A bfloat16 is the upper half of a float32: two of them are unpacked without arithmetic.
__device__ inline float low_float(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float high_float(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

__device__ inline float4 unpack(uint32_t pair, uint32_t next) {
  return {low_float(pair), high_float(pair), low_float(next), high_float(next)};
}

// Four elements; `at` is aligned to 8 bytes.
__device__ inline float4 load4(const bf16* at) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(at);
  return unpack(pairs.x, pairs.y);
}

__device__ inline float dot4(float4 x, float4 y) {
  return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
}

// A butterfly: after five exchanges every lane has the result of all 32.
__device__ inline float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}
__device__ inline float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}
