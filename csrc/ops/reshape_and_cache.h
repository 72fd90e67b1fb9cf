// reshape_and_cache (layout vllm) and reshape_and_cache_flash (NHD): token t's keys and values go
// to slot slot_mapping[t] of the paged cache, where slot = block * block_size + token within the
// block.
//
// An 8-bit cache stores key / k_scale and value / v_scale, to nearest even, saturating.
//
// A token with slot -1 is left out. Where a slot comes up more than once the last token wins, with
// whole rows, on the CPU and on CUDA.
#pragma once
#include "ops/paged_kv.h"

namespace vllm_kernels {

struct ReshapeAndCacheParams {
  const void* key;             // [>= num_tokens, kv.num_kv_heads, kv.head_size]
  const void* value;           // [>= num_tokens, kv.num_kv_heads, kv.head_size]
  int64_t key_token_stride;    // elements
  int64_t key_head_stride;     // elements
  int64_t value_token_stride;  // elements
  int64_t value_head_stride;   // elements
  PagedKv kv;
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;
  DType dtype;     // of key and value
  const char* op;  // whose error a refused launch is
  // Layout vllm on CUDA, within rope_and_cache: key is value again and is not stored.
  bool values_only = false;

  // `slot`, or -1 where nothing is to be written. A cache holds fewer than 2^31 tokens.
  VLLM_KERNELS_HOST_DEVICE int32_t usable(int64_t slot) const {
    const bool good = slot >= 0 && slot < kv.num_blocks * kv.block_size;
    return good ? static_cast<int32_t>(slot) : -1;
  }
};

}  // namespace vllm_kernels
