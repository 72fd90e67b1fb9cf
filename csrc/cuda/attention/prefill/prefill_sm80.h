// The kernels of paged_attention for many query rows that need no more than sm_80, one small file
// per type and form of pages so that they compile side by side.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/prefill/prefill.h"

namespace vllm_kernels::cuda {

// Cache and query are of the
// type of the name, or the query of any 16-bit type beside a cache of 8 bits.
void paged_attention_prefill_sm80_f16_pages(const PagedAttentionParams& params,
                                            const KernelChoice& choice, const PrefillLaunch& launch,
                                            void* stream);
void paged_attention_prefill_sm80_f16_rows(const PagedAttentionParams& params,
                                           const KernelChoice& choice, const PrefillLaunch& launch,
                                           void* stream);
void paged_attention_prefill_sm80_bf16_pages(const PagedAttentionParams& params,
                                             const KernelChoice& choice,
                                             const PrefillLaunch& launch, void* stream);
void paged_attention_prefill_sm80_bf16_rows(const PagedAttentionParams& params,
                                            const KernelChoice& choice, const PrefillLaunch& launch,
                                            void* stream);
void paged_attention_prefill_sm80_8bit_pages(const PagedAttentionParams& params,
                                             const KernelChoice& choice,
                                             const PrefillLaunch& launch, void* stream);
void paged_attention_prefill_sm80_8bit_rows(const PagedAttentionParams& params,
                                            const KernelChoice& choice, const PrefillLaunch& launch,
                                            void* stream);

}  // namespace vllm_kernels::cuda
