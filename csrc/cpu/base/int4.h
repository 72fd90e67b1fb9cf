// Pairs of 4-bit integers, as int4 caches have them (TokenScales in ops/paged_kv.h). See vec.h for
// the anonymous namespace.
#pragma once
#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

// n of value d of a row in the low 4 bits, of value d + elements of the row in the high ones.
struct Int4x2 {
  uint8_t bits;
};

constexpr int kMaxInt4Elements = 128;  // of a row

// Values that an element holds.
template <typename T>
constexpr int kValues = 1;
template <>
constexpr int kValues<Int4x2> = 2;

inline VecUint load_bits(const Int4x2* from) {
#if defined(__AVX512F__)
  return (VecUint)_mm512_cvtepu8_epi32(load_raw<__m128i>(from));
#elif defined(__AVX2__)
  return (VecUint)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load_raw<VecByte>(from), VecUint);
#endif
}

// n - 8 for n in the low 4 bits of each lane.
inline Vec int4_values(VecUint bits) {
#if defined(__AVX512F__)
  const __m512 values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return (Vec)_mm512_permutexvar_ps((__m512i)bits, values);  // ignores higher bits
#else
  return as_float((bits & 0xfu) | 0x4b000000u) - splat(0x1p23f + 8.0f);  // 2^23 + n as a float
#endif
}

// n - 8 of kLanes elements: those of the low bits, and those of the high ones.
inline VecPair load_values(const Int4x2* from) {
  const VecUint bits = load_bits(from);
  return {int4_values(bits), int4_values(bits >> 4)};
}
inline VecPair load_values(const Int4x2* from, WholeVector) {
  return load_values(from);
}
inline VecPair load_values(const Int4x2* from, int64_t count) {
  Int4x2 buffer[kLanes] = {};
  std::memcpy(buffer, from, count);
  return load_values(buffer);
}

// The values of a row of n elements, in their order. Rows are whole vectors.
inline void upcast(const Int4x2* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecPair values = load_values(from + i);
    store(to + i, values.a);
    store(to + n + i, values.b);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
