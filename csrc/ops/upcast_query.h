// e4m3 queries of attention, and their conversion for the kernels that multiply in 16 bits:
//   out = element * scale[kv_head], rounded to `dtype`
#pragma once
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels {

// Beside PagedAttentionParams, whose dtype is then that of out: whether query has e4m3 elements. An
// element stands for element * scale[kv_head * scale_stride].
struct E4M3Query {
  bool on = false;
  const float* scale = nullptr;  // null: 1
  int32_t scale_stride = 0;      // 0: one float; 1: [num_kv_heads]

  VLLM_KERNELS_HOST_DEVICE float of(int kv_head) const {
    return scale == nullptr ? 1.0f : scale[kv_head * scale_stride];
  }
};

// The same call with the converted queries, which are contiguous.
inline PagedAttentionParams with_upcast_query(const PagedAttentionParams& p, const void* query) {
  PagedAttentionParams others = p;
  others.query = query;
  others.query_stride = int64_t{p.num_heads} * p.head_size();
  return others;
}

struct UpcastQueryParams {
  void* out;             // [num_tokens, num_heads, head_size], contiguous
  const void* query;     // [num_tokens, num_heads, head_size] e4m3, contiguous heads
  int64_t query_stride;  // elements between tokens of query
  E4M3Query scales;
  int32_t num_tokens;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  DType dtype;  // of out
};

}  // namespace vllm_kernels
