#include "ops/rms_norm.h"

#include "torch_ops/check.h"
#include "torch_ops/device.h"
#include "torch_ops/rms_norm.h"

namespace vllm_kernels {
namespace {

void rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  Expect expect("rms_norm");
  Size hidden_size("hidden_size");
  const Argument x =
      expect.tensor("input", input).floating().rank(1, 8).at(-1, hidden_size).inner_contiguous();
  expect_hidden_size(x, hidden_size);
  const Argument w =
      expect.tensor("weight", weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
  const Argument o =
      expect.tensor("out", out).same_dtype(x).same_shape(x).inner_contiguous().written();
  expect.same_or_apart(o, x);
  expect.apart(o, w);
  expect_epsilon(expect, epsilon);
  if (x.numel() == 0) return;

  const RmsNormParams params{.out = o.mutable_data(),
                             .input = x.data(),
                             .residual = nullptr,
                             .weight = w.data(),
                             .out_rows = expect.rows(o),
                             .input_rows = expect.rows(x),
                             .residual_rows = {},
                             .hidden_size = hidden_size,
                             .epsilon = static_cast<float>(epsilon),
                             .dtype = x.dtype()};
  launch(params, input);
}

void fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                        double epsilon) {
  Expect expect("fused_add_rms_norm");
  Size hidden_size("hidden_size");
  const Argument x = expect.tensor("input", input)
                         .floating()
                         .rank(1, 8)
                         .at(-1, hidden_size)
                         .inner_contiguous()
                         .written();
  expect_hidden_size(x, hidden_size);
  const Argument r =
      expect.tensor("residual", residual).same_dtype(x).same_shape(x).inner_contiguous().written();
  const Argument w =
      expect.tensor("weight", weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
  expect.apart(x, r);
  expect.apart(x, w);
  expect.apart(r, w);
  expect_epsilon(expect, epsilon);
  if (x.numel() == 0) return;

  const RmsNormParams params{.out = x.mutable_data(),
                             .input = x.data(),
                             .residual = r.mutable_data(),
                             .weight = w.data(),
                             .out_rows = expect.rows(x),
                             .input_rows = expect.rows(x),
                             .residual_rows = expect.rows(r),
                             .hidden_size = hidden_size,
                             .epsilon = static_cast<float>(epsilon),
                             .dtype = x.dtype()};
  launch(params, input);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rms_norm", TORCH_BOX(&vllm_kernels::rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&vllm_kernels::fused_add_rms_norm));
}
