// reshape_and_cache_per_token_quant: as reshape_and_cache, into int8 or int4 caches of any layout.
// Every (token, KV head) has its own scale. int8:
//   scale = max |x| / 127 over the row x [head_size],  stored = x / scale to nearest even
// A row of zeros has scale 0. A row with a NaN or an infinity has it as its scale. So that row
// reads back as NaN, and no other row does.
//
// int4 (TokenScales has the place of a value), in float32, each operation rounded by itself:
//   low = min x, high = max x, scale = (high - low) / 15, zero = low + 8 * scale
//   n = min(15, (x - low) * (1 / scale) to nearest even)
// A row with scale < 2^-100 is stored as n = 8, scale 0, zero = low. A row with a NaN, or whose
// high - low is not finite, gets scale and zero NaN, and n = 8.
#pragma once
#include "ops/reshape_and_cache.h"

namespace vllm_kernels {

struct ReshapeAndCachePerTokenQuantParams {
  ReshapeAndCacheParams write;  // kv.dtype is int8 or int4; kv's own scales are null
  // [num_blocks, num_kv_heads, block_size]; the last stride is 1, the others are in elements
  float* key_scales;
  float* value_scales;
  float* key_zeros;  // int4 alone; strides of key_scales
  float* value_zeros;
  int64_t key_scales_block_stride;
  int64_t key_scales_head_stride;
  int64_t value_scales_block_stride;
  int64_t value_scales_head_stride;
};

}  // namespace vllm_kernels
