// Bindings of the other gated activations: silu_and_mul_split, fatrelu_and_mul,
// silu_and_mul_with_clamp, swigluoai_and_mul, and silu_and_mul with 8-bit results.
// ops/activation_gated.h has the formulas.
#include "ops/activation_gated.h"

#include <cmath>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/quant.h"

namespace vllm_kernels {
namespace {

Argument packed_input(Expect& expect, const Tensor& input) {
  const Argument x = expect.tensor("input", input).floating().rank(1, 8).inner_contiguous();
  if (x.size(-1) % 2 != 0) {
    x.fail("expected an even last dimension (gate and up), got shape " + x.shape_text());
  }
  return x;
}

void expect_half_of(const Argument& out, const Argument& input) {
  bool fits = out.dim() == input.dim() && 2 * out.size(-1) == input.size(-1);
  for (int64_t d = 0; fits && d < input.dim() - 1; ++d) fits = out.size(d) == input.size(d);
  if (!fits) {
    out.fail("expected the shape of input, " + input.shape_text() +
             ", with the last dimension halved, got shape " + out.shape_text());
  }
}

// input [..., 2 d] holds gate and up: as its halves, or (kSwigluOai) as even and odd elements.
GatedParams packed(const Expect& expect, Gated function, const Argument& out,
                   const Argument& input) {
  const Rows rows = expect.rows(input);
  const int64_t width = out.size(-1);
  const bool halves = function != Gated::kSwigluOai;
  return {.out = out.mutable_data(),
          .gate = input.data(),
          .up = halves ? static_cast<const char*>(input.data()) + width * size_of(input.dtype())
                       : nullptr,
          .out_rows = expect.rows(out),
          .gate_rows = rows,
          .up_rows = halves ? rows : Rows{},
          .width = width,
          .bound = 0.0f,
          .alpha = 0.0f,
          .function = function,
          .dtype = input.dtype(),
          .op = expect.op()};
}

void with_bound(const char* op, Gated function, const Tensor& out, const Tensor& input,
                double bound, double alpha) {
  Expect expect(op);
  const Argument x = packed_input(expect, input);
  const Argument o = expect.tensor("out", out).same_dtype(x).inner_contiguous().written();
  expect_half_of(o, x);
  expect.apart(o, x);
  expect.that(!std::isnan(alpha), "alpha: expected a number, got nan");
  if (function == Gated::kFatRelu) {
    expect.that(!std::isnan(bound), "threshold: expected a number, got nan");
  } else {
    expect.that(bound >= 0, "limit: expected a number >= 0, got " + std::to_string(bound));
  }
  if (o.numel() == 0) return;
  GatedParams params = packed(expect, function, o, x);
  params.bound = static_cast<float>(bound);
  params.alpha = static_cast<float>(alpha);
  launch(params, input);
}

void fatrelu_and_mul(const Tensor& out, const Tensor& input, double threshold) {
  with_bound("fatrelu_and_mul", Gated::kFatRelu, out, input, threshold, 0.0);
}
void silu_and_mul_with_clamp(const Tensor& out, const Tensor& input, double limit) {
  with_bound("silu_and_mul_with_clamp", Gated::kSiluClamp, out, input, limit, 0.0);
}
void swigluoai_and_mul(const Tensor& out, const Tensor& input, double alpha, double limit) {
  with_bound("swigluoai_and_mul", Gated::kSwigluOai, out, input, limit, alpha);
}

void silu_and_mul_split(const Tensor& out, const Tensor& gate, const Tensor& up) {
  Expect expect("silu_and_mul_split");
  const Argument g = expect.tensor("gate", gate).floating().rank(1, 8).inner_contiguous();
  const Argument u = expect.tensor("up", up).same_dtype(g).same_shape(g).inner_contiguous();
  const Argument o =
      expect.tensor("out", out).same_dtype(g).same_shape(g).inner_contiguous().written();
  expect.same_or_apart(o, g);
  expect.same_or_apart(o, u);
  if (o.numel() == 0) return;
  const GatedParams params{.out = o.mutable_data(),
                           .gate = g.data(),
                           .up = u.data(),
                           .out_rows = expect.rows(o),
                           .gate_rows = expect.rows(g),
                           .up_rows = expect.rows(u),
                           .width = g.size(-1),
                           .bound = 0.0f,
                           .alpha = 0.0f,
                           .function = Gated::kSilu,
                           .dtype = g.dtype(),
                           .op = expect.op()};
  launch(params, gate);
}

// scales(expect, out, arguments) checks and returns the scales.
template <typename Scales>
void quantized(const char* op, std::initializer_list<DType> dtypes, const Tensor& out,
               const Tensor& input, const Scales& scales) {
  Expect expect(op);
  const Argument x = packed_input(expect, input);
  const Argument o = expect.tensor("out", out).one_of(dtypes).inner_contiguous().written();
  expect_half_of(o, x);
  if (o.size(-1) > INT32_MAX) {
    o.fail("expected a last dimension < 2^31, got shape " + o.shape_text());
  }
  ReadAndWritten arguments;
  arguments.read.add(x);
  arguments.written.add(o);
  const QuantParams quant = scales(expect, o, arguments);
  arguments.apart(expect);
  if (o.numel() == 0) return;
  launch(GatedQuantParams{.gated = packed(expect, Gated::kSilu, o, x), .quant = quant}, input);
}

void silu_and_mul_quant(const Tensor& out, const Tensor& input, const Tensor& scale) {
  quantized("silu_and_mul_quant", {DType::kFp8E4M3}, out, input,
            [&](Expect& expect, const Argument& o, ReadAndWritten& arguments) {
              return given_scale(expect, o, scale, arguments);
            });
}

void silu_and_mul_per_block_quant(const Tensor& out, const Tensor& input, const Tensor& scales,
                                  int64_t group_size, const std::optional<Tensor>& scale_ub,
                                  bool is_scale_transposed) {
  quantized("silu_and_mul_per_block_quant", {DType::kFp8E4M3, DType::kInt8}, out, input,
            [&](Expect& expect, const Argument& o, ReadAndWritten& arguments) {
              return group_scales(expect, o, scales, scale_ub, group_size, is_scale_transposed,
                                  arguments);
            });
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("silu_and_mul_split", TORCH_BOX(&vllm_kernels::silu_and_mul_split));
  library.impl("fatrelu_and_mul", TORCH_BOX(&vllm_kernels::fatrelu_and_mul));
  library.impl("silu_and_mul_with_clamp", TORCH_BOX(&vllm_kernels::silu_and_mul_with_clamp));
  library.impl("swigluoai_and_mul", TORCH_BOX(&vllm_kernels::swigluoai_and_mul));
  library.impl("silu_and_mul_quant", TORCH_BOX(&vllm_kernels::silu_and_mul_quant));
  library.impl("silu_and_mul_per_block_quant",
               TORCH_BOX(&vllm_kernels::silu_and_mul_per_block_quant));
}
