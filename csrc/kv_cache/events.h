// What happened to the prefix cache, for routers that send a request where its prefix lies.
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
  Hash hash;    // of the block's tokens and all before them
  Hash parent;  // kStored: of all before them
};

struct Events {
  std::vector<Event> events;    // in the order in which they happened
  std::vector<int32_t> tokens;  // [stored events, block_size]
};

}  // namespace vllm_kernels::kv_cache
