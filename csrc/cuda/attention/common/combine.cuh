// Which heads and tokens a CTA of the SIMT kernel, or of v1/v2's mma kernel, serves, and how it
// ends. At the end it combines the warps' partials in shared memory and writes the output. The
// decode kernel combines its partials in attention/decode/decode_kernel.cuh.
#pragma once
#include <cfloat>

#include "cuda/base/ptx.cuh"
#include "cuda/base/types.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// The query heads that one CTA serves: `count` heads from `first` on, all of one KV head.
struct HeadRange {
  int kv_head;
  int first;
  int count;
};

__device__ __forceinline__ HeadRange head_range(const PagedAttentionParams& p, int index,
                                                int heads_per_block) {
  const int group = p.num_heads / p.kv.num_kv_heads;
  const int chunks = (group + heads_per_block - 1) / heads_per_block;
  const int kv_head = index / chunks;
  const int start = (index % chunks) * heads_per_block;
  return {kv_head, kv_head * group + start, min(heads_per_block, group - start)};
}

// The tokens [begin, end) of a sequence that one CTA attends to, for one query token.
struct TokenRange {
  int seq;
  int partition;
  int begin;
  int end;
  int seq_len;
  int first_key;  // row of contiguous keys; 0 for a paged cache
  int query;      // row of the query and out tensors; -1: none
  int position;   // of the query token in its sequence
};

// v1 and v2: CTA `index` serves partition index % max_partitions of sequence index /
// max_partitions.
__device__ __forceinline__ TokenRange token_range(const PagedAttentionParams& p, int64_t index) {
  TokenRange range;
  range.seq = static_cast<int>(index / p.max_partitions);
  range.partition = static_cast<int>(index % p.max_partitions);
  range.seq_len = usable_seq_len(p, range.seq);
  range.begin = range.partition * p.partition_size;
  range.end =
      p.partition_size == 0 ? range.seq_len : min(range.seq_len, range.begin + p.partition_size);
  range.first_key = 0;
  range.query = range.seq;
  range.position = range.seq_len - 1;
  return range;
}

// paged_attention and varlen_attention: the tokens visible to row `query` of the query tensor.
__device__ __forceinline__ TokenRange tokens_of_query(const PagedAttentionParams& p, int query) {
  int seq = query;
  if (p.query_start_loc != nullptr) {  // the last sequence that starts at or before it
    int low = 0, high = p.num_seqs - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.query_start_loc[middle] <= query) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    seq = low;
  }
  const RowRange queries = query_range(p, seq);
  const RowRange keys = key_range(p, seq);
  TokenRange range = {.seq = seq, .partition = 0, .seq_len = keys.count, .first_key = keys.first};
  const int index = query - queries.first;
  range.query = index >= 0 && index < queries.count ? query : -1;
  range.position = range.seq_len - queries.count + index;
  const VisibleTokens visible = visible_tokens(p, range.position, range.position, range.seq_len);
  range.begin = visible.begin;
  range.end = visible.end;
  return range;
}

// Combines `parts` partials in shared memory and writes the CTA's heads.
//   partial_out               [parts][heads.count][head_size], sum of exp2(logit - row_max) * v
//   partial_max, partial_sum  [parts][heads.count], logits in log2 units
template <typename T>
__device__ __forceinline__ void merge_and_write(const PagedAttentionParams& p,
                                                const HeadRange& heads, const TokenRange& tokens,
                                                int parts, const float* partial_out,
                                                const float* partial_max,
                                                const float* partial_sum) {
  const int head_size = p.kv.head_size;
  const float v_scale = p.kv.v_scale != nullptr && size_of(p.kv.dtype) == 1
                            ? p.kv.v_scale[heads.kv_head * p.kv.scale_stride]
                            : 1.0f;
  const bool partitioned = p.partition_size != 0;
  for (int i = threadIdx.x; i < heads.count * head_size / 4; i += blockDim.x) {
    const int head = i / (head_size / 4);
    const int d = i % (head_size / 4) * 4;
    float row_max = kRowMaxInit;
    for (int part = 0; part < parts; ++part) {
      row_max = fmaxf(row_max, partial_max[part * heads.count + head]);
    }
    float total = 0.0f;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int part = 0; part < parts; ++part) {
      const int row = part * heads.count + head;
      const float weight = exp2_approx(partial_max[row] - row_max);
      const float4 value =
          *reinterpret_cast<const float4*>(&partial_out[static_cast<int64_t>(row) * head_size + d]);
      total += weight * partial_sum[row];
      sum.x += weight * value.x;
      sum.y += weight * value.y;
      sum.z += weight * value.z;
      sum.w += weight * value.w;
    }
    const int64_t row = static_cast<int64_t>(tokens.query) * p.num_heads + heads.first + head;
    float factor = v_scale;
    if (p.sinks != nullptr) {
      const float sink = p.sinks[heads.first + head] * kLog2E;
      const float updated = fmaxf(row_max, sink);
      const float weight = exp2_approx(row_max - updated);
      total = total * weight + exp2_approx(sink - updated);
      factor *= weight;
      row_max = updated;
    }
    if (p.lse != nullptr && d == 0) {
      p.lse[row] = total == 0.0f ? -INFINITY : (row_max + log2f(total)) * kLn2;
    }
    // total is 0 where all tokens were masked; the result is then 0. NaN passes through.
    const float scale = total == 0.0f ? 0.0f : factor / total;
    T result[4] = {from_float<T>(sum.x * scale), from_float<T>(sum.y * scale),
                   from_float<T>(sum.z * scale), from_float<T>(sum.w * scale)};
    const auto write = [&](T* to) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[j] = result[j];
    };
    if (p.max_partitions == 1) {
      write(static_cast<T*>(p.out) + tokens.query * p.out_stride +
            static_cast<int64_t>(heads.first + head) * head_size + d);
    }
    if (partitioned && tokens.begin < tokens.end) {
      const int64_t slot = row * p.max_partitions + tokens.partition;
      write(static_cast<T*>(p.tmp_out) + slot * head_size + d);
      if (d == 0) {
        p.exp_sums[slot] = total;
        p.max_logits[slot] = row_max * kLn2;
      }
    }
  }
}

}  // namespace vllm_kernels::cuda
