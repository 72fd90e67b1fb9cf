// The list of architectures that the build names. CMake defines the macro for this file alone.
#include "cuda/base/built_for.h"

namespace vllm_kernels::cuda {

const char* built_architectures() {
  return VLLM_KERNELS_CUDA_ARCHITECTURES;
}

}  // namespace vllm_kernels::cuda
