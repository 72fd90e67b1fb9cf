#include "cuda/attention/mma/kernels.h"
#include "cuda/attention/mma/mma_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_mma_bf16(const PagedAttentionParams& p, void* stream) {
  launch_paged_attention_mma<BFloat16, BFloat16>(p, stream);
}

}  // namespace vllm_kernels::cuda
