// paged_attention's decode kernels for a cache of int8.
#include "cuda/attention/decode/decode_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_decode_int8(const PagedAttentionParams& p, const KernelChoice& choice,
                                 const DecodeWorkspace& workspace, void* stream) {
  launch_decode<int8_t>(p, choice, workspace, stream);
}

}  // namespace vllm_kernels::cuda
