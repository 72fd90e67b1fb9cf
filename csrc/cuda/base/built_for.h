// The text for a GPU that this build has no code for.
#pragma once

#include <string>

namespace vllm_kernels::cuda {

// The architectures of this build, such as "sm_80, sm_90a".
const char* built_architectures();

// architecture: of the GPU, 10 * major + minor.
inline std::string no_code_for_gpu(const std::string& built, int architecture) {
  const std::string entry = std::to_string(architecture / 10) + "." +
                            std::to_string(architecture % 10) + (architecture == 90 ? "a" : "");
  return "vllm_kernels: built for " + built + ", this GPU is sm_" + std::to_string(architecture) +
         ": build with TORCH_CUDA_ARCH_LIST=" + entry;
}

}  // namespace vllm_kernels::cuda
