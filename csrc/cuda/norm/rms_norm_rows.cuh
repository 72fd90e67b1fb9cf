// Steps on Vecs of a row that all RMS norm kernels share.
#pragma once
#include "cuda/base/launch.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/norm/heuristics.h"
#include "ops/rms_norm.h"

namespace vllm_kernels::cuda {

// Whether a CTA prefetches its row into L2 before the PDL wait.
inline bool prefetches_early(const RmsNormParams& p) {
  const int64_t arrays = p.residual == nullptr ? 1 : 2;
  const int64_t bytes = p.input_rows.count * p.hidden_size * size_of(p.dtype) * arrays;
  return p.input_rows.count <= kPrefetchRows &&
         bytes <= kPrefetchShareOfL2 * current_device_model().l2_bytes;
}

// Prefetches `bytes` of each array into L2, one lane per array. `bytes` and the addresses are
// multiples of 16. A null array is skipped.
__device__ __forceinline__ void prefetch_row(const void* input, const void* residual,
                                             const void* weight, uint32_t bytes) {
  if (threadIdx.x >= 3) return;
  const void* array = threadIdx.x == 0 ? weight : threadIdx.x == 1 ? input : residual;
  if (array != nullptr) prefetch_l2(array, bytes);
}

template <typename T, int kWidth>
__device__ __forceinline__ float sum_of_squares(const Vec<T, kWidth>& vec) {
  float values[kWidth], square = 0.0f;
  upcast(vec, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) square += values[j] * values[j];
  return square;
}

// Returns x * inverse * weight. The normalized value is rounded to T before it is multiplied by the
// weight.
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> normed(Vec<T, kWidth> x, float inverse,
                                                 Vec<T, kWidth> weight) {
  float values[kWidth];
  upcast(x, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] *= inverse;
  return downcast<T>(values) * weight;
}

// Stops the compiler from keeping the upcast elements alive: they take twice the registers.
template <typename T>
__device__ __forceinline__ void keep_packed(Vec16<T>& vec) {
#pragma unroll
  for (uint32_t& word : vec.words) asm volatile("" : "+r"(word));
}

// Returns 1 / sqrt(square / hidden_size + epsilon), or 0 for a row of zeros with epsilon 0.
// `inverse_size` is 1 / hidden_size.
__device__ __forceinline__ float inverse_root(float square, float inverse_size, float epsilon) {
  const float mean = fmaf(square, inverse_size, epsilon);
  return mean == 0.0f ? 0.0f : rsqrtf(mean);
}

}  // namespace vllm_kernels::cuda
