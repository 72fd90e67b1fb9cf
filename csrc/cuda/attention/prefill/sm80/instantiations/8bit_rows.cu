// The sm80 prefill kernels for an 8-bit cache: layouts NHD and HND, and contiguous keys
// (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm80/prefill_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_prefill_sm80_8bit_rows(const PagedAttentionParams& p,
                                            const KernelChoice& choice, const PrefillLaunch& launch,
                                            void* stream) {
  launch_prefill_sm80<Half, KvForm::kSwizzledRows, true>(p, choice, launch, stream);
}

}  // namespace vllm_kernels::cuda
