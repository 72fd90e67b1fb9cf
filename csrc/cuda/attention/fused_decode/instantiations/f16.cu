// fused_decode_attention's kernels for a cache of float16.
#include "cuda/attention/fused_decode/fused_decode_attention.cuh"
#include "cuda/attention/fused_decode/fused_decode_attention.h"

namespace vllm_kernels::cuda {

void fused_decode_attention_f16(const FusedDecodeAttentionParams& params,
                                const KernelChoice& choice, const DecodeWorkspace& workspace,
                                void* stream) {
  launch_fused_decode<Half>(params, choice, workspace, stream);
}

}  // namespace vllm_kernels::cuda
