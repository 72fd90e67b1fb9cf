#include "ops/rms_norm_gain.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
#include "cpu/norm/rms_norm_rows.h"

namespace vllm_kernels::cpu {
namespace {

template <Gain kGain, typename T>
void gain_row(T* out, const T* row, const T* weight, int64_t n, float inverse) {
  const Vec factor = splat(inverse), one = splat(1.0f);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    VecPair value = load_pair(row + i);
    value = {value.a * factor, value.b * factor};
    if constexpr (kGain == Gain::kOnePlus) {
      const VecPair w = load_pair(weight + i);
      value = {value.a * (one + w.a), value.b * (one + w.b)};
    }
    store_pair(out + i, value);
  }
  for (; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    Vec value = load_partial(row + i, count) * factor;
    if constexpr (kGain == Gain::kOnePlus) value = value * (one + load_partial(weight + i, count));
    store_partial(out + i, value, count);
  }
}

int64_t num_tasks(const RmsNormGainParams& p) {
  return ceil_div(p.norm.input_rows.count, norm_rows_per_task(p.norm));
}

void run(const RmsNormGainParams& params, int64_t begin, int64_t end) {
  const RmsNormParams& p = params.norm;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for_each_row(p, begin, end, [&](int64_t index) {
      const NormedRow<T> row(p, index);
      T* out = static_cast<T*>(p.out) + p.out_rows.offset(index);
      const T* weight = static_cast<const T*>(p.weight);
      if (params.gain == Gain::kNone) {
        gain_row<Gain::kNone>(out, row.data, weight, p.hidden_size, row.inverse);
      } else {
        gain_row<Gain::kOnePlus>(out, row.data, weight, p.hidden_size, row.inverse);
      }
    });
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::RmsNormGainParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
