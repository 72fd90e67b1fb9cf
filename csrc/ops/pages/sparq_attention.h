// sparq_attention: attention to the tokens with the best approximate scores (SparQ, Ribar et al.,
// arXiv:2312.04985). One query token a sequence. Of a KV head, with its group of query heads q_g:
//
//   chunks   of `chunk` neighbouring components: those with the largest sum over the group of
//   |q_g|,
//            of equal ones the first; i1 are their components
//   scores   s_g(t) = scale_g q_g[i1] . K[t, i1], scale_g = scale sqrt(|q_g|_1 / |q_g[i1]|_1)
//   units    a unit is a token or a page. Its score is the highest one of its tokens t, of the sum
//            over the group of s_g(t) = w . K[t, i1], w = sum over the group of scale_g q_g[i1]
//   kept     sinks, the newest units, then units by falling score: the rules of select_pages
//   out      attention to the tokens of the kept units, by paged_attention's kernel
//
// With a mean of V: out_g = alpha_g out_g + (1 - alpha_g) mean, where alpha_g is the kept part of
// softmax(s_g).
//
// A NaN of the query counts as 0 in the choice. A token whose score is NaN has the lowest one.
//
// Every (sequence, KV head) becomes a sequence of its own for paged_attention: its table has
// entries of a view of the cache with one KV head. Entry e of the view is e * entry_stride elements
// from the cache's start, for K and V, and has the tokens of a unit.
#pragma once
#include "ops/pages/select_pages.h"

namespace vllm_kernels {

constexpr int32_t kMaxSparqHeadSize = 256;
constexpr int32_t kMaxSparqChunks = 64;  // of 4 components or more

struct SparqParams {
  // The choice: query, tables [num_seqs, num_kv_heads, budget], seq_lens, scores. Its pages are
  // units. No bounds.
  SelectPagesParams units;
  PagedKv kv;     // K
  int32_t* lens;  // [num_seqs, num_kv_heads] tokens of the kept units
  float scale;
  int32_t chunk;       // components: kv.x or twice that
  int32_t num_chunks;  // r / chunk
  // Of a block id, a KV head and a unit of the block: the entry of the view.
  int32_t unit_shift;  // 2^unit_shift units a block
  int32_t block_step, head_step, unit_step;
  // With a mean: the log-sum-exp of the approximate scores of kept tokens, and of others.
  float* kept_lse = nullptr;  // [group, num_rows]; null: no mean
  float* rest_lse = nullptr;
  float* unit_lse = nullptr;  // scratch [num_rows, group, score_words()]: that of each unit

  VLLM_KERNELS_INLINE int32_t group() const { return units.num_heads / units.num_kv_heads; }
  VLLM_KERNELS_INLINE int32_t vectors() const { return chunk == kv.x ? 1 : 2; }  // of a chunk
  VLLM_KERNELS_INLINE int32_t block_of(const int32_t* ids, int32_t unit) const {
    return ids[unit >> unit_shift];
  }
  // -1 for a bad block.
  VLLM_KERNELS_INLINE int32_t entry_of(const int32_t* ids, int32_t head, int32_t unit) const {
    const int32_t id = block_of(ids, unit);
    if (id < 0 || id >= kv.num_blocks) return -1;
    return id * block_step + head * head_step + (unit & ((1 << unit_shift) - 1)) * unit_step;
  }
  // Elements from a block's K of a head to component 0 of chunk `index`.
  VLLM_KERNELS_INLINE int64_t chunk_offset(int32_t index) const {
    return int64_t{index} * vectors() * kv.key_chunk_stride;
  }
};

// CPU, before SparqParams: fills `scores` and `unit_lse`.
struct SparqScoresParams {
  SparqParams sparq;
};

}  // namespace vllm_kernels
