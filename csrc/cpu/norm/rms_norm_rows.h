// Steps that the root-mean-square norms share. Anonymous namespace: see cpu/base/vec.h.
#pragma once
#include <cmath>

#include "cpu/base/dispatch.h"
#include "cpu/base/vec.h"
#include "ops/rms_norm.h"

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

// A row to be normed, its residual added and stored where there is one; data * inverse is
// normalised.
template <typename T>
struct NormedRow {
  const T* data;
  float inverse;

  NormedRow(const RmsNormParams& p, int64_t row) {
    const T* input = static_cast<const T*>(p.input) + p.input_rows.offset(row);
    float mean;
    if (p.residual == nullptr) {
      mean = mean_square<false, T>(input, nullptr, p.hidden_size);
      data = input;
    } else {
      T* residual = static_cast<T*>(p.residual) + p.residual_rows.offset(row);
      mean = mean_square<true, T>(input, residual, p.hidden_size);
      data = residual;
    }
    inverse = inverse_root(mean, p.epsilon);
  }
};

inline int64_t norm_rows_per_task(const RmsNormParams& p) {
  const int64_t passes = p.residual == nullptr ? 2 : 4;
  return rows_per_task(passes * p.hidden_size * size_of(p.dtype));
}

// Calls body(row) for the rows of tasks [begin, end).
template <typename Body>
inline void for_each_row(const RmsNormParams& p, int64_t begin, int64_t end, Body&& body) {
  const int64_t chunk = norm_rows_per_task(p);
  const int64_t last = end * chunk < p.input_rows.count ? end * chunk : p.input_rows.count;
  for (int64_t row = begin * chunk; row < last; ++row) body(row);
}

}  // namespace
}  // namespace vllm_kernels::cpu
