// The tensor-core kernels, one small file per pair of types so that they compile side by side.
#pragma once
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Query and cache types of `params` must be 16-bit, or 8-bit for the cache.
void paged_attention_mma(const PagedAttentionParams& params, void* stream);

void paged_attention_mma_f16(const PagedAttentionParams& params, void* stream);
void paged_attention_mma_bf16(const PagedAttentionParams& params, void* stream);
void paged_attention_mma_f16_e4m3(const PagedAttentionParams& params, void* stream);
void paged_attention_mma_f16_e5m2(const PagedAttentionParams& params, void* stream);
void paged_attention_mma_bf16_e4m3(const PagedAttentionParams& params, void* stream);
void paged_attention_mma_bf16_e5m2(const PagedAttentionParams& params, void* stream);

}  // namespace vllm_kernels::cuda
