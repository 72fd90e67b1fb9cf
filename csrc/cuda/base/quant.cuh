// Quantization of Vecs to 8 bits, and the magnitudes from which scales are computed. ops/quant.h
// defines the rules.
#pragma once
#include <type_traits>

#include "cuda/base/exact_division.cuh"
#include "cuda/base/fp8.cuh"
#include "cuda/base/int8.cuh"
#include "cuda/base/reduce.cuh"
#include "cuda/base/vec.cuh"
#include "ops/quant.h"

namespace vllm_kernels::cuda {

template <typename Q>
constexpr DType kQuantDType = std::is_same_v<Q, int8_t> ? DType::kInt8 : DType::kFp8E4M3;

// Returns the largest magnitude of a Vec, as the bits of a float. Bits of non-negative floats
// compare like their values, and a NaN compares above all numbers.
template <typename T, int kWidth>
__device__ __forceinline__ uint32_t magnitude_bits(const Vec<T, kWidth>& vec) {
  static_assert(Vec<T, kWidth>::kBytes % 4 == 0);
  uint32_t largest = 0;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (uint32_t word : vec.words) largest = max(largest, word & 0x7fffffffu);
    return largest;
  } else {
#pragma unroll
    for (uint32_t word : vec.words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
    largest = max(largest & 0xffffu, largest >> 16);
    return __float_as_uint(to_float(bits_as<T>(static_cast<uint16_t>(largest))));
  }
}

template <int kWidth>
__device__ __forceinline__ uint32_t magnitude_bits(const float (&values)[kWidth]) {
  uint32_t largest = 0;
#pragma unroll
  for (float value : values) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
  return largest;
}

template <typename Q, int kWidth>
__device__ __forceinline__ Vec<Q, kWidth> quantize8(const float (&values)[kWidth]) {
  static_assert(kWidth % 4 == 0);
  Vec<Q, kWidth> vec;
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {
    const float* v = values + 4 * i;
    if constexpr (std::is_same_v<Q, int8_t>) {
      vec.words[i] = quantize4_int8(v[0], v[1], v[2], v[3]);
    } else {
      vec.words[i] = quantize2<Q>(v[0], v[1]) | static_cast<uint32_t>(quantize2<Q>(v[2], v[3]))
                                                    << 16;
    }
  }
  return vec;
}

// Quantizes value * (1 / scale).
template <typename Q>
struct MultiplyByInverse {
  float inverse;

  __device__ __forceinline__ static MultiplyByInverse of(float scale) { return {__frcp_rn(scale)}; }
  template <int kWidth>
  __device__ __forceinline__ Vec<Q, kWidth> quantized(float (&values)[kWidth]) const {
#pragma unroll
    for (float& value : values) value *= inverse;
    return quantize8<Q>(values);
  }
};

// Quantizes value / scale with IEEE rounding, for |value| <= `magnitude`. An infinite scale gives
// NaNs.
template <typename Q>
struct DivideByScale {
  float scale, inverse;
  bool saturates;  // some values may be far outside the 8-bit range

  __device__ __forceinline__ static DivideByScale of(float scale, float magnitude) {
    const float inverse = __frcp_rn(scale);
    return {scale, inverse, magnitude * inverse > 512.0f};
  }
  template <int kWidth>
  __device__ __forceinline__ Vec<Q, kWidth> quantized(float (&values)[kWidth]) const {
    if (saturates) {  // keeps the quotient finite
      const float limit = 512.0f * scale;
#pragma unroll
      for (float& value : values) value = at_least(at_most(value, limit), -limit);
    }
#pragma unroll
    for (float& value : values) {
      value = copysignf(quotient(value, scale, inverse), value);  // -0 stays -0
    }
    return quantize8<Q>(values);
  }
};

// A scale computed from the largest magnitude, and its quantizer. As in vLLM, e4m3 divides by the
// scale and int8 multiplies by its inverse.
template <typename Q>
struct ComputedScale {
  float scale;
  std::conditional_t<std::is_same_v<Q, int8_t>, MultiplyByInverse<Q>, DivideByScale<Q>> quantizer;

  __device__ __forceinline__ static ComputedScale of(float magnitude, float upper_bound) {
    constexpr DType kDType = kQuantDType<Q>;
    const float scale = at_least(__fdiv_rn(at_most(magnitude, upper_bound), largest_of(kDType)),
                                 min_scale_of(kDType));
    if constexpr (std::is_same_v<Q, int8_t>) {
      return {scale, MultiplyByInverse<Q>::of(scale)};
    } else {
      return {scale, DivideByScale<Q>::of(scale, magnitude)};
    }
  }
};

}  // namespace vllm_kernels::cuda
