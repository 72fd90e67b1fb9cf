#include "cuda/paged_attention_kernels.h"
#include "cuda/paged_attention_mma.cuh"

namespace vllm_kernels::cuda {

void paged_attention_mma_bf16(const PagedAttentionParams& p, void* stream) {
  launch_paged_attention_mma<BFloat16, BFloat16>(p, stream);
}

}  // namespace vllm_kernels::cuda
