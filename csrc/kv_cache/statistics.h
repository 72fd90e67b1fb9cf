// One moment of the cache in numbers.
#pragma once

#include <cstdint>

namespace vllm_kernels::kv_cache {

struct Statistics {
  int64_t total_blocks = 0;
  int64_t free_blocks = 0;
  int64_t used_blocks = 0;    // total - free
  int64_t shared_blocks = 0;  // of the used ones: held by two or more sequences
  int64_t peak_used_blocks = 0;
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;     // sum over sequences; a shared token counts once per sequence
  int64_t table_entries = 0;  // sum over sequences of their blocks: what would be used unshared
  int64_t waste_slots = 0;    // slots of used blocks that hold no token of any sequence
  int64_t num_copies = 0;     // copy-on-write pairs returned since construction or reset()
};

}  // namespace vllm_kernels::kv_cache
