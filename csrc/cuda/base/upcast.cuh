// Four 8-bit elements as two registers of fp16 pairs, exactly.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

#include "cuda/base/architecture.cuh"

namespace vllm_kernels::cuda {

// `low` gets elements 0 and 1 of `bytes`, `high` elements 2 and 3.
template <typename Cache>
__device__ __forceinline__ void upcast4(uint32_t bytes, uint32_t& low, uint32_t& high);

template <>
__device__ __forceinline__ void upcast4<__nv_fp8_e4m3>(uint32_t bytes, uint32_t& low,
                                                       uint32_t& high) {
#if defined(VLLM_KERNELS_HAS_FP8)
  // In this form no shift is needed for the upper half.
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  const __half2_raw a =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3);
  const __half2_raw b =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes >> 16), __NV_E4M3);
  low = a.x | static_cast<uint32_t>(a.y) << 16;
  high = b.x | static_cast<uint32_t>(b.y) << 16;
#endif
}

// e5m2 is the upper byte of an fp16.
template <>
__device__ __forceinline__ void upcast4<__nv_fp8_e5m2>(uint32_t bytes, uint32_t& low,
                                                       uint32_t& high) {
  low = __byte_perm(bytes, 0, 0x1404);
  high = __byte_perm(bytes, 0, 0x3424);
}

// 1024 + u has u in its low byte, and 1152 - 128 is 1024: u is the element with its sign flipped.
template <>
__device__ __forceinline__ void upcast4<int8_t>(uint32_t bytes, uint32_t& low, uint32_t& high) {
  bytes ^= 0x80808080u;
  const auto centred = [](uint32_t pair) {
    const __half2 bias = __floats2half2_rn(1152.0f, 1152.0f);
    __half2 value;
    memcpy(&value, &pair, sizeof(value));
    value = __hsub2(value, bias);
    memcpy(&pair, &value, sizeof(value));
    return pair;
  };
  low = centred(__byte_perm(bytes, 0x64646464u, 0x4140));
  high = centred(__byte_perm(bytes, 0x64646464u, 0x4342));
}

// The power of two that brings a row's largest element to [2^14, 2^15), in reach of fp16 whatever
// the row's dtype.
__device__ __forceinline__ int power_for_half(float largest) {
  const int exponent = largest > 0.0f && largest < INFINITY ? 14 - ilogbf(largest) : 0;
  return min(max(exponent, -100), 100);
}

}  // namespace vllm_kernels::cuda
