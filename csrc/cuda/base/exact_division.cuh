// IEEE-rounded division of many values by one divisor. It is used for quotients that are quantized
// to 8 bits. A quotient that is one ulp off at a rounding tie would be stored differently than on
// the CPU.
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

// Returns value / scale, rounded to nearest, but for the sign of a zero. `inverse` is 1 / scale.
// The operands, the quotient and the remainders must be in the range of normal floats. The quotient
// from the reciprocal is corrected by its remainder twice. The first correction gives one of the
// two floats around value / scale. The second gives the nearer one (Markstein 1990, IBM J. Res.
// Dev. 34).
__device__ __forceinline__ float quotient(float value, float scale, float inverse) {
  float result = value * inverse;
  result = fmaf(fmaf(-scale, result, value), inverse, result);
  return fmaf(fmaf(-scale, result, value), inverse, result);
}

// A divisor of any magnitude, for quotients that are quantized to 8 bits. Above 2^17 and below
// 2^-100 only the sign and the order of a quotient matter.
struct Divisor {
  float scale = 1.0f;    // divisor * factor
  float inverse = 1.0f;  // 1 / scale
  float factor = 1.0f;   // a power of two that keeps the remainders in the normal range

  __device__ __forceinline__ static Divisor of(float scale) {
    Divisor result;
    const float magnitude = fabsf(scale);
    result.factor = magnitude < 0x1p-60f ? 0x1p90f : magnitude > 0x1p60f ? 0x1p-64f : 1.0f;
    result.scale = scale * result.factor;
    result.inverse = __frcp_rn(result.scale);
    return result;
  }
  __device__ __forceinline__ float divide(float x) const {
    x *= factor;
    const float first = x * inverse;  // zero, infinite or NaN exactly where the quotient is
    const float magnitude = fabsf(first);
    return magnitude > 0.0f && magnitude < 0x1p17f ? quotient(x, scale, inverse) : first;
  }
};

}  // namespace vllm_kernels::cuda
