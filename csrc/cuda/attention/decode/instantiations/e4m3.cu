// paged_attention's decode kernels for a cache of e4m3.
#include "cuda/attention/decode/decode_kernel.cuh"

namespace vllm_kernels::cuda {

void paged_attention_decode_e4m3(const PagedAttentionParams& p, const KernelChoice& choice,
                                 const DecodeWorkspace& workspace, void* stream) {
  launch_decode<__nv_fp8_e4m3>(p, choice, workspace, stream);
}

}  // namespace vllm_kernels::cuda
