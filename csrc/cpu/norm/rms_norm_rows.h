// Steps that the RMS norms share. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <cmath>

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
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
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    Vec value = load(x + i, count);
    if constexpr (kAdd) {
      value = round_to<T>(value + load(residual + i, count));
      store(residual + i, value, count);
    }
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

// rms_norm of a row: rounds before the product with the weight.
template <typename T>
inline void normalize_row(T* out, const T* row, const T* weight, int64_t n, float inverse) {
  const Vec factor = splat(inverse);
  const auto normalize = [&](Vec x, Vec w) { return round_to<T>(x * factor) * w; };
  map_elements(out, n, normalize, row, weight);
}

// A task of a norm is a range of rows.
inline Loop norm_loop(const RmsNormParams& p) {
  const int64_t passes = p.residual == nullptr ? 2 : 4;
  return {.count = p.input_rows.count,
          .per_task = rows_per_task(passes * p.hidden_size * size_of(p.dtype))};
}

}  // namespace
}  // namespace vllm_kernels::cpu
