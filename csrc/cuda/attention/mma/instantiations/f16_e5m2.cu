#include "cuda/attention/mma/kernels.h"
#include "cuda/attention/mma/mma_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_mma_f16_e5m2(const PagedAttentionParams& p, void* stream) {
  launch_paged_attention_mma<Half, __nv_fp8_e5m2>(p, stream);
}

}  // namespace vllm_kernels::cuda
