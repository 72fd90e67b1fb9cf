// select_pages: the best pages of each sequence by the bounds of their keys (Quest,
// arXiv:2406.10774), as block tables and lengths for paged_attention.
//
//   score(page) = sum over query heads and components i of max(q_i min_i, q_i max_i)
//
// No q . k of the page is above it. With min <= max it is linear in the bounds:
//   score(page) = sum over i of w_min_i min_i + w_max_i max_i,
//   w_min_i = sum over query heads of min(q_i, 0), w_max_i that of max(q_i, 0).
// A row, which gets one table, is a sequence with all heads, or a sequence with one KV head. All
// query heads of a KV head have the same bounds, so a row needs one dot product a page.
//
// The first sink_pages and the last recent_pages are always kept, then pages by falling score, of
// equal scores the first. A NaN of the query counts as 0; a score of NaN is above all others. Kept
// pages stand in the order of the sequence, the newest one last. Entries after them are 0.
#pragma once
#include "ops/paged_kv.h"
#include "ops/sampling/sampling_math.h"

namespace vllm_kernels {

constexpr int32_t kMaxSelectHeadSize = 4096;

struct SelectPagesParams {
  int32_t* tables;                                // [num_seqs, num_row_heads, budget]
  int64_t tables_seq_stride, tables_head_stride;  // elements
  int32_t* lens;                                  // [num_seqs] tokens of the kept pages
  const void* query;                              // [num_seqs, num_heads, head_size]
  int64_t query_seq_stride, query_head_stride;    // elements
  const void* bounds;           // [num_blocks, num_kv_heads, 2, head_size]: minimum, maximum
  int64_t bounds_block_stride;  // elements; a page's bounds are contiguous
  const int32_t* block_tables;  // [num_seqs, max_pages]
  int64_t block_tables_stride;  // elements
  const int32_t* seq_lens;      // [num_seqs] tokens
  int32_t num_seqs;
  int32_t num_heads, num_kv_heads, head_size;
  int32_t num_row_heads;  // 1, or num_kv_heads: a table for each
  int64_t num_blocks;
  int32_t block_size;  // tokens of a page
  int32_t max_pages;   // of a sequence
  int32_t budget;      // pages
  int32_t sink_pages, recent_pages;
  DType dtype;                 // of query and bounds
  uint32_t* scores = nullptr;  // scratch [num_rows, score_words()]; CPU: twice that

  VLLM_KERNELS_INLINE int64_t num_rows() const { return int64_t{num_seqs} * num_row_heads; }
  VLLM_KERNELS_INLINE int32_t heads_of_row() const {  // KV heads
    return num_row_heads == 1 ? num_kv_heads : 1;
  }
  // Components of a page's bounds that a row reads: neighbours.
  VLLM_KERNELS_INLINE int64_t row_components() const {
    return int64_t{2} * heads_of_row() * head_size;
  }
  // Scores of a row, padded for whole vectors past the end.
  VLLM_KERNELS_INLINE int64_t score_words() const { return (int64_t{max_pages} + 127) / 64 * 64; }

  VLLM_KERNELS_INLINE int64_t length_of(int32_t seq) const {  // tokens; bad ones are cut
    const int64_t length = seq_lens[seq], most = int64_t{max_pages} * block_size;
    return length < 0 ? 0 : length > most ? most : length;
  }
  VLLM_KERNELS_INLINE int32_t pages_of(int64_t length) const {
    return static_cast<int32_t>((length + block_size - 1) / block_size);
  }
  VLLM_KERNELS_INLINE int32_t kept_length(int64_t length, int32_t pages) const {
    return static_cast<int32_t>(pages <= budget ? length
                                                : length - int64_t{pages - budget} * block_size);
  }
  VLLM_KERNELS_INLINE bool always_kept(int32_t page, int32_t pages) const {
    return page < sink_pages || page >= pages - recent_pages;
  }

  // The order of pages: unsigned integers. 0 is free for padding.
  static constexpr uint32_t kAlwaysKept = 0xffffffffu;
  static constexpr uint32_t kBadBlock = 1;  // below -inf
  VLLM_KERNELS_INLINE static uint32_t order_of(float score) {
    const uint32_t ordered = ordered_bits(score);
    return ordered < kAlwaysKept ? ordered : kAlwaysKept - 1;
  }
};

// CPU, before SelectPagesParams: fills `scores`.
struct PageScoresParams {
  SelectPagesParams select;
};

}  // namespace vllm_kernels
