// Steps that the RMS norms share. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <cmath>

#include "cpu/base/dispatch.h"
#include "cpu/base/vec.h"
#include "ops/rms_norm.h"

namespace vllm_kernels::cpu {
namespace {

// Loads two vectors of a row. If kAdd, adds them to the residual, rounds and stores that.
template <bool kAdd, typename T>
inline VecPair load_row(const T* x, T* residual) {
  VecPair value = load_pair(x);
  if constexpr (kAdd) {
    const VecPair other = load_pair(residual);
    value = {round_to<T>(value.a + other.a), round_to<T>(value.b + other.b)};
    store_rounded_pair(residual, value);
  }
  return value;
}

template <bool kAdd, typename T>
inline Vec load_row_partial(const T* x, T* residual, int64_t count) {
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
    add(load_row<kAdd>(x + i, residual + i), 0);
    add(load_row<kAdd>(x + i + kPair, residual + i + kPair), 2);
  }
  for (; i < n; i += kLanes) {
    const Vec value = load_row_partial<kAdd>(x + i, residual + i, n - i < kLanes ? n - i : kLanes);
    sums[0] = fma(value, value, sums[0]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(n);
}

// 1 / sqrt(mean + epsilon), or 0 if that root is 0.
inline float inverse_root(float mean, float epsilon) {
  const float square = mean + epsilon;
  return square == 0.0f ? 0.0f : 1.0f / std::sqrt(square);
}

// A row to be normalized: data * inverse. The constructor adds and stores the residual, if any.
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
  const int64_t step = norm_rows_per_task(p);
  const int64_t last = end * step < p.input_rows.count ? end * step : p.input_rows.count;
  for (int64_t row = begin * step; row < last; ++row) body(row);
}

}  // namespace
}  // namespace vllm_kernels::cpu
