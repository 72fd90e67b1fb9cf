// paged_attention, and paged_attention_v1 and _v2, its special cases: query tokens attend to the
// pages of their sequence. varlen_attention: to keys and values that lie one after the other.
//   position(i) = seq_len - (query tokens of the sequence) + i      of query token i
//   s(t)   = softcap(scale * q . k[t]) - slope[h] * |t - position|  for the visible tokens t:
//            position - sliding_window < t <= position + window_right
//            and, with a tree mask, the query tokens that the mask has
//   out    = sum_t exp(s(t)) v[t] / (sum_t exp(s(t)) + exp(sink[h]))
//   lse    = log(sum_t exp(s(t)) + exp(sink[h]))
// with softcap(x) = c * tanh(x / c). If no token is visible, out is 0 and lse is the sink, or -inf.
//
// With a stripe, t and position count in the whole sequence, and the cache has some of its tokens.
//
// v1 and v2 have one query token a sequence; v2's scratch is checked and not used.
#pragma once
#include "ops/paged_kv.h"

namespace vllm_kernels {

// vLLM's block-sparse pattern; on when vert_stride > 1. Sparse block b of `block_size` tokens is
// visible to a head if one of these holds:
//   b > (seq_len - 1) / block_size - local_blocks                   b is local
//   (b + head_offset) % vert_stride == 0
// head_offset is
//   (tp_rank * num_heads + head) * head_sliding_step + 1            head_sliding_step >= 0
//   (tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1     head_sliding_step < 0
struct BlockSparse {
  int32_t tp_rank = 0;
  int32_t local_blocks = 0;
  int32_t vert_stride = 0;
  int32_t block_size = 64;
  int32_t head_sliding_step = 0;

  VLLM_KERNELS_HOST_DEVICE bool on() const { return vert_stride > 1; }
  VLLM_KERNELS_HOST_DEVICE int32_t head_offset(int32_t head, int32_t kv_head, int32_t num_heads,
                                               int32_t num_kv_heads) const {
    return head_sliding_step >= 0 ? (tp_rank * num_heads + head) * head_sliding_step + 1
                                  : (tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1;
  }
  VLLM_KERNELS_HOST_DEVICE bool is_visible(int32_t token, int32_t seq_len,
                                           int32_t head_offset) const {
    const int32_t b = token / block_size;
    return b > (seq_len - 1) / block_size - local_blocks || (b + head_offset) % vert_stride == 0;
  }
};

// The new tokens of a sequence as a tree: those of its query tokens that each of them sees. Bit j
// of a word stands for the sequence's query token j. A query token sees itself in any case.
struct TreeMask {
  // [num_tokens, halves] 32 bits each, the low half first; null: all earlier tokens are seen.
  const uint32_t* words = nullptr;
  int32_t halves = 1;  // 2: int64

  VLLM_KERNELS_HOST_DEVICE bool any() const { return words != nullptr; }
  VLLM_KERNELS_HOST_DEVICE int32_t bits() const { return 32 * halves; }
  // Whether query token `index` of a sequence, in row `row` of query, sees the token that comes
  // `other` tokens after the sequence's query token 0. Tokens before that one are visible.
  VLLM_KERNELS_HOST_DEVICE bool is_visible(int32_t row, int32_t index, int32_t other) const {
    if (other < 0 || other == index) return true;
    if (other >= bits()) return false;
    return (words[int64_t{row} * halves + other / 32] >> other % 32 & 1) != 0;
  }
};

// Scratch of one launch on CUDA, zero at first.
constexpr int64_t kPagedAttentionWorkspaceBytes = int64_t{40} << 20;

struct PagedAttentionParams {
  void* out;                    // [num_tokens, num_heads, head_size], contiguous heads
  const void* query;            // [num_tokens, num_heads, head_size], contiguous heads
  int64_t query_stride;         // elements between tokens of query
  PagedKv kv;                   // v1 and v2: layout vllm
  const int32_t* block_tables;  // [num_seqs, max_blocks_per_seq]
  int64_t block_table_stride;   // elements between rows
  int32_t max_blocks_per_seq;
  const int32_t* seq_lens;    // [num_seqs]
  const float* alibi_slopes;  // [num_heads], or null
  int32_t num_seqs;
  int32_t num_heads;    // a multiple of kv.num_kv_heads
  int64_t max_seq_len;  // the caller's bound; a longer row is clamped to it
  float scale;
  DType dtype;  // of out and query
  BlockSparse sparse;

  // v1 and v2 set only num_tokens and out_stride of these.
  const int32_t* query_start_loc = nullptr;  // [num_seqs + 1] first tokens; null: one a sequence
  int32_t num_tokens = 0;                    // of query
  int32_t max_query_len = 1;                 // the caller's bound on a sequence's query tokens
  int64_t out_stride = 0;                    // elements between tokens of out
  float* lse = nullptr;                      // [num_tokens, num_heads] natural log, or null
  const float* sinks = nullptr;              // [num_heads] logits, or null
  // Visible tokens up to a query token's own position, itself included; 0: all.
  int32_t sliding_window = 0;
  // Visible tokens past its position; 0: causal, INT32_MAX: all.
  int32_t window_right = 0;
  float softcap = 0.0f;  // 0: none
  // Tokens of a split in any batch; 0: splits depend on the batch. (The CPU then has no splits.)
  int32_t fixed_split_size = 0;
  // CUDA: the caller promises that pages, tables, lengths and starts are written. They may
  // be read before the primary kernel ends.
  bool kv_ready = false;
  // CUDA, with query_start_loc: seq_lens is [num_seqs + 1], and its differences are the lengths.
  bool has_cumulative_lens = false;
  // Rows of `out` that no sequence owns become 0. (Their lse is always -inf.) On CUDA no sequence
  // owns its tokens past max_query_len.
  bool zero_unowned = false;
  // Not null: no pages. Token t of a sequence is row key_start_loc[seq] + t of keys and values.
  // `kv` describes these as one block in layout NHD. varlen_attention: max_seq_len is the number of
  // its rows; seq_lens and block_tables are null. With seq_lens (CUDA: gathered pages) these have
  // the lengths, and the rows are valid.
  const int32_t* key_start_loc = nullptr;  // [num_seqs + 1]
  // CUDA: this is the second of two concurrent launches that share a batch. Sequences of more than
  // max_query_len query tokens belong to the first one.
  bool concurrent = false;
  // CUDA, contiguous keys: the keys of the longest sequence, if the caller knows them; 0: not
  // known. A hint: the host decides by it whether sequences are split.
  int32_t max_key_len = 0;
  // paged_attention over int8 or int4. Score t is multiplied with the key's scale, weight t with
  // the value's after row_sum has taken it. kv.k_scale and kv.v_scale are then null. Zeros (int4)
  // stay outside of the products, too:
  //   score t = key_scale[t] * (q . (n_t - 8)) + key_zero[t] * (sum of q)
  //   out     = sum of weight t * value_scale[t] * (n_t - 8), plus sum of weight t * value_zero[t]
  TokenScales token_scales;
  // Causal, without a window; max_query_len <= tree_mask.bits().
  TreeMask tree_mask;
  // Without a tree mask or block-sparse pattern.
  Stripe stripe;

  // Of query and out.
  VLLM_KERNELS_HOST_DEVICE int head_size() const { return kv.head_values(); }

  // Whether scores need more than the scale and the mask: softcap or ALiBi.
  VLLM_KERNELS_HOST_DEVICE bool modifies_scores() const {
    return softcap > 0.0f || alibi_slopes != nullptr;
  }
};

// Rows [first, end), clamped to `size` rows. Both may be any number.
struct RowRange {
  int32_t first = 0;
  int32_t count = 0;
};
VLLM_KERNELS_HOST_DEVICE static inline RowRange row_range(int32_t first, int32_t end,
                                                          int64_t size) {
  // The difference must not overflow, asked for or not: nvcc computes max(end - first, 0).
  const int32_t bound = static_cast<int32_t>(size < INT32_MAX ? size : INT32_MAX);
  first = first < 0 ? 0 : first > bound ? bound : first;
  end = end < first ? first : end > bound ? bound : end;
  return {.first = first, .count = end - first};
}

// A sequence's query tokens: never outside of query, never more than the caller's bound.
VLLM_KERNELS_HOST_DEVICE static inline RowRange query_range(const PagedAttentionParams& p,
                                                            int32_t first, int32_t end) {
  RowRange range = row_range(first, end, p.num_tokens);
  if (range.count > p.max_query_len) range.count = p.concurrent ? 0 : p.max_query_len;
  return range;
}
VLLM_KERNELS_HOST_DEVICE static inline RowRange query_range(const PagedAttentionParams& p,
                                                            int32_t seq) {
  if (p.query_start_loc == nullptr) return {.first = seq, .count = 1};
  return query_range(p, p.query_start_loc[seq], p.query_start_loc[seq + 1]);
}

// Tokens of a row that count: never past its table or the caller's bound, never below 0.
VLLM_KERNELS_HOST_DEVICE static inline int32_t usable_length(const PagedAttentionParams& p,
                                                             int64_t length) {
  const int64_t table = static_cast<int64_t>(p.max_blocks_per_seq) * p.kv.block_size;
  if (length > table) length = table;
  if (length > p.max_seq_len) length = p.max_seq_len;
  return length < 0 ? 0 : static_cast<int32_t>(length);
}
// The difference of cumulative lengths. It wraps around, so that any numbers have one.
VLLM_KERNELS_HOST_DEVICE static inline int32_t length_between(int32_t start, int32_t end) {
  return static_cast<int32_t>(static_cast<uint32_t>(end) - static_cast<uint32_t>(start));
}
VLLM_KERNELS_HOST_DEVICE static inline int32_t usable_seq_len(const PagedAttentionParams& p,
                                                              int32_t seq) {
  const int32_t first = p.seq_lens[seq];
  return usable_length(p,
                       p.has_cumulative_lens ? length_between(first, p.seq_lens[seq + 1]) : first);
}

// A sequence's keys: `first` is a row of contiguous keys, 0 of pages.
VLLM_KERNELS_HOST_DEVICE static inline RowRange key_range(const PagedAttentionParams& p,
                                                          int32_t seq) {
  if (p.seq_lens != nullptr) {
    return {.first = p.key_start_loc == nullptr ? 0 : p.key_start_loc[seq],
            .count = usable_seq_len(p, seq)};
  }
  return row_range(p.key_start_loc[seq], p.key_start_loc[seq + 1], p.max_seq_len);
}

// The position of a sequence's query token 0. It may be negative.
VLLM_KERNELS_HOST_DEVICE static inline int32_t first_position(const PagedAttentionParams& p,
                                                              int32_t seq, int32_t num_keys,
                                                              int32_t num_queries) {
  return (p.stripe.any() ? p.stripe.total_lens[seq] : num_keys) - num_queries;
}

// The tokens [begin, end) of `length` that are visible to any query token at positions low .. high.
// With low and high exchanged: to every one of them.
struct VisibleTokens {
  int32_t begin = 0;
  int32_t end = 0;
};
VLLM_KERNELS_HOST_DEVICE static inline VisibleTokens visible_tokens(const PagedAttentionParams& p,
                                                                    int64_t low, int64_t high,
                                                                    int32_t length) {
  const int64_t first = p.sliding_window > 0 ? low - p.sliding_window + 1 : 0;
  const int64_t behind = high + p.window_right + 1;
  const int32_t end = behind < length ? static_cast<int32_t>(behind < 0 ? 0 : behind) : length;
  return {.begin = first < 0 ? 0 : static_cast<int32_t>(first < end ? first : end), .end = end};
}

// The same in tokens of the cache, which may have a shard. `length` counts these.
VLLM_KERNELS_HOST_DEVICE static inline VisibleTokens visible_stored_tokens(
    const PagedAttentionParams& p, int64_t low, int64_t high, int32_t length) {
  if (!p.stripe.any()) return visible_tokens(p, low, high, length);
  const VisibleTokens visible = visible_tokens(p, low, high, INT32_MAX);
  const int32_t begin = p.stripe.count_before(visible.begin),
                end = p.stripe.count_before(visible.end);
  return {.begin = begin < length ? begin : length, .end = end < length ? end : length};
}

}  // namespace vllm_kernels
