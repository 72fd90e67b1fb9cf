// attention_with_kvcache: new tokens go behind the ones that a cache holds, and queries attend to
// both. reshape_and_cache's kernel writes, paged_attention's kernel attends. This struct describes
// the indices that they need and the caller does not have:
//   slots[s * new_tokens + i]   the slot of new token i of sequence s; -1: it is not stored
//   seq_lens[s]                 tokens of sequence s, the new ones included; 0: a padded row
//   query_starts[s]             s * query_len
//   tables[s, c]                s * row_blocks + c: the pages of a cache of rows
// With new tokens, a row is padded if its length is negative, or if its table has no page for the
// first new token.
#pragma once
#include "ops/reshape_and_cache.h"
#include "ops/rows.h"

namespace vllm_kernels {

struct KvcacheIndicesParams {
  // [num_seqs] tokens before the new ones; cumulative: [num_seqs + 1] where each sequence starts
  const int32_t* lengths;
  bool cumulative;
  const int32_t* block_tables;  // [num_seqs, max_blocks_per_seq], -1: no page; null: rows
  int64_t block_table_stride;   // elements between rows
  int64_t row_blocks;           // pages from one row of the cache to the next
  int32_t max_blocks_per_seq;
  int32_t block_shift;  // log2 of the tokens of a page
  int32_t num_seqs;
  int32_t query_len;      // query tokens of each sequence
  int32_t new_tokens;     // of each sequence; 0: none
  int64_t* slots;         // [num_seqs * new_tokens], or null: not needed
  int32_t* seq_lens;      // [num_seqs]
  int32_t* query_starts;  // [num_seqs + 1], or null
  int32_t* tables;        // [num_seqs, max_blocks_per_seq], or null

  // Every iteration i < count() may run on its own.
  VLLM_KERNELS_HOST_DEVICE int64_t count() const {
    const int64_t columns = tables != nullptr ? max_blocks_per_seq : 0;
    const int64_t tokens = slots != nullptr ? new_tokens : 0;
    const int64_t each = columns > tokens ? columns : tokens;
    const int64_t all = each * num_seqs, starts = int64_t{num_seqs} + 1;
    return all > starts ? all : starts;
  }
  VLLM_KERNELS_HOST_DEVICE void run(int64_t i) const {
    if (i < num_seqs) seq_lens[i] = length_after(i);
    if (query_starts != nullptr && i <= num_seqs) {
      query_starts[i] = static_cast<int32_t>(i * query_len);
    }
    if (slots != nullptr && i < int64_t{num_seqs} * new_tokens) {
      slots[i] = slot(i / new_tokens, i % new_tokens);
    }
    if (tables != nullptr && i < int64_t{num_seqs} * max_blocks_per_seq) {
      tables[i] =
          static_cast<int32_t>(i / max_blocks_per_seq * row_blocks + i % max_blocks_per_seq);
    }
  }

  VLLM_KERNELS_HOST_DEVICE int64_t length_before(int64_t seq) const {
    return cumulative ? int64_t{lengths[seq + 1]} - lengths[seq] : lengths[seq];
  }
  // The page of a position >= 0, or -1.
  VLLM_KERNELS_HOST_DEVICE int64_t block_of(int64_t seq, int64_t position) const {
    const int64_t column = position >> block_shift;
    if (column >= max_blocks_per_seq) return -1;
    if (block_tables == nullptr) return seq * row_blocks + column;
    return block_tables[seq * block_table_stride + column];
  }
  // Whether sequence `seq` gets new tokens: it is no padded row.
  VLLM_KERNELS_HOST_DEVICE bool takes_tokens(int64_t seq, int64_t length) const {
    return length >= 0 && block_of(seq, length) >= 0;
  }
  VLLM_KERNELS_HOST_DEVICE int32_t length_after(int64_t seq) const {
    const int64_t length = length_before(seq);
    if (new_tokens > 0 ? !takes_tokens(seq, length) : length < 0) return 0;
    const int64_t after = length + new_tokens;
    return after < INT32_MAX ? static_cast<int32_t>(after) : INT32_MAX;
  }
  VLLM_KERNELS_HOST_DEVICE int64_t slot(int64_t seq, int64_t token) const {
    const int64_t length = length_before(seq);
    if (!takes_tokens(seq, length)) return -1;
    const int64_t position = length + token, block = block_of(seq, position);
    return block < 0 ? -1 : (block << block_shift) + position % (int64_t{1} << block_shift);
  }
};

// CUDA: the indices without slots, and the writing of few new tokens, in one launch. Its writer
// computes the slots; write.slot_mapping is not used.
struct KvcacheAppendParams {
  KvcacheIndicesParams indices;
  ReshapeAndCacheParams write;
};

}  // namespace vllm_kernels
