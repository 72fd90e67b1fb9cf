// A snapshot of the cache in numbers.
#pragma once

#include <cstdint>

namespace vllm_kernels::kv_cache {

// Blocks: total = used + held + cached + free.
struct Statistics {
  int64_t total_blocks = 0;      // without the null block
  int64_t used_blocks = 0;       // held by sequences
  int64_t held_blocks = 0;       // held for a Ledger
  int64_t cached_blocks = 0;     // held by none, findable by a new sequence
  int64_t free_blocks = 0;       // held by none, empty
  int64_t shared_blocks = 0;     // used blocks that two or more sequences hold
  int64_t peak_used_blocks = 0;  // blocks held for a Ledger included
  int64_t num_sequences = 0;
  int64_t num_swapped_sequences = 0;  // the sequences in host blocks
  int64_t total_host_blocks = 0;
  int64_t used_host_blocks = 0;
  int64_t num_tokens = 0;     // of this rank, of sequences in device blocks; a shared token counts
                              // each time
  int64_t table_entries = 0;  // of these sequences: blocks used without sharing
  int64_t waste_slots = 0;    // slots of used blocks without a token of any sequence
  // Since construction or reset():
  int64_t num_copies = 0;      // copy-on-write pairs returned
  int64_t num_evictions = 0;   // cached blocks given out anew
  int64_t queried_tokens = 0;  // tokens that allocate() looked up
  int64_t hit_tokens = 0;      // the looked-up tokens that were cached
};

}  // namespace vllm_kernels::kv_cache
