// Steps that the root-mean-square norms share. Anonymous namespace: see cpu/vec.h.
#pragma once
#include <cmath>

#include "cpu/vec.h"

namespace vllm_kernels::cpu {
namespace {

// Two vectors of the row from `x` on; with the residual added, rounded and stored where there is
// one.
template <bool kAdd, typename T>
inline VecPair take(const T* x, T* residual) {
  VecPair value = load_pair(x);
  if constexpr (kAdd) {
    const VecPair other = load_pair(residual);
    value = {round_to<T>(value.a + other.a), round_to<T>(value.b + other.b)};
    store_rounded_pair(residual, value);
  }
  return value;
}

template <bool kAdd, typename T>
inline Vec take_partial(const T* x, T* residual, int64_t count) {
  Vec value = load_partial(x, count);
  if constexpr (kAdd) {
    value = round_to<T>(value + load_partial(residual, count));
    store_partial(residual, value, count);
  }
  return value;
}

template <bool kAdd, typename T>
inline float mean_square(const T* x, T* residual, int64_t n) {
  Vec sums[4] = {};  // four chains hide the latency of the multiply-add
  const auto add = [&](VecPair pair, int chain) {
    sums[chain] = fma(pair.a, pair.a, sums[chain]);
    sums[chain + 1] = fma(pair.b, pair.b, sums[chain + 1]);
  };
  constexpr int64_t kPair = 2 * kLanes;
  int64_t i = 0;
  for (; i + 2 * kPair <= n; i += 2 * kPair) {
    add(take<kAdd>(x + i, residual + i), 0);
    add(take<kAdd>(x + i + kPair, residual + i + kPair), 2);
  }
  for (; i < n; i += kLanes) {
    const Vec value = take_partial<kAdd>(x + i, residual + i, n - i < kLanes ? n - i : kLanes);
    sums[0] = fma(value, value, sums[0]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(n);
}

// 1 / sqrt(mean + epsilon); 0 for a row of zeros without an epsilon.
inline float inverse_root(float mean, float epsilon) {
  const float square = mean + epsilon;
  return square == 0.0f ? 0.0f : 1.0f / std::sqrt(square);
}

}  // namespace
}  // namespace vllm_kernels::cpu
