#include "ops/rms_norm_gain.h"

#include "torch_ops/check.h"
#include "torch_ops/device.h"
#include "torch_ops/rms_norm.h"

namespace vllm_kernels {
namespace {

// `weight` is null where there is none.
void norm(const char* op, const Tensor& out, const Tensor& input, const Tensor* weight,
          double epsilon) {
  Expect expect(op);
  Size hidden_size("hidden_size");
  const Argument x =
      expect.tensor("input", input).floating().rank(1, 8).at(-1, hidden_size).inner_contiguous();
  expect_hidden_size(x, hidden_size);
  const Argument o =
      expect.tensor("out", out).same_dtype(x).same_shape(x).inner_contiguous().written();
  expect.same_or_apart(o, x);
  const void* weights = nullptr;
  if (weight != nullptr) {
    const Argument w =
        expect.tensor("weight", *weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
    expect.apart(o, w);
    weights = w.data();
  }
  expect_epsilon(expect, epsilon);
  if (x.numel() == 0) return;

  const RmsNormGainParams params{.norm = {.out = o.mutable_data(),
                                          .input = x.data(),
                                          .residual = nullptr,
                                          .weight = weights,
                                          .out_rows = expect.rows(o),
                                          .input_rows = expect.rows(x),
                                          .residual_rows = {},
                                          .hidden_size = hidden_size,
                                          .epsilon = static_cast<float>(epsilon),
                                          .dtype = x.dtype()},
                                 .gain = weights == nullptr ? Gain::kNone : Gain::kOnePlus,
                                 .op = op};
  launch(params, input);
}

void fused_add_norm(const char* op, const Tensor& input, const Tensor& residual,
                    const Tensor* weight, double epsilon) {
  Expect expect(op);
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
  expect.apart(x, r);
  const void* weights = nullptr;
  if (weight != nullptr) {
    const Argument w =
        expect.tensor("weight", *weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
    expect.apart(x, w);
    expect.apart(r, w);
    weights = w.data();
  }
  expect_epsilon(expect, epsilon);
  if (x.numel() == 0) return;

  const RmsNormGainParams params{.norm = {.out = x.mutable_data(),
                                          .input = x.data(),
                                          .residual = r.mutable_data(),
                                          .weight = weights,
                                          .out_rows = expect.rows(x),
                                          .input_rows = expect.rows(x),
                                          .residual_rows = expect.rows(r),
                                          .hidden_size = hidden_size,
                                          .epsilon = static_cast<float>(epsilon),
                                          .dtype = x.dtype()},
                                 .gain = weights == nullptr ? Gain::kNone : Gain::kOnePlus,
                                 .op = op};
  launch(params, input);
}

void rms_norm_weightless(const Tensor& out, const Tensor& input, double epsilon) {
  norm("rms_norm_weightless", out, input, nullptr, epsilon);
}
void fused_add_rms_norm_weightless(const Tensor& input, const Tensor& residual, double epsilon) {
  fused_add_norm("fused_add_rms_norm_weightless", input, residual, nullptr, epsilon);
}
void gemma_rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  norm("gemma_rms_norm", out, input, &weight, epsilon);
}
void gemma_fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                              double epsilon) {
  fused_add_norm("gemma_fused_add_rms_norm", input, residual, &weight, epsilon);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rms_norm_weightless", TORCH_BOX(&vllm_kernels::rms_norm_weightless));
  library.impl("fused_add_rms_norm_weightless",
               TORCH_BOX(&vllm_kernels::fused_add_rms_norm_weightless));
  library.impl("gemma_rms_norm", TORCH_BOX(&vllm_kernels::gemma_rms_norm));
  library.impl("gemma_fused_add_rms_norm", TORCH_BOX(&vllm_kernels::gemma_fused_add_rms_norm));
}
