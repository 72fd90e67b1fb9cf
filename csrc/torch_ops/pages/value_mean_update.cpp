// Binding of value_mean_update: mean [num_rows, num_kv_heads, head_size] and counts [num_rows] of
// the rows that value's tokens belong to. ops/pages/value_mean_update.h has the formula.
#include "ops/pages/value_mean_update.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"

namespace vllm_kernels {
namespace {

void value_mean_update(const Tensor& mean, const Tensor& counts, const Tensor& value,
                       const Tensor& rows) {
  Expect expect("value_mean_update");
  Size num_rows("num_rows"), num_tokens("num_tokens");
  Size num_kv_heads("num_kv_heads"), head_size("head_size");
  const Argument m = expect.tensor("mean", mean)
                         .float32()
                         .shape({&num_rows, &num_kv_heads, &head_size})
                         .contiguous()
                         .written();
  const Argument c =
      expect.tensor("counts", counts).int32().shape({&num_rows}).contiguous().written();
  const Argument v = expect.tensor("value", value)
                         .floating()
                         .shape({&num_tokens, &num_kv_heads, &head_size})
                         .inner_contiguous();
  const Argument r = expect.tensor("rows", rows).int64().shape({&num_tokens}).contiguous();
  expect.apart({m, c}, {v, r});
  const ValueMeanUpdateParams params{.mean = m.as<float>(),
                                     .counts = c.as<int32_t>(),
                                     .value = v.data(),
                                     .token_stride = v.stride(0),
                                     .head_stride = v.stride(1),
                                     .rows = r.as<const int64_t>(),
                                     .num_rows = int32_size(m, "num_rows", num_rows),
                                     .num_tokens = int32_size(v, "num_tokens", num_tokens),
                                     .num_kv_heads = int32_size(m, "num_kv_heads", num_kv_heads),
                                     .head_size = int32_size(m, "head_size", head_size),
                                     .dtype = v.dtype()};
  if (m.numel() == 0 || num_tokens == 0) return;
  check_index(expect, r, {.noun = "a row", .high = num_rows, .skip = true});
  launch(params, mean);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("value_mean_update", TORCH_BOX(&vllm_kernels::value_mean_update));
}
