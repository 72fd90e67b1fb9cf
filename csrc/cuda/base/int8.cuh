// Symmetric int8 elements of the KV cache. Quantizing rounds to nearest even and saturates to
// [-128, 127]; a NaN becomes 0.
#pragma once
#include <cstdint>

#include "cuda/base/types.cuh"

namespace vllm_kernels::cuda {

// The element of an int8 cache with a scale a token and KV head (TokenScales in ops/paged_kv.h),
// where kernels have instantiations of their own for it.
struct ScaledInt8 {
  int8_t bits;
};

template <>
__device__ __forceinline__ int8_t from_float<int8_t>(float x) {
  int32_t result;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(result) : "f"(x));
  return static_cast<int8_t>(result);
}

__device__ __forceinline__ float to_float(int8_t x) {
  return static_cast<float>(x);
}

// Saturates four integers to four bytes; `a` is element 0.
__device__ __forceinline__ uint32_t saturate4_int8(int32_t a, int32_t b, int32_t c, int32_t d) {
  uint32_t high, bytes;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(d), "r"(c));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(b), "r"(a), "r"(high));
  return bytes;
}

// Quantizes four floats to four bytes; `a` is element 0.
__device__ __forceinline__ uint32_t quantize4_int8(float a, float b, float c, float d) {
  return saturate4_int8(__float2int_rn(a), __float2int_rn(b), __float2int_rn(c), __float2int_rn(d));
}

// Rounds four floats in int8's range to the nearest integers and packs their low bytes. It adds
// 1.5 * 2^23 instead of converting: an SM has a quarter of the throughput for conversions.
__device__ __forceinline__ uint32_t low_bytes4(float a, float b, float c, float d) {
  const auto nearest = [](float x) { return __float_as_uint(x + 0x1.8p23f); };
  const uint32_t low = __byte_perm(nearest(a), nearest(b), 0x0040);
  const uint32_t high = __byte_perm(nearest(c), nearest(d), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

}  // namespace vllm_kernels::cuda
