// Bindings of all activations. Gated ones, [..., 2 d] -> [..., d]: silu_and_mul, mul_and_silu,
// gelu_and_mul, gelu_tanh_and_mul, fatrelu_and_mul, silu_and_mul_with_clamp, swigluoai_and_mul, and
// silu_and_mul with 8-bit results. silu_and_mul_split reads two tensors [..., d]. Plain ones,
// [..., d] -> [..., d]: gelu_new, gelu_fast, gelu_quick. ops/activation.h and
// ops/activation_gated.h have the formulas.
#include "ops/activation.h"

#include <cmath>

#include "ops/activation_gated.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/quant.h"

namespace vllm_kernels {
namespace {

Argument read_plain(Expect& expect, const char* name, const Tensor& tensor) {
  return expect.tensor(name, tensor).floating().rank(1, 8).inner_contiguous();
}

// input [..., 2 d]. `halves`: how the error names its two halves.
Argument read_packed(Expect& expect, const Tensor& input, const char* halves) {
  const Argument x = read_plain(expect, "input", input);
  if (x.size(-1) % 2 != 0) {
    x.fail(std::string("expected an even last dimension (") + halves + "), got shape " +
           x.shape_text());
  }
  return x;
}

void require_half_of(const Argument& out, const Argument& input) {
  const auto outer = [](const Argument& a) { return a.sizes().first(a.dim() - 1); };
  if (out.dim() != input.dim() || 2 * out.size(-1) != input.size(-1) ||
      !std::ranges::equal(outer(out), outer(input))) {
    out.fail("expected the shape of input, " + input.shape_text() +
             ", with the last dimension halved, got shape " + out.shape_text());
  }
}

// out [..., d] of the dtype of `x` [..., 2 d].
Argument read_half(Expect& expect, const Tensor& out, const Argument& x) {
  const Argument o = expect.tensor("out", out).same_dtype(x).inner_contiguous().written();
  require_half_of(o, x);
  expect.apart(o, x);
  return o;
}

const char* second_half(const Argument& x) {
  return x.as<const char>() + x.size(-1) / 2 * x.element_size();
}

enum class GateIs { kFirstHalf, kSecondHalf };

// out = f(gate) * up; gate and up are the halves of input.
void gated(const char* op, Activation activation, GateIs gate, const Tensor& out,
           const Tensor& input) {
  Expect expect(op);
  const Argument x = read_packed(expect, input, "two halves");
  const Argument o = read_half(expect, out, x);
  if (o.numel() == 0) return;

  const bool gate_first = gate == GateIs::kFirstHalf;
  const ActivationParams params{.out = o.mutable_data(),
                                .gate = gate_first ? x.data() : second_half(x),
                                .up = gate_first ? second_half(x) : x.data(),
                                .out_rows = expect.rows(o),
                                .input_rows = expect.rows(x),
                                .width = o.size(-1),
                                .activation = activation,
                                .dtype = x.dtype(),
                                .op = op};
  launch(params, input);
}

// out = f(input), both [..., d].
void plain(const char* op, Activation activation, const Tensor& out, const Tensor& input) {
  Expect expect(op);
  const Argument x = read_plain(expect, "input", input);
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

GatedParams pack(const Expect& expect, Gated function, const Argument& out, const Argument& gate,
                 const void* up, const Rows& up_rows, double bound = 0.0, double alpha = 0.0) {
  return {.out = out.mutable_data(),
          .gate = gate.data(),
          .up = up,
          .out_rows = expect.rows(out),
          .gate_rows = expect.rows(gate),
          .up_rows = up_rows,
          .width = out.size(-1),
          .bound = static_cast<float>(bound),
          .alpha = static_cast<float>(alpha),
          .function = function,
          .dtype = gate.dtype(),
          .op = expect.op()};
}

void with_bound(const char* op, Gated function, const Tensor& out, const Tensor& input,
                double bound, double alpha) {
  Expect expect(op);
  const Argument x = read_packed(expect, input, "gate and up");
  const Argument o = read_half(expect, out, x);
  expect.that(!std::isnan(alpha), "alpha: expected a number, got nan");
  if (function == Gated::kFatRelu) {
    expect.that(!std::isnan(bound), "threshold: expected a number, got nan");
  } else {
    expect.not_negative("limit", bound);
  }
  if (o.numel() == 0) return;
  // The even and odd elements of input, or its halves.
  const bool alternate = function == Gated::kSwigluOai;
  launch(pack(expect, function, o, x, alternate ? nullptr : second_half(x),
              alternate ? Rows{} : expect.rows(x), bound, alpha),
         input);
}

void silu_and_mul_split(const Tensor& out, const Tensor& gate, const Tensor& up) {
  Expect expect("silu_and_mul_split");
  const Argument g = read_plain(expect, "gate", gate);
  const Argument u = expect.tensor("up", up).same_dtype(g).same_shape(g).inner_contiguous();
  const Argument o =
      expect.tensor("out", out).same_dtype(g).same_shape(g).inner_contiguous().written();
  expect.same_or_apart(o, g);
  expect.same_or_apart(o, u);
  if (o.numel() == 0) return;
  launch(pack(expect, Gated::kSilu, o, g, u.data(), expect.rows(u)), gate);
}

void quantized(const char* op, const Tensor& out, const Tensor& input,
               const ScaleArguments& scales) {
  Expect expect(op);
  const Argument x = read_packed(expect, input, "gate and up");
  Argument o = expect.tensor("out", out);
  quantized_dtype(o, scales.scale_of).inner_contiguous().written();
  require_half_of(o, x);
  int32_size(o, "a last dimension", o.size(-1));  // kernels count its elements
  Arguments read(x), written(o);
  const QuantParams quant = read_scales(expect, scales, o, read, written);
  expect.apart(written, read);
  if (o.numel() == 0) return;
  const GatedParams params = pack(expect, Gated::kSilu, o, x, second_half(x), expect.rows(x));
  launch(GatedQuantParams{.gated = params, .quant = quant}, input);
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
void fatrelu_and_mul(const Tensor& out, const Tensor& input, double threshold) {
  with_bound("fatrelu_and_mul", Gated::kFatRelu, out, input, threshold, 0.0);
}
void silu_and_mul_with_clamp(const Tensor& out, const Tensor& input, double limit) {
  with_bound("silu_and_mul_with_clamp", Gated::kSiluClamp, out, input, limit, 0.0);
}
void swigluoai_and_mul(const Tensor& out, const Tensor& input, double alpha, double limit) {
  with_bound("swigluoai_and_mul", Gated::kSwigluOai, out, input, limit, alpha);
}
void silu_and_mul_quant(const Tensor& out, const Tensor& input, const Tensor& scale) {
  quantized("silu_and_mul_quant", out, input, {.scale_of = ScaleOf::kTensor, .scales = scale});
}
void silu_and_mul_per_block_quant(const Tensor& out, const Tensor& input, const Tensor& scales,
                                  int64_t group_size, const std::optional<Tensor>& scale_ub,
                                  bool is_scale_transposed) {
  quantized("silu_and_mul_per_block_quant", out, input,
            {.scale_of = ScaleOf::kGroup,
             .scales = scales,
             .scale_ub = or_null(scale_ub),
             .group_size = group_size,
             .is_scale_transposed = is_scale_transposed});
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
  library.impl("silu_and_mul_split", TORCH_BOX(&vllm_kernels::silu_and_mul_split));
  library.impl("fatrelu_and_mul", TORCH_BOX(&vllm_kernels::fatrelu_and_mul));
  library.impl("silu_and_mul_with_clamp", TORCH_BOX(&vllm_kernels::silu_and_mul_with_clamp));
  library.impl("swigluoai_and_mul", TORCH_BOX(&vllm_kernels::swigluoai_and_mul));
  library.impl("silu_and_mul_quant", TORCH_BOX(&vllm_kernels::silu_and_mul_quant));
  library.impl("silu_and_mul_per_block_quant",
               TORCH_BOX(&vllm_kernels::silu_and_mul_per_block_quant));
}
