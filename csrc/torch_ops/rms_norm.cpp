#include "ops/rms_norm.h"

#include "torch_ops/check.h"
#include "torch_ops/device.h"

namespace vllm_kernels {
namespace {

void rms_norm(Tensor out, Tensor input, Tensor weight, double epsilon) {
  Expect expect("rms_norm");
  Size hidden_size("hidden_size");
  const Argument x =
      expect.tensor("input", input).floating().rank(1, 8).at(-1, hidden_size).inner_contiguous();
  const Argument w =
      expect.tensor("weight", weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
  const Argument o =
      expect.tensor("out", out).same_dtype(x).same_shape(x).inner_contiguous().written();
  expect.same_or_apart(o, x);
  expect.apart(o, w);
  expect.that(epsilon >= 0, "epsilon: expected a number >= 0, got " + std::to_string(epsilon));
  if (x.numel() == 0) return;

  const RmsNormParams params{.out = o.mutable_data(),
                             .input = x.data(),
                             .weight = w.data(),
                             .out_rows = expect.rows(o),
                             .input_rows = expect.rows(x),
                             .hidden_size = hidden_size,
                             .epsilon = static_cast<float>(epsilon),
                             .dtype = x.dtype()};
  launch(params, input);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) { library.impl("rms_norm", TORCH_BOX(&vllm_kernels::rms_norm)); }
