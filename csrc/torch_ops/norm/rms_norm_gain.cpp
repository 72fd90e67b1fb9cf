// Bindings of the RMS norms without weight and of Gemma's (weight + 1), [..., hidden_size].
// ops/rms_norm_gain.h has the formulas.
#include "ops/rms_norm_gain.h"

#include "torch_ops/base/device.h"
#include "torch_ops/norm/rms_norm.h"

namespace vllm_kernels {
namespace {

void launch_gain(const char* op, const std::optional<RmsNormParams>& norm, const Tensor& input) {
  if (!norm) return;
  const RmsNormGainParams params{
      .norm = *norm, .gain = norm->weight == nullptr ? Gain::kNone : Gain::kOnePlus, .op = op};
  launch(params, input);
}

// `weight` is null for a norm without weight.
void norm(const char* op, const Tensor& out, const Tensor& input, const Tensor* weight,
          double epsilon) {
  launch_gain(op, read_norm(op, out, input, weight, epsilon), input);
}

void fused_add_norm(const char* op, const Tensor& input, const Tensor& residual,
                    const Tensor* weight, double epsilon) {
  launch_gain(op, read_fused_add_norm(op, input, residual, weight, epsilon), input);
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
