#include "cuda/launch.cuh"

namespace vllm_kernels::cuda {
namespace {

__global__ void nothing_kernel() {}

}  // namespace

int code_architecture() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, nothing_kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion;
}

}  // namespace vllm_kernels::cuda
