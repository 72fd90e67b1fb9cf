// paged_attention's decode kernels for a cache of float16.
#include "cuda/attention/decode/decode_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_decode_f16(const PagedAttentionParams& p, const KernelChoice& choice,
                                const DecodeWorkspace& workspace, void* stream) {
  launch_decode<Half>(p, choice, workspace, stream);
}

}  // namespace vllm_kernels::cuda
