// The kernels of paged_attention for many query rows, one small file per head size so that they
// compile side by side.
#pragma once
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct PrefillLaunch {
  int min_query_len;           // sequences of fewer query tokens are left out
  bool has_concurrent_launch;  // ... and are the next launch's, which runs beside this one
  uint32_t* next;              // items handed out; 0 before and after every launch
};

// Queries are of 16 bits, K and V of the same type or of 8. Pages of layout vllm have 16 tokens (of
// 8 bits: or more), those of the others 16 or more; or keys are contiguous.
void paged_attention_prefill_64(const PagedAttentionParams& params, const PrefillLaunch& launch,
                                void* stream);
void paged_attention_prefill_96(const PagedAttentionParams& params, const PrefillLaunch& launch,
                                void* stream);
void paged_attention_prefill_128(const PagedAttentionParams& params, const PrefillLaunch& launch,
                                 void* stream);
void paged_attention_prefill_192(const PagedAttentionParams& params, const PrefillLaunch& launch,
                                 void* stream);
void paged_attention_prefill_256(const PagedAttentionParams& params, const PrefillLaunch& launch,
                                 void* stream);

}  // namespace vllm_kernels::cuda
