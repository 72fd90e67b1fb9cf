// An int8 or int4 cache with a scale a token and KV head, in the kernels that multiply the stored
// integers:
//   score t  = (q . stored key t) * key_scale[t], before softcap and mask
//   row_sum += exp2(score t - row_max)
//   out     += exp2(score t - row_max) * value_scale[t] * (stored value t)
// The factor of a stored value is an operand in fp16, and value scales may have any size. So
// row_max bounds the scores plus log2 of their value scale: then the factors are at most
// 2^kRescaleThreshold, and small only where the token contributes little. row_sum, in float32, is
// relative to the same row_max.
//
// int4: the stored integers are n - 8. Zeros stay outside of the products, in float32:
//   score t  += (sum of q) * key_zero[t]
//   zero_sum += exp2(score t - row_max) * value_zero[t]      added to all dimensions of out
// So that zero_sum stays finite, row_max also bounds the scores plus log2 of the zero / 256. A
// scale that is far smaller than its zero may then become small in fp16.
#pragma once
#include <type_traits>

#include "cuda/base/int4.cuh"
#include "cuda/base/int8.cuh"
#include "cuda/base/ptx.cuh"

namespace vllm_kernels::cuda {

template <typename Cache>
constexpr bool kHasZeros = std::is_same_v<Cache, ScaledInt4>;
template <typename Cache>
constexpr bool kHasTokenScales = std::is_same_v<Cache, ScaledInt8> || kHasZeros<Cache>;
// Arrays of scales and zeros of a stage (token_scale_bytes() in kernel_choice.h).
template <typename Cache>
constexpr int kScaleArrays = kHasZeros<Cache>         ? 4
                             : kHasTokenScales<Cache> ? 2
                                                      : 0;

// log2 of a value scale's magnitude. The bounds keep row_sum within float32: a weight is at most
// 2^(96 + kRescaleThreshold), and few are too small. NaN counts as small.
__device__ __forceinline__ float scale_exponent(float value_scale) {
  return __log2f(fminf(fmaxf(fabsf(value_scale), 0x1p-96f), 0x1p64f));
}
constexpr float kMaxScaledWeight = 0x1p104f;

// The scales, or the zeros, of a lane's two tokens (of score elements 0, 1 and 2, 3) in a group
// of 16.
struct PairScales {
  float key[2];
  float value[2];

  __device__ __forceinline__ float exponent(int i) const { return scale_exponent(value[i]); }
  __device__ __forceinline__ float exponent(int i, const PairScales& zeros) const {
    return scale_exponent(fmaxf(fabsf(value[i]), fabsf(zeros.value[i]) * 0x1p-8f));
  }
  // Shared addresses of both tokens' scales.
  __device__ __forceinline__ void load_keys(uint32_t first, uint32_t second) {
    key[0] = load_shared<float>(first);
    key[1] = load_shared<float>(second);
  }
  __device__ __forceinline__ void load_values(uint32_t first, uint32_t second) {
    value[0] = load_shared<float>(first);
    value[1] = load_shared<float>(second);
  }
};

}  // namespace vllm_kernels::cuda
