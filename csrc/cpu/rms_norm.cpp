#include "ops/rms_norm.h"

#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// The row's elements i .. i + kLanes, the residual added, rounded and stored where there is one.
template <bool kAdd, typename T>
Vec take(const T* x, T* residual, int64_t i) {
  Vec value = load(x + i);
  if constexpr (kAdd) {
    value = round_to<T>(value + load(residual + i));
    store(residual + i, value);
  }
  return value;
}

template <bool kAdd, typename T>
Vec take_partial(const T* x, T* residual, int64_t i, int64_t count) {
  Vec value = load_partial(x + i, count);
  if constexpr (kAdd) {
    value = round_to<T>(value + load_partial(residual + i, count));
    store_partial(residual + i, value, count);
  }
  return value;
}

template <bool kAdd, typename T>
float mean_square(const T* x, T* residual, int64_t n) {
  Vec sums[4] = {};  // four chains hide the latency of the multiply-add
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vec value = take<kAdd>(x, residual, i + j * kLanes);
      sums[j] = fma(value, value, sums[j]);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const Vec value = take<kAdd>(x, residual, i);
    sums[0] = fma(value, value, sums[0]);
  }
  if (i < n) {
    const Vec value = take_partial<kAdd>(x, residual, i, n - i);
    sums[1] = fma(value, value, sums[1]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(n);
}

template <bool kAdd, typename T>
void norm_row(T* out, const T* x, T* residual, const T* weight, int64_t n, float epsilon) {
  const Vec scale = splat(1.0f / std::sqrt(mean_square<kAdd>(x, residual, n) + epsilon));
  const T* row = kAdd ? residual : x;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, round_to<T>(load(row + i) * scale) * load(weight + i));
  }
  if (i < n) {
    const Vec value = round_to<T>(load_partial(row + i, n - i) * scale);
    store_partial(out + i, value * load_partial(weight + i, n - i), n - i);
  }
}

int64_t rows_per_task(const RmsNormParams& p) {
  const int64_t passes = p.residual == nullptr ? 2 : 4;
  return cpu::rows_per_task(passes * p.hidden_size * size_of(p.dtype));
}

int64_t num_tasks(const RmsNormParams& p) {
  return ceil_div(p.input_rows.count, rows_per_task(p));
}

void run(const RmsNormParams& p, int64_t begin, int64_t end) {
  const int64_t chunk = rows_per_task(p);
  const int64_t last = end * chunk < p.input_rows.count ? end * chunk : p.input_rows.count;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t row = begin * chunk; row < last; ++row) {
      T* out = static_cast<T*>(p.out) + p.out_rows.offset(row);
      const T* input = static_cast<const T*>(p.input) + p.input_rows.offset(row);
      const T* weight = static_cast<const T*>(p.weight);
      if (p.residual == nullptr) {
        norm_row<false, T>(out, input, nullptr, weight, p.hidden_size, p.epsilon);
      } else {
        T* residual = static_cast<T*>(p.residual) + p.residual_rows.offset(row);
        norm_row<true, T>(out, input, residual, weight, p.hidden_size, p.epsilon);
      }
    }
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::RmsNormParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
