// Symmetric 8-bit integers of the cache. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/fp8.h"
#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

struct Int8 {
  int8_t bits;
};

inline Vec load(const Int8* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(from)));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  typedef int8_t VecInt8 __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load_raw<VecInt8>(from), Vec);
#endif
}

// To nearest even, saturating to [-128, 127]; a NaN is stored as 0.
inline void store(Int8* to, Vec value) {
  const VecInt is_number = value == value;
  const Vec clamped = maximum(minimum(value, splat(127.0f)), splat(-128.0f));
  // Adding 1.5 * 2^23 leaves the integer, rounded, in the lower bits.
  const VecUint bits = as_bits(clamped + splat(0x1.8p23f)) & (VecUint)is_number;
  store_bytes(to, bits & 0xffu);
}

}  // namespace
}  // namespace vllm_kernels::cpu
