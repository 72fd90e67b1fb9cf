// rms_norm and fused_add_rms_norm: out = x / sqrt(mean(x^2) + epsilon) * weight. With a residual, x
// is first added to it.
//   input, residual, out [rows, hidden_size]; weight [hidden_size]
// A task is a range of rows. A row is read twice: for its mean square, then for the result.
#include "ops/rms_norm.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
#include "cpu/norm/rms_norm_rows.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const RmsNormParams& p) {
  return norm_loop(p);
}

void run(const RmsNormParams& p, int64_t first, int64_t last) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t index = first; index < last; ++index) {
      const NormedRow<T> row(p, index);
      T* out = static_cast<T*>(p.out) + p.out_rows.offset(index);
      normalize_row(out, row.data, static_cast<const T*>(p.weight), p.hidden_size, row.inverse);
    }
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(RmsNormParams, loop_of, run)

}  // namespace vllm_kernels::cpu
