#include "ops/rms_norm.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
#include "cpu/norm/rms_norm_rows.h"

namespace vllm_kernels::cpu {
namespace {

template <bool kAdd, typename T>
void norm_row(T* out, const T* x, T* residual, const T* weight, int64_t n, float epsilon) {
  const Vec scale = splat(inverse_root(mean_square<kAdd>(x, residual, n), epsilon));
  const T* row = kAdd ? residual : x;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const VecPair value = load_pair(row + i), factor = load_pair(weight + i);
    store_pair(out + i,
               {round_to<T>(value.a * scale) * factor.a, round_to<T>(value.b * scale) * factor.b});
  }
  for (; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const Vec value = round_to<T>(load_partial(row + i, count) * scale);
    store_partial(out + i, value * load_partial(weight + i, count), count);
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
        norm_row<false, T>(out, input, out, weight, p.hidden_size, p.epsilon);
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
