// The caller's memory that a batch is written into: what the attention and cache ops read.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "export.h"

namespace vllm_kernels::kv_cache {

struct BatchBuffers;

// What the buffers hold from the last call, so that the next one writes only what changed.
struct WrittenBatch {
  struct Row {
    uint64_t sequence = 0;  // KVCacheManager's serial number of the sequence, 0: none
    int64_t edits = 0;      // its number when the row was written
    int64_t blocks = 0;     // entries written
  };

  std::vector<Row> rows;              // [max_sequences]; empty: nothing is known
  std::vector<int32_t> changed_rows;  // of block_tables in the last call, ascending
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;

  // As if everything had been written, where nothing is known.
  void make_room(const BatchBuffers& buffers);
};

// A batch of n sequences with t query tokens in all fills the first n rows and t slots; the rest is
// padding, for shapes that stay fixed under CUDA graphs.
struct BatchBuffers {
  int32_t* block_tables = nullptr;     // [max_sequences, max_blocks], row_stride apart; entries
                                       // beyond a sequence's blocks are left as they are
  int64_t max_sequences = 0;           // rows
  int64_t max_blocks = 0;              // columns
  int64_t row_stride = 0;              // elements, >= max_blocks
  std::span<int32_t> seq_lens;         // [max_sequences] tokens; padding 0
  std::span<int32_t> query_start_loc;  // [max_sequences + 1] running count; padding t
  std::span<int64_t> slot_mapping;     // [max_tokens] block * block_size + offset; padding -1
  std::span<int64_t> positions;        // [max_tokens] token's index in its sequence; padding 0;
                                       // or empty: not wanted
  WrittenBatch written = {};

  // To be called after anybody else wrote to this memory.
  void invalidate() noexcept { written.rows.clear(); }
};

// Throws InvalidArgument unless the shapes agree and no two buffers overlap.
VLLM_KERNELS_EXPORT void check_buffers(const BatchBuffers& buffers);

}  // namespace vllm_kernels::kv_cache
