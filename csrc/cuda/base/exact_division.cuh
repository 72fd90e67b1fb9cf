// Division as IEEE rounds it, by a number that many are divided by: 8-bit values have so few steps
// that a quotient one unit off at a tie would be stored differently from the CPU's.
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

// value / scale (but for the sign of a zero), inverse = 1 / scale, where neither they nor the
// remainders leave the range of normal floats. The quotient from the reciprocal is corrected by its
// remainder twice: the first makes it one of the two floats around value / scale, the second the
// nearer one (Markstein 1990, IBM J. Res. Dev. 34).
__device__ __forceinline__ float quotient(float value, float scale, float inverse) {
  float result = value * inverse;
  result = fmaf(fmaf(-scale, result, value), inverse, result);
  return fmaf(fmaf(-scale, result, value), inverse, result);
}

// By any number, for quotients that are stored in 8 bits: beyond 2^17 and below 2^-100 only their
// sign and order count.
struct Divisor {
  float scale = 1.0f;    // times the factor
  float inverse = 1.0f;  // of that
  float factor = 1.0f;   // a power of two that keeps remainders in range

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
    const float first = x * inverse;  // zero, infinite and NaN where the quotient is
    const float magnitude = fabsf(first);
    return magnitude > 0.0f && magnitude < 0x1p17f ? quotient(x, scale, inverse) : first;
  }
};

}  // namespace vllm_kernels::cuda
