#include "cuda/attention/prefill/sm80/prefill_kernel.cuh"

namespace vllm_kernels::cuda {

bool paged_attention_prefill_sm80_8bit_rows(const PagedAttentionParams& p,
                                            const PrefillLaunch& launch, void* stream) {
  return launch_prefill_sm80<Half, KvForm::kSwizzledRows, true>(p, launch, stream);
}

}  // namespace vllm_kernels::cuda
