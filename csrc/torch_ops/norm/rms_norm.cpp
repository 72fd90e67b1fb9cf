// Bindings of rms_norm and fused_add_rms_norm, [..., hidden_size]. rms_norm.h has the checks,
// ops/rms_norm.h the formula.
#include "torch_ops/norm/rms_norm.h"

#include "torch_ops/base/device.h"

namespace vllm_kernels {
namespace {

void rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  const auto params = read_norm("rms_norm", out, input, &weight, epsilon);
  if (params) launch(*params, input);
}

void fused_add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                        double epsilon) {
  const auto params = read_fused_add_norm("fused_add_rms_norm", input, residual, &weight, epsilon);
  if (params) launch(*params, input);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rms_norm", TORCH_BOX(&vllm_kernels::rms_norm));
  library.impl("fused_add_rms_norm", TORCH_BOX(&vllm_kernels::fused_add_rms_norm));
}
