// Launchers of fused_decode_attention's kernels, one small file per cache type so that they compile
// in parallel. They return false, without a launch, where two separate launches are needed.
#pragma once
#include "cuda/attention/common/workspace.h"
#include "ops/fused_decode_attention.h"

namespace vllm_kernels::cuda {

bool fused_decode_attention_bf16(const FusedDecodeAttentionParams& params,
                                 const DecodeWorkspace& workspace, void* stream);
bool fused_decode_attention_f16(const FusedDecodeAttentionParams& params,
                                const DecodeWorkspace& workspace, void* stream);
bool fused_decode_attention_e4m3(const FusedDecodeAttentionParams& params,
                                 const DecodeWorkspace& workspace, void* stream);

}  // namespace vllm_kernels::cuda
