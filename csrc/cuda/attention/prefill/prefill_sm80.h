// Launchers of the sm80 prefill kernels: one file per cache type and layout of a stage, so that
// they compile in parallel.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/prefill/prefill.h"

namespace vllm_kernels::cuda {

// f16, bf16: type of query and cache. 8bit: any 8-bit cache, with any 16-bit query.
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
