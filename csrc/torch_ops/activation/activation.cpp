// Bindings of the activations of one tensor: silu_and_mul, mul_and_silu, gelu_and_mul,
// gelu_tanh_and_mul [..., 2 d] -> [..., d]; gelu_new, gelu_fast, gelu_quick [..., d] -> [..., d].
// ops/activation.h has the formulas.
#include "ops/activation.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"

namespace vllm_kernels {
namespace {

enum class GateIs { kFirstHalf, kSecondHalf };

// out [..., d] = f(gate) * up; gate and up are the halves of input [..., 2 d].
void gated(const char* op, Activation activation, GateIs gate, const Tensor& out,
           const Tensor& input) {
  Expect expect(op);
  const Argument x = expect.tensor("input", input).floating().rank(1, 8).inner_contiguous();
  if (x.size(-1) % 2 != 0) {
    x.fail("expected an even last dimension (two halves), got shape " + x.shape_text());
  }
  const int64_t width = x.size(-1) / 2;
  const Argument o = expect.tensor("out", out).same_dtype(x).inner_contiguous().written();
  bool fits = o.dim() == x.dim() && o.size(-1) == width;
  for (int64_t d = 0; fits && d < x.dim() - 1; ++d) fits = o.size(d) == x.size(d);
  if (!fits) {
    o.fail("expected the shape of input, " + x.shape_text() +
           ", with the last dimension halved, got shape " + o.shape_text());
  }
  expect.apart(o, x);
  if (o.numel() == 0) return;

  const char* first = static_cast<const char*>(x.data());
  const char* second = first + width * size_of(x.dtype());
  const bool gate_first = gate == GateIs::kFirstHalf;
  const ActivationParams params{.out = o.mutable_data(),
                                .gate = gate_first ? first : second,
                                .up = gate_first ? second : first,
                                .out_rows = expect.rows(o),
                                .input_rows = expect.rows(x),
                                .width = width,
                                .activation = activation,
                                .dtype = x.dtype(),
                                .op = op};
  launch(params, input);
}

// out = f(input), both [..., d].
void plain(const char* op, Activation activation, const Tensor& out, const Tensor& input) {
  Expect expect(op);
  const Argument x = expect.tensor("input", input).floating().rank(1, 8).inner_contiguous();
  const Argument o =
      expect.tensor("out", out).same_dtype(x).same_shape(x).inner_contiguous().written();
  expect.same_or_apart(o, x);
  if (x.numel() == 0) return;

  Rows out_rows = expect.rows(o), input_rows = expect.rows(x);
  int64_t width = x.size(-1);
  const auto dense = [&](const Rows& rows) {
    return rows.inner_count == rows.count && (rows.count == 1 || rows.inner_stride == width);
  };
  if (dense(out_rows) && dense(input_rows)) {  // a single row
    out_rows = input_rows = {.count = 1, .inner_count = 1, .outer_stride = 0, .inner_stride = 0};
    width = x.numel();
  }
  const ActivationParams params{.out = o.mutable_data(),
                                .gate = x.data(),
                                .up = nullptr,
                                .out_rows = out_rows,
                                .input_rows = input_rows,
                                .width = width,
                                .activation = activation,
                                .dtype = x.dtype(),
                                .op = op};
  launch(params, input);
}

void silu_and_mul(const Tensor& out, const Tensor& input) {
  gated("silu_and_mul", Activation::kSilu, GateIs::kFirstHalf, out, input);
}
void mul_and_silu(const Tensor& out, const Tensor& input) {
  gated("mul_and_silu", Activation::kSilu, GateIs::kSecondHalf, out, input);
}
void gelu_and_mul(const Tensor& out, const Tensor& input) {
  gated("gelu_and_mul", Activation::kGelu, GateIs::kFirstHalf, out, input);
}
void gelu_tanh_and_mul(const Tensor& out, const Tensor& input) {
  gated("gelu_tanh_and_mul", Activation::kGeluTanh, GateIs::kFirstHalf, out, input);
}
// Both names mean the tanh form. Hugging Face has them for two ways to write it.
void gelu_new(const Tensor& out, const Tensor& input) {
  plain("gelu_new", Activation::kGeluTanh, out, input);
}
void gelu_fast(const Tensor& out, const Tensor& input) {
  plain("gelu_fast", Activation::kGeluTanh, out, input);
}
void gelu_quick(const Tensor& out, const Tensor& input) {
  plain("gelu_quick", Activation::kGeluQuick, out, input);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("silu_and_mul", TORCH_BOX(&vllm_kernels::silu_and_mul));
  library.impl("mul_and_silu", TORCH_BOX(&vllm_kernels::mul_and_silu));
  library.impl("gelu_and_mul", TORCH_BOX(&vllm_kernels::gelu_and_mul));
  library.impl("gelu_tanh_and_mul", TORCH_BOX(&vllm_kernels::gelu_tanh_and_mul));
  library.impl("gelu_new", TORCH_BOX(&vllm_kernels::gelu_new));
  library.impl("gelu_fast", TORCH_BOX(&vllm_kernels::gelu_fast));
  library.impl("gelu_quick", TORCH_BOX(&vllm_kernels::gelu_quick));
}
