// Launchers of paged_attention's decode kernels, one small file per cache type so that they compile
// in parallel. The query is 16-bit; with a 16-bit cache it has the cache's dtype.
#pragma once
#include <cuda_runtime.h>

#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/workspace.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

void paged_attention_decode_f16(const PagedAttentionParams& params, const KernelChoice& choice,
                                const DecodeWorkspace& workspace, void* stream);
void paged_attention_decode_bf16(const PagedAttentionParams& params, const KernelChoice& choice,
                                 const DecodeWorkspace& workspace, void* stream);
void paged_attention_decode_e4m3(const PagedAttentionParams& params, const KernelChoice& choice,
                                 const DecodeWorkspace& workspace, void* stream);
void paged_attention_decode_e5m2(const PagedAttentionParams& params, const KernelChoice& choice,
                                 const DecodeWorkspace& workspace, void* stream);
void paged_attention_decode_int8(const PagedAttentionParams& params, const KernelChoice& choice,
                                 const DecodeWorkspace& workspace, void* stream);

}  // namespace vllm_kernels::cuda
