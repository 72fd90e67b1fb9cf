// 8-bit floats of the cache: e4m3 (4 exponent bits, largest 448, no infinity) and e5m2 (5 exponent
// bits, largest finite 57344). Stores round to nearest even and saturate to the largest finite
// value; a NaN is stored as 0x7f. Loads are exact.
#pragma once
#include <cstdint>

#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

// --- load: by way of fp16, whose exponent field takes either type -------------------------------

inline VecHalfBits widen_bytes(const void* from) {
#if defined(__AVX512F__)
  return (VecHalfBits)_mm256_cvtepu8_epi16(load_raw<__m128i>(from));
#elif defined(__AVX2__)
  return (VecHalfBits)_mm_cvtepu8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load_raw<VecByte>(from), VecHalfBits);
#endif
}

inline Vec load_half_bits(VecHalfBits bits) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps((__m128i)bits);
#else
  Half buffer[kLanes];
  store_raw(buffer, bits);
  return load(buffer);
#endif
}

// e5m2 is the upper byte of an fp16.
inline Vec load(const Fp8E5M2* from) {
  return load_half_bits(widen_bytes(from) << 8);
}

// e4m3 read as an fp16 with a zero on top of its exponent is too small by 2^(15 - 7), denormals
// included; 0x7f, where infinity would be, is a NaN.
inline Vec load(const Fp8E4M3* from) {
  const VecHalfBits bytes = widen_bytes(from);
  const VecHalfBits magnitude = (bytes & 0x7f) << 7;
  const VecHalfBits is_nan = (VecHalfBits)(magnitude == 0x3f80);
  const VecHalfBits sign = (bytes & 0x80) << 8;
  return load_half_bits(magnitude | sign | (is_nan & 0x7c00)) * 256.0f;
}

// --- store: float -> 8 bits ----------------------------------------------------------------------

// `mantissa` and `bias` describe the 8-bit type, `largest` is its largest finite value.
template <int mantissa, int bias>
inline VecUint narrow(Vec value, float largest) {
  constexpr int kShift = 23 - mantissa;                      // mantissa bits that go
  constexpr uint32_t kSmallestNormal = (128u - bias) << 23;  // 2^(1 - bias), as a float's bits
  // A float whose last bit is worth the type's smallest denormal, 2^(1 - bias - mantissa).
  constexpr uint32_t kAlign = (128u - bias - mantissa + 23) << 23;
  const VecUint bits = as_bits(value);
  const VecUint sign = (bits >> 24) & 0x80u;
  const VecUint is_nan = (VecUint)(value != value);
  const VecUint magnitude = as_bits(minimum(as_float(bits & 0x7fffffffu), splat(largest)));
  const VecUint rebias = magnitude - (static_cast<uint32_t>(127 - bias) << 23);
  const VecUint normal =
      (rebias + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1u)) >> kShift;
  const VecUint aligned = VecUint{} + kAlign;
  const VecUint denormal = as_bits(as_float(magnitude) + as_float(aligned)) - aligned;
  const VecUint is_denormal = (VecUint)(magnitude < kSmallestNormal);
  const VecUint chosen = (denormal & is_denormal) | (normal & ~is_denormal) | sign;
  return (0x7fu & is_nan) | (chosen & ~is_nan);
}

inline void store_bytes(void* to, VecUint bytes) {
#if defined(__AVX512F__)
  store_raw(to, _mm512_cvtepi32_epi8((__m512i)bytes));
#elif defined(__AVX2__)
  const __m256i words = _mm256_packus_epi32((__m256i)bytes, (__m256i)bytes);
  const __m256i packed = _mm256_packus_epi16(words, words);  // bytes 0..3 in each half
  const __m128i low = _mm256_castsi256_si128(packed);
  _mm_storel_epi64(static_cast<__m128i*>(to),
                   _mm_unpacklo_epi32(low, _mm256_extracti128_si256(packed, 1)));
#else
  store_raw(to, __builtin_convertvector(bytes, VecByte));
#endif
}

inline void store(Fp8E4M3* to, Vec value) {
  store_bytes(to, narrow<3, 7>(value, 448.0f));
}
inline void store(Fp8E5M2* to, Vec value) {
  store_bytes(to, narrow<2, 15>(value, 57344.0f));
}

}  // namespace
}  // namespace vllm_kernels::cpu
