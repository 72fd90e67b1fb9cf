// fused_decode_attention's kernels for a cache of e4m3.
#include "cuda/attention/fused_decode/fused_decode_attention.cuh"
#include "cuda/attention/fused_decode/fused_decode_attention.h"

namespace vllm_kernels::cuda {

bool fused_decode_attention_e4m3(const FusedDecodeAttentionParams& params,
                                 const DecodeWorkspace& workspace, void* stream) {
  return launch_fused_decode<__nv_fp8_e4m3>(params, workspace, stream);
}

}  // namespace vllm_kernels::cuda
