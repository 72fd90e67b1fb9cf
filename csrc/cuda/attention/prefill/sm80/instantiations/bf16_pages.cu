// The sm80 prefill kernels for a cache of bfloat16: layout vllm (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm80/prefill_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_prefill_sm80_bf16_pages(const PagedAttentionParams& p,
                                             const KernelChoice& choice,
                                             const PrefillLaunch& launch, void* stream) {
  launch_prefill_sm80<BFloat16, KvForm::kPackedPages, false>(p, choice, launch, stream);
}

}  // namespace vllm_kernels::cuda
