// Symmetric 8-bit integers of the cache. See cpu/vec.h for the anonymous namespace.
#pragma once
#include "cpu/vec.h"

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

}  // namespace
}  // namespace vllm_kernels::cpu
