#include "cuda/attention/mma/kernels.h"
#include "cuda/attention/mma/mma_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_mma_f16_e4m3(const PagedAttentionParams& p, void* stream) {
  launch_paged_attention_mma<Half, __nv_fp8_e4m3>(p, stream);
}

}  // namespace vllm_kernels::cuda
