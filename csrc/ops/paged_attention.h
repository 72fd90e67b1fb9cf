// paged_attention_v1 and _v2: one query token a sequence attends to its pages.
//   out[s, h] = sum_t softmax_t(scale * q[s, h] . k[t] + slope[h] * (t - seq_len + 1)) v[t]
// v1 is partition_size 0: one pass over the sequence. v2 cuts it in partitions of 512 tokens and
// merges their partial results by log-sum-exp. A context of 0 gives 0.
#pragma once
#include "ops/paged_kv.h"

namespace vllm_kernels {

// vLLM's block-sparse pattern; on when vert_stride > 1. Sparse block b of `block_size` tokens is
// seen by a head when it is local, b > (seq_len - 1) / block_size - local_blocks, or when (b +
// head_offset) % vert_stride == 0, with head_offset =
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
  VLLM_KERNELS_HOST_DEVICE bool sees(int32_t token, int32_t seq_len, int32_t head_offset) const {
    const int32_t b = token / block_size;
    return b > (seq_len - 1) / block_size - local_blocks || (b + head_offset) % vert_stride == 0;
  }
};

struct PagedAttentionParams {
  void* out;                    // [num_seqs, num_heads, head_size], contiguous
  const void* query;            // [num_seqs, num_heads, head_size]
  int64_t query_stride;         // elements between sequences of query
  PagedKv kv;                   // layout vllm
  const int32_t* block_tables;  // [num_seqs, max_blocks_per_seq]
  int64_t block_table_stride;   // elements between rows
  int32_t max_blocks_per_seq;
  const int32_t* seq_lens;    // [num_seqs]
  const float* alibi_slopes;  // [num_heads], or null
  int32_t num_seqs;
  int32_t num_heads;    // a multiple of kv.num_kv_heads
  int64_t max_seq_len;  // the caller's bound; a longer row is clamped to it
  float scale;
  DType dtype;  // of out, query and tmp_out
  BlockSparse sparse;

  int32_t partition_size;  // tokens; 0: the whole sequence at once
  int32_t max_partitions;  // of the scratch; 1 when partition_size is 0
  float* exp_sums;         // [num_seqs, num_heads, max_partitions] sum of exp(logit - max)
  float* max_logits;       // [num_seqs, num_heads, max_partitions] largest logit
  void* tmp_out;           // [num_seqs, num_heads, max_partitions, head_size] normalised
};

// Tokens of a row that count: never past its table or the caller's bound, never below 0.
VLLM_KERNELS_HOST_DEVICE inline int32_t usable_seq_len(const PagedAttentionParams& p, int32_t seq) {
  int64_t length = p.seq_lens[seq];
  const int64_t table = static_cast<int64_t>(p.max_blocks_per_seq) * p.kv.block_size;
  if (length > table) length = table;
  if (length > p.max_seq_len) length = p.max_seq_len;
  return length < 0 ? 0 : static_cast<int32_t>(length);
}

}  // namespace vllm_kernels
