// vllm_kernels.explain(): reports of the attention ops, collected in place of launches.
#include "ops/report.h"

#include <algorithm>
#include <cstring>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"

namespace vllm_kernels {
namespace {

// `on` decides which library answers: the one of its device.
void start_explaining(const Tensor& /*on*/) {
  start_collecting_reports();
}

// text: uint8, on the CPU; UTF-8 without an end, cut to its size and followed by zeros.
void take_explanation(const Tensor& /*on*/, const Tensor& text) {
  const Argument to =
      Expect("take_explanation").tensor_on_any_device("text", text).uint8().on_cpu().contiguous();
  const std::string reports = take_reports();
  const auto size = std::min<int64_t>(to.numel(), static_cast<int64_t>(reports.size()));
  std::memset(to.mutable_data(), 0, to.numel());
  std::memcpy(to.mutable_data(), reports.data(), size);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL_WITH_KEY(VLLM_KERNELS_DISPATCH_KEY, library) {
  library.impl("start_explaining", TORCH_BOX(&vllm_kernels::start_explaining));
  library.impl("take_explanation", TORCH_BOX(&vllm_kernels::take_explanation));
}
