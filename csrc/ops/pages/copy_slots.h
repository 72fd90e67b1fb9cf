// copy_slots: in every cache, the token at slot src[i] is copied to slot dst[i], for all i as if
// all were read before any is written. A pair with a slot of -1 is skipped. dst must not name a
// slot twice.
#pragma once
#include <cstdint>

#include "ops/rows.h"

namespace vllm_kernels {

// Where a token lies in a cache: `runs` runs of `run_bytes` neighbouring bytes.
struct TokenGeometry {
  int64_t block_stride;  // bytes
  int64_t token_stride;  // bytes
  int64_t run_stride;    // bytes
  int64_t run_bytes;
  int32_t runs;
  int32_t element_bytes;

  bool operator==(const TokenGeometry&) const = default;
};

struct SlotCache {
  char* start;
  TokenGeometry token;
};

// More pairs do not fit into the memory where a CTA, or a task, holds one access of each.
constexpr int32_t kMaxCopiedSlots = 16384;

struct CopySlotsParams {
  const SlotCache* caches;  // [num_caches], on the host: K and V of every layer
  int64_t num_caches;
  const int64_t* src;  // [num_slots], on the caches' device
  const int64_t* dst;  // [num_slots]
  int32_t num_slots;   // <= kMaxCopiedSlots
  int64_t num_blocks;
  int32_t block_size;
};

}  // namespace vllm_kernels
