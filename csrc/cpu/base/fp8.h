// 8-bit floats. e4m3 has 4 exponent bits, a largest value of 448 and no infinity. e5m2 has 5
// exponent bits and a largest finite value of 57344. Stores round to nearest even, saturate to the
// largest finite value, and write NaN as 0x7f. Loads are exact. See vec.h for the anonymous
// namespace.
#pragma once
#include <cstdint>

#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

// --- load: through fp16, whose exponent range covers both types ---------------------------------

// Bytes, sign-extended to 16 bits.
inline VecHalfBits upcast_bytes(const void* from) {
#if defined(__AVX512F__)
  return (VecHalfBits)_mm256_cvtepi8_epi16(load_raw<__m128i>(from));
#elif defined(__AVX2__)
  return (VecHalfBits)_mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
  typedef int8_t VecSignedByte __attribute__((vector_size(kLanes)));
  typedef int16_t VecShort __attribute__((vector_size(2 * kLanes)));
  return (VecHalfBits) __builtin_convertvector(load_raw<VecSignedByte>(from), VecShort);
#endif
}

// Sign-extended bytes of T as fp16 bits, which must be multiplied with kHalfScale. e5m2 is the
// upper byte of an fp16. Read as fp16 with one more exponent bit, e4m3 is too small by 2^(15 - 7),
// denormals included; 0x7f is a NaN.
template <typename T, typename HalfBits>
inline HalfBits to_half_bits(HalfBits bytes) {
  if constexpr (std::is_same_v<T, Fp8E5M2>) return bytes << 8;
  // The sign fills the upper byte, so one shift places sign, exponent and mantissa.
  const HalfBits bits = (bytes << 7) & 0xbf80;
  return bits | (HalfBits)((bits | 0x8000) == 0xbf80);
}
template <typename T>
constexpr float kHalfScale = std::is_same_v<T, Fp8E4M3> ? 256.0f : 1.0f;

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

template <typename T>
inline Vec load_unscaled(const T* from) {
  return load_half_bits(to_half_bits<T>(upcast_bytes(from)));
}
inline Vec load(const Fp8E5M2* from) {
  return load_unscaled(from);
}
inline Vec load(const Fp8E4M3* from) {
  return load_unscaled(from) * kHalfScale<Fp8E4M3>;
}

// --- store: float -> 8 bits ----------------------------------------------------------------------

// `mantissa` and `bias` describe the 8-bit type. `largest` is its largest finite value.
template <int mantissa, int bias>
inline VecUint quantize_bits(Vec value, float largest) {
  constexpr int kShift = 23 - mantissa;                      // mantissa bits to drop
  constexpr uint32_t kSmallestNormal = (128u - bias) << 23;  // 2^(1 - bias), as a float's bits
  // A float whose last bit is the type's smallest denormal, 2^(1 - bias - mantissa).
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
  store_bytes(to, quantize_bits<3, 7>(value, 448.0f));
}
inline void store(Fp8E5M2* to, Vec value) {
  store_bytes(to, quantize_bits<2, 15>(value, 57344.0f));
}

}  // namespace
}  // namespace vllm_kernels::cpu
