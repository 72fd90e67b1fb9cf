// rms_norm_weightless and gemma_rms_norm, with and without a residual. The gain is 1 or 1 + weight.
// The result is rounded once.
//   input, residual, out [rows, hidden_size]; weight [hidden_size]
// A task is a range of rows.
#include "ops/rms_norm.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
#include "cpu/norm/rms_norm_rows.h"

namespace vllm_kernels::cpu {
namespace {

template <typename T>
void gain_row(T* out, const T* row, const T* weight, int64_t n, float inverse, Gain gain) {
  const Vec factor = splat(inverse), one = splat(1.0f);
  if (gain == Gain::kNone) {
    map_elements(out, n, [&](Vec x) { return x * factor; }, row);
  } else {
    map_elements(out, n, [&](Vec x, Vec w) { return x * factor * (one + w); }, row, weight);
  }
}

Loop loop_of(const RmsNormGainParams& p) {
  return norm_loop(p.norm);
}

void run(const RmsNormGainParams& params, int64_t first, int64_t last) {
  const RmsNormParams& p = params.norm;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t index = first; index < last; ++index) {
      const NormedRow<T> row(p, index);
      T* out = static_cast<T*>(p.out) + p.out_rows.offset(index);
      const T* weight = static_cast<const T*>(p.weight);
      gain_row(out, row.data, weight, p.hidden_size, row.inverse, params.gain);
    }
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(RmsNormGainParams, loop_of, run)

}  // namespace vllm_kernels::cpu
