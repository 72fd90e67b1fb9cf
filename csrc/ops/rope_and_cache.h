// rope_and_cache and fused_qk_norm_rope: the processing of a layer's projected heads before
// attention. For one head of one token:
//   x = round(x + bias)            if there is a bias
//   x = rms_norm(x) * weight       query and key, if there is a weight (rms_norm.h)
//   x rotated by its position      query and key (rotary_embedding.h)
// The query is updated in place. Key and value are only read; their results are written to the
// token's slot of the paged cache (reshape_and_cache.h). Without a cache the key is updated in
// place, too.
#pragma once
#include "ops/paged_kv.h"

namespace vllm_kernels {

constexpr int64_t kMaxRopeHeadSize = 256;

// The heads of the query, key or value.
struct ProjectedHeads {
  void* data = nullptr;          // [num_tokens, count, head_size]
  int64_t token_stride = 0;      // elements
  int64_t head_stride = 0;       // elements
  const void* bias = nullptr;    // [count, head_size]
  const void* weight = nullptr;  // [head_size], of the RMS norm
  int32_t count = 0;
};

struct RopeAndCacheParams {
  ProjectedHeads query;
  ProjectedHeads key;
  ProjectedHeads value;       // count 0 without a cache
  const int64_t* positions;   // [num_tokens]
  const void* cos_sin_cache;  // [max_position, rotary_size]: cosines, then sines
  int64_t cos_sin_stride;     // elements between rows
  int64_t max_position;
  bool stores;  // key and value into the cache; otherwise the key is updated in place
  const int64_t* slot_mapping;  // [num_slots]
  int64_t num_slots;            // <= num_tokens; later tokens are not stored
  int64_t num_tokens;
  PagedKv kv;
  int32_t head_size;    // <= kMaxRopeHeadSize
  int32_t rotary_size;  // even, <= head_size
  float epsilon;
  bool is_neox;
  DType dtype;  // of heads, biases and weights
  DType cos_sin_dtype;
  const char* op;  // named in the error of a refused launch
};

}  // namespace vllm_kernels
