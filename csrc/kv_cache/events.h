// Changes of the prefix cache. A router follows them to send a request to where its prefix is
// cached.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache/siphash.h"

namespace vllm_kernels::kv_cache {

struct Event {
  enum class Kind : int32_t { kStored, kRemoved, kCleared };
  Kind kind = Kind::kCleared;  // kCleared: all blocks at once; the other fields are unset
  int32_t group = 0;
  int32_t block = 0;
  Hash hash;    // of the tokens up to the end of the block
  Hash parent;  // kStored: of the tokens before the block
};

struct Events {
  std::vector<Event> events;    // in the order in which they happened
  std::vector<int32_t> tokens;  // [stored events, shards * block_size]
};

}  // namespace vllm_kernels::kv_cache
