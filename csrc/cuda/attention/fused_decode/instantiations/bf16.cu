// fused_decode_attention's kernels for a cache of bfloat16.
#include "cuda/attention/fused_decode/fused_decode_attention.cuh"
#include "cuda/attention/fused_decode/fused_decode_attention.h"

namespace vllm_kernels::cuda {

void fused_decode_attention_bf16(const FusedDecodeAttentionParams& params,
                                 const KernelChoice& choice, const DecodeWorkspace& workspace,
                                 void* stream) {
  launch_fused_decode<BFloat16>(params, choice, workspace, stream);
}

}  // namespace vllm_kernels::cuda
