// Bindings of the RMS norms with 8-bit results, [..., hidden_size], with given or computed scales.
// ops/rms_norm_quant.h and ops/quant.h have the formulas.
#include "ops/rms_norm_quant.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/quant.h"
#include "torch_ops/norm/rms_norm.h"

namespace vllm_kernels {
namespace {

// `dtypes` are those that `out` may have. `residual` may be null. scales(expect, out, arguments)
// checks and returns the scales.
template <typename Scales>
void norm(const char* op, std::initializer_list<DType> dtypes, const Tensor& out,
          const Tensor& input, const Tensor* residual, const Tensor& weight, double epsilon,
          const Scales& scales) {
  Expect expect(op);
  Size hidden_size("hidden_size");
  const Argument x =
      expect.tensor("input", input).floating().rank(1, 8).at(-1, hidden_size).inner_contiguous();
  expect_hidden_size(x, hidden_size);
  const Argument w =
      expect.tensor("weight", weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
  const Argument o =
      expect.tensor("out", out).one_of(dtypes).same_shape(x).inner_contiguous().written();
  ReadAndWritten arguments;
  arguments.read.add(x, w);
  arguments.written.add(o);
  void* residual_data = nullptr;
  Rows residual_rows;
  if (residual != nullptr) {
    const Argument r = expect.tensor("residual", *residual)
                           .same_dtype(x)
                           .same_shape(x)
                           .inner_contiguous()
                           .written();
    arguments.written.add(r);
    residual_data = r.mutable_data();
    residual_rows = expect.rows(r);
  }
  const QuantParams quant = scales(expect, o, arguments);
  arguments.apart(expect);
  expect_epsilon(expect, epsilon);
  if (x.numel() == 0) return;

  const RmsNormQuantParams params{.norm = {.out = o.mutable_data(),
                                           .input = x.data(),
                                           .residual = residual_data,
                                           .weight = w.data(),
                                           .out_rows = expect.rows(o),
                                           .input_rows = expect.rows(x),
                                           .residual_rows = residual_rows,
                                           .hidden_size = hidden_size,
                                           .epsilon = static_cast<float>(epsilon),
                                           .dtype = x.dtype()},
                                  .quant = quant,
                                  .op = op};
  launch(params, input);
}

void rms_norm_static_fp8_quant(const Tensor& out, const Tensor& input, const Tensor& weight,
                               const Tensor& scale, double epsilon) {
  norm("rms_norm_static_fp8_quant", {DType::kFp8E4M3}, out, input, nullptr, weight, epsilon,
       [&](Expect& expect, const Argument& o, ReadAndWritten& arguments) {
         return given_scale(expect, o, scale, arguments);
       });
}

void fused_add_rms_norm_static_fp8_quant(const Tensor& out, const Tensor& input,
                                         const Tensor& residual, const Tensor& weight,
                                         const Tensor& scale, double epsilon) {
  norm("fused_add_rms_norm_static_fp8_quant", {DType::kFp8E4M3}, out, input, &residual, weight,
       epsilon, [&](Expect& expect, const Argument& o, ReadAndWritten& arguments) {
         return given_scale(expect, o, scale, arguments);
       });
}

void rms_norm_dynamic_per_token_quant(const Tensor& out, const Tensor& input, const Tensor& weight,
                                      const Tensor& scales, double epsilon,
                                      const std::optional<Tensor>& scale_ub,
                                      const std::optional<Tensor>& residual) {
  norm("rms_norm_dynamic_per_token_quant", {DType::kFp8E4M3, DType::kInt8}, out, input,
       residual ? &*residual : nullptr, weight, epsilon,
       [&](Expect& expect, const Argument& o, ReadAndWritten& arguments) {
         return row_scales(expect, o, scales, scale_ub, arguments);
       });
}

void rms_norm_per_block_quant(const Tensor& out, const Tensor& input, const Tensor& weight,
                              const Tensor& scales, double epsilon,
                              const std::optional<Tensor>& scale_ub,
                              const std::optional<Tensor>& residual, int64_t group_size,
                              bool is_scale_transposed) {
  norm("rms_norm_per_block_quant", {DType::kFp8E4M3, DType::kInt8}, out, input,
       residual ? &*residual : nullptr, weight, epsilon,
       [&](Expect& expect, const Argument& o, ReadAndWritten& arguments) {
         return group_scales(expect, o, scales, scale_ub, group_size, is_scale_transposed,
                             arguments);
       });
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rms_norm_static_fp8_quant", TORCH_BOX(&vllm_kernels::rms_norm_static_fp8_quant));
  library.impl("fused_add_rms_norm_static_fp8_quant",
               TORCH_BOX(&vllm_kernels::fused_add_rms_norm_static_fp8_quant));
  library.impl("rms_norm_dynamic_per_token_quant",
               TORCH_BOX(&vllm_kernels::rms_norm_dynamic_per_token_quant));
  library.impl("rms_norm_per_block_quant", TORCH_BOX(&vllm_kernels::rms_norm_per_block_quant));
}
