// The kernels of paged_attention for many query rows that need no more than sm_80, one small file
// per type and form of pages so that they compile side by side.
#pragma once
#include "cuda/attention/prefill/prefill.h"

namespace vllm_kernels::cuda {

// Tokens of a sequence, at most.
constexpr int64_t kMaxLength = int64_t{1} << 30;

// False, and no launch, where the device's shared memory has no room. Cache and query are of the
// type of the name, or the query of any 16-bit type beside a cache of 8 bits.
bool paged_attention_prefill_sm80_f16_pages(const PagedAttentionParams& params,
                                            const PrefillLaunch& launch, void* stream);
bool paged_attention_prefill_sm80_f16_rows(const PagedAttentionParams& params,
                                           const PrefillLaunch& launch, void* stream);
bool paged_attention_prefill_sm80_bf16_pages(const PagedAttentionParams& params,
                                             const PrefillLaunch& launch, void* stream);
bool paged_attention_prefill_sm80_bf16_rows(const PagedAttentionParams& params,
                                            const PrefillLaunch& launch, void* stream);
bool paged_attention_prefill_sm80_8bit_pages(const PagedAttentionParams& params,
                                             const PrefillLaunch& launch, void* stream);
bool paged_attention_prefill_sm80_8bit_rows(const PagedAttentionParams& params,
                                            const PrefillLaunch& launch, void* stream);

}  // namespace vllm_kernels::cuda
