// Binding of convert_fp8: input and output have equally many elements, in memory order. One is fp8
// (or uint8), the other floating. ops/convert_fp8.h has the formula.
#include "ops/convert_fp8.h"

#include <algorithm>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// Requires elements without gaps. Their dimensions may have any order in memory.
Argument& dense(Argument& argument) {
  if (argument.numel() == 0) return argument;
  int64_t span = 1;  // elements of the dimensions found so far
  for (int64_t found = 0; found < argument.dim() && span != argument.numel(); ++found) {
    int64_t next = 0;
    while (next < argument.dim() && (argument.size(next) <= 1 || argument.stride(next) != span)) {
      ++next;
    }
    if (next == argument.dim()) {
      argument.fail("expected elements without gaps in memory, got shape " + argument.shape_text() +
                    " with gaps; call .contiguous()");
    }
    span *= argument.size(next);
  }
  return argument;
}

// Elements are paired in memory order. With one shape, that must be the order of the indices.
void require_one_order(const Argument& output, const Argument& input) {
  if (!std::ranges::equal(output.sizes(), input.sizes())) return;
  for (int64_t d = 0; d < output.dim(); ++d) {
    if (output.size(d) <= 1 || output.stride(d) == input.stride(d)) continue;
    output.fail("expected the strides of input, which has the same shape, got stride " +
                std::to_string(output.stride(d)) + " in place of " +
                std::to_string(input.stride(d)) + " at dimension " + std::to_string(d));
  }
}

void convert_fp8(const Tensor& output, const Tensor& input, double scale, const Text& kv_dtype) {
  Expect expect("convert_fp8");
  Argument o = expect.tensor("output", output);
  Argument i = expect.tensor("input", input);
  dense(o);
  dense(i);
  expect.that(std::string_view(kv_dtype) != "auto",
              "kv_dtype: expected \"fp8\", \"fp8_e4m3\" or \"fp8_e5m2\", got \"auto\"");
  const DType eight = cache_dtype(expect, kv_dtype, DType::kFp8E4M3, "kv_dtype");
  const bool quantizes = o.element_size() == 1;
  (quantizes ? i : o).floating();
  (quantizes ? o : i).cache_dtype(eight, kv_dtype, "kv_dtype");
  if (o.numel() != i.numel()) {
    o.fail("expected as many elements as input = " + std::to_string(i.numel()) + ", got shape " +
           o.shape_text());
  }
  require_one_order(o, i);
  const float checked_scale = expect.finite_positive("scale", scale);
  expect.apart(o, i);
  if (i.numel() == 0) return;

  const DType wide = (quantizes ? i : o).dtype();
  const ConvertFp8Params params{.output = o.mutable_data(),
                                .input = i.data(),
                                .count = i.numel(),
                                .output_dtype = quantizes ? eight : wide,
                                .input_dtype = quantizes ? wide : eight,
                                .scale = checked_scale};
  launch(params, input);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("convert_fp8", TORCH_BOX(&vllm_kernels::convert_fp8));
}
