// Launchers of the sm90 prefill kernels: one file per head size, so that they compile in parallel.
#pragma once
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct PrefillLaunch {
  int min_query_len;           // sequences of fewer query tokens are left out
  bool has_concurrent_launch;  // ... and belong to the concurrent decode launch that follows
  uint32_t* next;              // work tiles handed out; 0 before and after every launch
};

// Queries have 16 bits; the cache has the same type or 8 bits. Keys are contiguous or in pages: of
// 16 tokens, or of a longer power of two (layout vllm: 8-bit caches only).
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
