// The sm80 prefill kernels for a cache of bfloat16: layouts NHD and HND, and contiguous keys
// (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm80/prefill_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_prefill_sm80_bf16_rows(const PagedAttentionParams& p,
                                            const KernelChoice& choice, const PrefillLaunch& launch,
                                            void* stream) {
  launch_prefill_sm80<BFloat16, KvForm::kSwizzledRows, false>(p, choice, launch, stream);
}

}  // namespace vllm_kernels::cuda
