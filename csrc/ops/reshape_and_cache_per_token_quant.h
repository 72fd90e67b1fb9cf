// reshape_and_cache_per_token_quant: as reshape_and_cache, into int8 caches of any layout. Every
// (token, KV head) has its own scale:
//   scale = max |x| / 127 over the row x [head_size],  stored = x / scale to nearest even
// A row of zeros has scale 0. A row with a NaN or an infinity has it as its scale. So that row
// reads back as NaN, and no other row does.
#pragma once
#include "ops/reshape_and_cache.h"

namespace vllm_kernels {

struct ReshapeAndCachePerTokenQuantParams {
  ReshapeAndCacheParams write;  // kv.dtype is int8; kv's own scales are null
  // [num_blocks, num_kv_heads, block_size]; the last stride is 1, the others are in elements
  float* key_scales;
  float* value_scales;
  int64_t key_scales_block_stride;
  int64_t key_scales_head_stride;
  int64_t value_scales_block_stride;
  int64_t value_scales_head_stride;
};

}  // namespace vllm_kernels
