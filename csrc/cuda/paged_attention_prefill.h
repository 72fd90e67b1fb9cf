// The kernels of paged_attention for many query rows, one small file per head size so that they
// compile side by side.
#pragma once
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct PrefillLaunch {
  int least_query_len;  // sequences of fewer query tokens are left out
  bool leads;           // ... and are the next launch's, which runs beside this one
  uint32_t* next;       // items handed out; 0 before and after every launch
};

// Query and cache are of one 16-bit type. Pages of layout vllm have 16 tokens, those of the others
// 16 or more.
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
