// reshape_and_cache (layout vllm) and reshape_and_cache_flash (NHD): key and value of token t are
// written to slot slot_mapping[t] of the paged cache. slot = block * block_size + token in the
// block.
//
// An 8-bit cache stores key / k_scale and value / v_scale, rounded to nearest even and saturated.
//
// A token with slot -1 is skipped. Of tokens with a duplicate slot the last one wins, with its
// whole row, on the CPU and on CUDA.
#pragma once
#include "ops/paged_kv.h"

namespace vllm_kernels {

struct ReshapeAndCacheParams {
  const void* key;             // [>= num_tokens, kv.num_kv_heads, kv.head_values()]
  const void* value;           // [>= num_tokens, kv.num_kv_heads, kv.head_values()]
  int64_t key_token_stride;    // elements
  int64_t key_head_stride;     // elements
  int64_t value_token_stride;  // elements
  int64_t value_head_stride;   // elements
  PagedKv kv;
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;
  DType dtype;     // of key and value
  const char* op;  // named in the error of a refused launch
  // CUDA, layout vllm, set by rope_and_cache: `key` repeats `value`, and K is not stored.
  bool values_only = false;

  // Returns `slot`, or -1 if nothing is to be written. A cache holds < 2^31 tokens.
  VLLM_KERNELS_HOST_DEVICE int32_t usable(int64_t slot) const {
    const bool good = slot >= 0 && slot < kv.num_blocks * kv.block_size;
    return good ? static_cast<int32_t>(slot) : -1;
  }
};

}  // namespace vllm_kernels
