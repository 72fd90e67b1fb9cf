// The caller's memory that a batch is written into. The attention and cache ops read it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "export.h"

namespace vllm_kernels::kv_cache {

struct BatchBuffers;

// The contents of the buffers after the last call. The next call writes only the changes.
struct WrittenBatch {
  struct Row {
    uint64_t sequence = 0;  // serial number of the sequence; 0: none
    int64_t edits = 0;      // of the sequence, when the row was written
    int64_t blocks = 0;     // entries written
  };

  std::vector<Row> rows;              // [max_sequences]; empty: contents unknown
  std::vector<int32_t> changed_rows;  // rows of block_tables that the last call wrote, ascending
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;

  // Where the contents are unknown: counts every element as written, so that all are written anew.
  void make_room(const BatchBuffers& buffers);
};

// A batch of n sequences with t query tokens in all fills the first n rows and t slots. The rest is
// padding, so that shapes stay fixed under CUDA graphs.
struct BatchBuffers {
  int32_t* block_tables = nullptr;     // [max_sequences, max_blocks], row_stride apart; entries
                                       // past a sequence's blocks are never written
  int64_t max_sequences = 0;           // rows
  int64_t max_blocks = 0;              // columns
  int64_t row_stride = 0;              // elements, >= max_blocks
  std::span<int32_t> seq_lens;         // [max_sequences] tokens of this rank; padding 0
  std::span<int32_t> query_start_loc;  // [max_sequences + 1] prefix sum; padding t
  std::span<int64_t> slot_mapping;     // [max_tokens] block * block_size + offset; -1: padding,
                                       // or on another rank
  std::span<int64_t> positions;        // [max_tokens] index in the sequence; padding 0; or empty
  WrittenBatch written = {};

  // Call it after anybody else wrote to this memory.
  void invalidate() noexcept { written.rows.clear(); }
};

// Throws InvalidArgument unless the shapes agree and no two buffers overlap.
VLLM_KERNELS_EXPORT void check_buffers(const BatchBuffers& buffers);

}  // namespace vllm_kernels::kv_cache
