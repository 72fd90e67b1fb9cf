// paged_attention's decode kernels for a cache of bfloat16.
#include "cuda/attention/decode/decode_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_decode_bf16(const PagedAttentionParams& p, const KernelChoice& choice,
                                 const DecodeWorkspace& workspace, void* stream) {
  launch_decode<BFloat16>(p, choice, workspace, stream);
}

}  // namespace vllm_kernels::cuda
