// e4m3 queries as 16-bit ones, for the attention kernels that multiply in 16 bits:
//   out = element * q_scale[kv_head], rounded to `dtype`
#pragma once
#include <cstdint>

#include "ops/dtype.h"

namespace vllm_kernels {

struct UpcastQueryParams {
  void* out;               // [num_tokens, num_heads, head_size], contiguous
  const void* query;       // [num_tokens, num_heads, head_size] e4m3, contiguous heads
  int64_t query_stride;    // elements between tokens of query
  const float* q_scale;    // null: 1
  int32_t q_scale_stride;  // 0: one float; 1: [num_kv_heads]
  int32_t num_tokens;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  DType dtype;  // of out
};

}  // namespace vllm_kernels
