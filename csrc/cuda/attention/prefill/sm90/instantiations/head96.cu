// The sm90 prefill kernels of head size 96, for wgmma (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm90/prefill_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_prefill_96(const PagedAttentionParams& p, const PrefillLaunch& launch,
                                void* stream) {
  launch_prefill<96>(p, launch, stream);
}

}  // namespace vllm_kernels::cuda
