// fused_decode_attention's kernels, one small file per cache type so that they compile side by
// side.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/workspace.h"
#include "ops/fused_decode_attention.h"

namespace vllm_kernels::cuda {

void fused_decode_attention_bf16(const FusedDecodeAttentionParams& params,
                                 const KernelChoice& choice, const DecodeWorkspace& workspace,
                                 void* stream);
void fused_decode_attention_f16(const FusedDecodeAttentionParams& params,
                                const KernelChoice& choice, const DecodeWorkspace& workspace,
                                void* stream);
void fused_decode_attention_e4m3(const FusedDecodeAttentionParams& params,
                                 const KernelChoice& choice, const DecodeWorkspace& workspace,
                                 void* stream);

}  // namespace vllm_kernels::cuda
