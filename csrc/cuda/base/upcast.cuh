// Exact upcast of four 8-bit elements to two registers of fp16 pairs.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

#include "cuda/base/architecture.cuh"
#include "cuda/base/int8.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

// Writes elements 0 and 1 of `bytes` to `low`, elements 2 and 3 to `high`.
template <typename Cache>
__device__ __forceinline__ void upcast4(uint32_t bytes, uint32_t& low, uint32_t& high);

template <>
__device__ __forceinline__ void upcast4<__nv_fp8_e4m3>(uint32_t bytes, uint32_t& low,
                                                       uint32_t& high) {
#if defined(VLLM_KERNELS_HAS_FP8)
  // Unpacking by mov.b32 {a, b} needs no shift for the upper half.
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

// An e5m2 value is the upper byte of the equal fp16 value.
template <>
__device__ __forceinline__ void upcast4<__nv_fp8_e5m2>(uint32_t bytes, uint32_t& low,
                                                       uint32_t& high) {
  low = __byte_perm(bytes, 0, 0x1404);
  high = __byte_perm(bytes, 0, 0x3424);
}

// Let u be the element with its sign bit flipped, that is, the element + 128. The fp16 number
// 0x6400 | u is 1024 + u, and subtracting 1152 = 1024 + 128 gives the element.
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

template <>
__device__ __forceinline__ void upcast4<ScaledInt8>(uint32_t bytes, uint32_t& low, uint32_t& high) {
  upcast4<int8_t>(bytes, low, high);
}

// Upcasts two registers of V in 8 bits to an operand of O^T = V^T P^T. kRows: a register has 2
// tokens of 2 dimensions, else 4 tokens of one dimension.
template <typename Cache, bool kRows>
__device__ __forceinline__ void upcast_values(const uint32_t (&from)[4], int first,
                                              uint32_t (&to)[4]) {
  if constexpr (kRows) {
    // Both tokens of the even dimension, then of the odd one.
    const uint32_t low = __byte_perm(from[first], 0, 0x3120);
    const uint32_t high = __byte_perm(from[first + 1], 0, 0x3120);
    upcast4<Cache>(low, to[0], to[1]);
    upcast4<Cache>(high, to[2], to[3]);
  } else {
    upcast4<Cache>(from[first], to[0], to[2]);
    upcast4<Cache>(from[first + 1], to[1], to[3]);
  }
}

// Upcasts four bytes of int4 elements to fp16: n - 8 of each low half, and 16 (n - 8) of each high
// half. Pairs are of bytes 0 and 2, and of bytes 1 and 3: then a mask moves nothing. The fp16
// number 0x6400 | m is 1024 + m, where m is n or 16 n.
__device__ __forceinline__ void upcast_nibbles(uint32_t bytes, uint32_t& low02, uint32_t& low13,
                                               uint32_t& high02, uint32_t& high13) {
  const auto centred = [](uint32_t word, uint32_t mask, float bias) {
    uint32_t pair;  // (word & mask) | 0x64006400, for which the compiler would use two instructions
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(mask), "r"(0x64006400u));
    return bits_as<uint32_t>(__hsub2(bits_as<__half2>(pair), __float2half2_rn(bias)));
  };
  const auto low = [&](uint32_t word) { return centred(word, 0x000f000fu, 1024.0f + 8.0f); };
  const auto high = [&](uint32_t word) { return centred(word, 0x00f000f0u, 1024.0f + 128.0f); };
  low02 = low(bytes);
  high02 = high(bytes);
  low13 = low(bytes >> 8);
  high13 = high(bytes >> 8);
}
constexpr float kHighNibbleFactor = 16.0f;

// A query row as fp16, for products with an upcast 8-bit cache: the row times `factor`, a power of
// two. Scores are then multiplied by `inverse`.
struct QueryScale {
  float factor, inverse;
};
// The scale that moves the row's largest magnitude into [2^14, 2^15), so the row fits fp16 whatever
// its dtype. The exponent is clamped to [-100, 100].
__device__ __forceinline__ QueryScale query_scale(float largest) {
  const int wanted = largest > 0.0f && largest < INFINITY ? 14 - ilogbf(largest) : 0;
  const int exponent = min(max(wanted, -100), 100);
  return {exp2f(static_cast<float>(exponent)), exp2f(static_cast<float>(-exponent))};
}

}  // namespace vllm_kernels::cuda
