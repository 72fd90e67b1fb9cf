// Answers which device code the driver picked from the fat binary for the current device: its PTX
// version and whether it has wgmma. launch.cuh declares these functions and caches the answers in
// DeviceModel.
#include "cuda/base/architecture.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {
namespace {

__global__ void nothing_kernel() {}

// Never launched. The host cannot query the macros that the device code saw. It can query static
// shared memory, so this kernel has some only where VLLM_KERNELS_HAS_WGMMA was defined.
__global__ void wgmma_kernel(uint32_t* out) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  __shared__ uint32_t present[64];
  present[threadIdx.x % 64] = threadIdx.x;
  __syncthreads();
  *out = present[(threadIdx.x + 1) % 64];
#endif
}

template <typename Kernel>
cudaFuncAttributes attributes_of(Kernel kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return attributes;
}

}  // namespace

int code_architecture() {
#if defined(VLLM_KERNELS_BEFORE_HOPPER)
  return 80;
#else
  return attributes_of(nothing_kernel).ptxVersion;
#endif
}

bool code_has_wgmma() {
  return attributes_of(wgmma_kernel).sharedSizeBytes >
         attributes_of(nothing_kernel).sharedSizeBytes;
}

}  // namespace vllm_kernels::cuda
