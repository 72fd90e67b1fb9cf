// bfloat16 on the host, for the emulator.
#pragma once
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(uint32_t{x.bits} << 16);
}
// Round to nearest, ties to even; NaN stays NaN.
inline __nv_bfloat16 __float2bfloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
