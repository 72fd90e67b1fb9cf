// e4m3 queries as 16-bit ones, before attention that multiplies in 16 bits.
#pragma once
#include "ops/paged_attention.h"
#include "ops/upcast_query.h"

namespace vllm_kernels::cuda {

// Writes p.dtype [num_tokens, num_heads, head_size] to `out`: each element times the scale of its
// KV head, rounded. With p.concurrent only the tokens of that launch's sequences.
void upcast_query(const PagedAttentionParams& p, const E4M3Query& query, void* out, void* stream);

}  // namespace vllm_kernels::cuda
