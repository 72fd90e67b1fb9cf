// One moment of the cache in numbers.
#pragma once

#include <cstdint>

namespace vllm_kernels::kv_cache {

// Blocks: total = used + cached + free.
struct Statistics {
  int64_t total_blocks = 0;   // without the null block
  int64_t used_blocks = 0;    // held by sequences
  int64_t cached_blocks = 0;  // held by none, with tokens that a new sequence may find
  int64_t free_blocks = 0;    // held by none, empty
  int64_t shared_blocks = 0;  // of the used ones: held by two or more sequences
  int64_t peak_used_blocks = 0;
  int64_t num_sequences = 0;
  int64_t num_swapped_sequences = 0;  // of them, those in host blocks
  int64_t total_host_blocks = 0;
  int64_t used_host_blocks = 0;
  int64_t num_tokens = 0;  // sum over sequences in device blocks; a shared token counts each time
  int64_t table_entries = 0;  // sum over them of their blocks: what would be used unshared
  int64_t waste_slots = 0;    // slots of used blocks that hold no token of any sequence
  // Since construction or reset():
  int64_t num_copies = 0;      // copy-on-write pairs returned
  int64_t num_evictions = 0;   // cached blocks given out anew
  int64_t queried_tokens = 0;  // that allocate() looked up
  int64_t hit_tokens = 0;      // of them, found
};

}  // namespace vllm_kernels::kv_cache
