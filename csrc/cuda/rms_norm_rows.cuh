// Steps that the root-mean-square norms share, on packs of a row's elements.
#pragma once
#include "cuda/pack.cuh"

namespace vllm_kernels::cuda {

template <typename T, int kWidth>
__device__ __forceinline__ float sum_of_squares(const Pack<T, kWidth>& pack) {
  float values[kWidth], square = 0.0f;
  widen(pack, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) square += values[j] * values[j];
  return square;
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> added(const Pack<T, kWidth>& a,
                                                 const Pack<T, kWidth>& b) {
  float sums[kWidth], others[kWidth];
  widen(a, sums);
  widen(b, others);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sums[j] += others[j];
  return narrow<T>(sums);
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> normed(const Pack<T, kWidth>& x, float inverse,
                                                  const Pack<T, kWidth>& weight) {
  float values[kWidth], weights[kWidth];
  widen(x, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] *= inverse;
  widen(narrow<T>(values), values);
  widen(weight, weights);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] *= weights[j];
  return narrow<T>(values);
}

// Stops the compiler from holding on to the elements' float copies, which take twice the registers.
template <typename T>
__device__ __forceinline__ void keep_packed(Pack16<T>& pack) {
#pragma unroll
  for (uint32_t& word : pack.words) asm volatile("" : "+r"(word));
}

// 0 for a row of zeros without an epsilon.
template <typename Params>
__device__ __forceinline__ float inverse_root(const Params& p, float square) {
  const float mean = square / static_cast<float>(p.hidden_size) + p.epsilon;
  return mean == 0.0f ? 0.0f : rsqrtf(mean);
}

}  // namespace vllm_kernels::cuda
