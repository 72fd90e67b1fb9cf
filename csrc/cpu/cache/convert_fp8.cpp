// convert_fp8: a contiguous array from a floating dtype to fp8 or back, with one scale. A task is a
// range of elements.
#include "ops/convert_fp8.h"

#include "cpu/cache/cache_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const ConvertFp8Params& p) {
  return {.count = p.count, .per_task = 8192};
}

void run(const ConvertFp8Params& p, int64_t first, int64_t last) {
  const auto convert_range = [&](auto to, auto from) {
    using To = decltype(to);
    using From = decltype(from);
    convert(static_cast<To*>(p.output) + first, static_cast<const From*>(p.input) + first,
            last - first, p.scale);
  };
  const bool quantizes = size_of(p.output_dtype) == 1;
  dispatch_float(quantizes ? p.input_dtype : p.output_dtype, [&](auto model) {
    dispatch_8_bit(quantizes ? p.output_dtype : p.input_dtype, [&](auto fp8) {
      quantizes ? convert_range(fp8, model) : convert_range(model, fp8);
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ConvertFp8Params, loop_of, run)

}  // namespace vllm_kernels::cpu
