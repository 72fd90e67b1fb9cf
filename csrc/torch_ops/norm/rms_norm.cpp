// Bindings of all RMS norms, [..., hidden_size]: plain, without weight, Gemma's (weight + 1), and
// with 8-bit results. ops/rms_norm.h, ops/rms_norm_quant.h and ops/quant.h have the formulas.
#include "ops/rms_norm.h"

#include "ops/rms_norm_quant.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/quant.h"

namespace vllm_kernels {
namespace {

struct NormTensors {
  const Tensor* out;  // null: the result overwrites `input`
  const Tensor& input;
  const Tensor* residual;  // or null
  const Tensor* weight;    // or null
};

// Checks and packs a norm. With `scales`, `out` is 8-bit, and `quant` gets its scales. Returns
// nullopt if there is nothing to do.
std::optional<RmsNormParams> read_norm(const char* op, const NormTensors& tensors, double epsilon,
                                       const ScaleArguments* scales = nullptr,
                                       QuantParams* quant = nullptr) {
  Expect expect(op);
  Arguments read, written;
  Size hidden_size("hidden_size");
  Argument x = expect.tensor("input", tensors.input).floating().rank(1, 8).at(-1, hidden_size);
  x.inner_contiguous();
  int32_size(x, "hidden_size", hidden_size);  // kernels count its elements
  const void* weights = read_vector(expect, "weight", tensors.weight, x, hidden_size, read);
  const bool in_place = tensors.out == nullptr;
  Argument o = in_place ? x : expect.tensor("out", *tensors.out);
  scales == nullptr ? o.same_dtype(x) : quantized_dtype(o, scales->scale_of);
  o.same_shape(x).inner_contiguous().written();
  std::optional<Argument> r;
  if (tensors.residual != nullptr) {
    r = expect.tensor("residual", *tensors.residual).same_dtype(x).same_shape(x);
    r->inner_contiguous().written();
  }
  scales == nullptr ? expect.same_or_apart(o, x) : read.add(x);
  if (!in_place) written.add(o);
  if (r) written.add(*r);
  if (in_place) written.add(x);
  if (scales != nullptr) *quant = read_scales(expect, *scales, o, read, written);
  expect.apart(written, read);
  const float checked_epsilon = expect.finite_not_negative("epsilon", epsilon);
  if (x.numel() == 0) return std::nullopt;
  return RmsNormParams{.out = o.mutable_data(),
                       .input = x.data(),
                       .residual = r ? r->mutable_data() : nullptr,
                       .weight = weights,
                       .out_rows = expect.rows(o),
                       .input_rows = expect.rows(x),
                       .residual_rows = r ? expect.rows(*r) : Rows{},
                       .hidden_size = hidden_size,
                       .epsilon = checked_epsilon,
                       .dtype = x.dtype()};
}

void plain(const char* op, const NormTensors& tensors, double epsilon) {
  const auto norm = read_norm(op, tensors, epsilon);
  if (norm) launch(*norm, tensors.input);
}

void with_gain(const char* op, Gain gain, const NormTensors& tensors, double epsilon) {
  const auto norm = read_norm(op, tensors, epsilon);
  if (norm) launch(RmsNormGainParams{.norm = *norm, .gain = gain, .op = op}, tensors.input);
}

void quantized(const char* op, const NormTensors& tensors, double epsilon,
               const ScaleArguments& scales) {
  QuantParams quant;
  const auto norm = read_norm(op, tensors, epsilon, &scales, &quant);
  if (norm) launch(RmsNormQuantParams{.norm = *norm, .quant = quant, .op = op}, tensors.input);
}

void rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  plain("rms_norm", {&out, input, nullptr, &weight}, epsilon);
}
void fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                        double epsilon) {
  plain("fused_add_rms_norm", {nullptr, input, &residual, &weight}, epsilon);
}

void rms_norm_weightless(const Tensor& out, const Tensor& input, double epsilon) {
  with_gain("rms_norm_weightless", Gain::kNone, {&out, input, nullptr, nullptr}, epsilon);
}
void fused_add_rms_norm_weightless(const Tensor& input, const Tensor& residual, double epsilon) {
  with_gain("fused_add_rms_norm_weightless", Gain::kNone, {nullptr, input, &residual, nullptr},
            epsilon);
}
void gemma_rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  with_gain("gemma_rms_norm", Gain::kOnePlus, {&out, input, nullptr, &weight}, epsilon);
}
void gemma_fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                              double epsilon) {
  with_gain("gemma_fused_add_rms_norm", Gain::kOnePlus, {nullptr, input, &residual, &weight},
            epsilon);
}

void rms_norm_static_fp8_quant(const Tensor& out, const Tensor& input, const Tensor& weight,
                               const Tensor& scale, double epsilon) {
  quantized("rms_norm_static_fp8_quant", {&out, input, nullptr, &weight}, epsilon,
            {.scale_of = ScaleOf::kTensor, .scales = scale});
}
void fused_add_rms_norm_static_fp8_quant(const Tensor& out, const Tensor& input,
                                         const Tensor& residual, const Tensor& weight,
                                         const Tensor& scale, double epsilon) {
  quantized("fused_add_rms_norm_static_fp8_quant", {&out, input, &residual, &weight}, epsilon,
            {.scale_of = ScaleOf::kTensor, .scales = scale});
}
void rms_norm_dynamic_per_token_quant(const Tensor& out, const Tensor& input, const Tensor& weight,
                                      const Tensor& scales, double epsilon,
                                      const std::optional<Tensor>& scale_ub,
                                      const std::optional<Tensor>& residual) {
  quantized("rms_norm_dynamic_per_token_quant", {&out, input, or_null(residual), &weight}, epsilon,
            {.scale_of = ScaleOf::kRow, .scales = scales, .scale_ub = or_null(scale_ub)});
}
void rms_norm_per_block_quant(const Tensor& out, const Tensor& input, const Tensor& weight,
                              const Tensor& scales, double epsilon,
                              const std::optional<Tensor>& scale_ub,
                              const std::optional<Tensor>& residual, int64_t group_size,
                              bool is_scale_transposed) {
  quantized("rms_norm_per_block_quant", {&out, input, or_null(residual), &weight}, epsilon,
            {.scale_of = ScaleOf::kGroup,
             .scales = scales,
             .scale_ub = or_null(scale_ub),
             .group_size = group_size,
             .is_scale_transposed = is_scale_transposed});
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rms_norm", TORCH_BOX(&vllm_kernels::rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&vllm_kernels::fused_add_rms_norm));
  library.impl("rms_norm_weightless", TORCH_BOX(&vllm_kernels::rms_norm_weightless));
  library.impl("fused_add_rms_norm_weightless",
               TORCH_BOX(&vllm_kernels::fused_add_rms_norm_weightless));
  library.impl("gemma_rms_norm", TORCH_BOX(&vllm_kernels::gemma_rms_norm));
  library.impl("gemma_fused_add_rms_norm", TORCH_BOX(&vllm_kernels::gemma_fused_add_rms_norm));
  library.impl("rms_norm_static_fp8_quant", TORCH_BOX(&vllm_kernels::rms_norm_static_fp8_quant));
  library.impl("fused_add_rms_norm_static_fp8_quant",
               TORCH_BOX(&vllm_kernels::fused_add_rms_norm_static_fp8_quant));
  library.impl("rms_norm_dynamic_per_token_quant",
               TORCH_BOX(&vllm_kernels::rms_norm_dynamic_per_token_quant));
  library.impl("rms_norm_per_block_quant", TORCH_BOX(&vllm_kernels::rms_norm_per_block_quant));
}
