// Binding of convert_fp8: input and output are contiguous, with equally many elements. One is fp8
// (or uint8), the other floating. ops/convert_fp8.h has the formula.
#include "ops/convert_fp8.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

void convert_fp8(const Tensor& output, const Tensor& input, double scale, const Text& kv_dtype) {
  Expect expect("convert_fp8");
  Argument o = expect.tensor("output", output).contiguous().written();
  Argument i = expect.tensor("input", input).contiguous();
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
