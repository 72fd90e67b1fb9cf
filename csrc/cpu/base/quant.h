// Quantization of vectors to 8 bits, and the magnitudes for its scales. ops/quant.h has the rules.
// See vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/fp8.h"
#include "cpu/base/int8.h"
#include "ops/quant.h"

namespace vllm_kernels::cpu {
namespace {

// The larger of two magnitudes in each lane, as bits. Bits compare like values, and NaNs are
// largest.
inline VecUint larger_bits(VecUint a, VecUint b) {
#if defined(__AVX512F__)
  return (VecUint)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (VecUint)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  const VecUint larger = (VecUint)((VecInt)a > (VecInt)b);  // both below 2^31
  return (a & larger) | (b & ~larger);
#endif
}

inline VecUint magnitude_bits(Vec value) {
  return as_bits(value) & 0x7fffffffu;
}

inline float largest_magnitude(VecUint bits) {
  uint32_t lanes[kLanes], largest = 0;
  store_raw(lanes, bits);
  for (uint32_t lane : lanes) largest = lane > largest ? lane : largest;
  float result;
  std::memcpy(&result, &largest, sizeof(result));
  return result;
}

// The same of elements [begin, end), where values(i, count) loads a vector of them.
template <typename Values>
inline float largest_magnitude(int64_t begin, int64_t end, const Values& values) {
  VecUint largest = {};
  for_each_vector(begin, end, [&](int64_t i, auto count) {
    largest = larger_bits(largest, magnitude_bits(values(i, count)));
  });
  return largest_magnitude(largest);
}

template <typename Q>
constexpr DType kQuantDType = std::is_same_v<Q, Int8> ? DType::kInt8 : DType::kFp8E4M3;

struct MultiplyByInverse {
  Vec inverse;
  explicit MultiplyByInverse(float scale) : inverse(splat(1.0f / scale)) {}
  Vec operator()(Vec value) const { return value * inverse; }
};

// Gives NaNs if the scale is infinite.
struct DivideByScale {
  Vec divisor;
  explicit DivideByScale(float scale)
      : divisor(splat(scale < __builtin_inff() ? scale : __builtin_nanf(""))) {}
  Vec operator()(Vec value) const { return value / divisor; }
};

// Calls body(Q{}) with the storage type of an 8-bit result.
template <typename Body>
inline void dispatch_quant(DType dtype, Body&& body) {
  if (dtype == DType::kInt8) {
    body(Int8{});
  } else {
    body(Fp8E4M3{});
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
