// paged_attention without tensor cores: any dtype, alignment, page size, mask and block-sparse
// pattern. It takes what the other kernels cannot address (dispatch.cpp says why).
//
// Grid: (splits, query tokens, KV heads x chunks of 8 query heads). CTA: 4 warps. A warp takes 32
// tokens at a time: each lane scores one token for the CTA's query heads, then each lane sums V for
// dimensions lane, lane + 32, ... The warps' partials are combined in shared memory.
//
// A sequence is split if there are few query tokens and it is long. Each CTA then leaves a partial
// in the workspace. The last CTA of a (query token, head chunk) to finish combines them
// (semaphore). Early reads: none. ops/paged_attention.h has the shapes.
#pragma once
#include <algorithm>

#include "cuda/attention/common/combine.cuh"
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/unowned_rows.cuh"
#include "cuda/attention/common/workspace.h"
#include "cuda/base/fp8.cuh"
#include "cuda/base/int4.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/reduce.cuh"

namespace vllm_kernels::cuda {

constexpr int kSimtMaxHeadSize = 256;

// The query heads of a CTA, all of one KV head.
struct HeadRange {
  int kv_head;
  int first;
  int count;
};

__device__ __forceinline__ HeadRange head_range(const PagedAttentionParams& p, int index,
                                                int head_chunks) {
  const int group = p.num_heads / p.kv.num_kv_heads;
  const int kv_head = index / head_chunks;
  const int start = index % head_chunks * kSimtHeads;
  return {kv_head, kv_head * group + start, min(kSimtHeads, group - start)};
}

// The tokens [begin, end) of a sequence that are visible to one query token.
struct TokenRange {
  int seq;
  int begin;
  int end;
  int seq_len;
  int first_key;  // row of contiguous keys; 0 for pages
  int query;      // row of query and out; -1: no sequence owns it
  int position;   // of the query token in its sequence
  int index;      // of it among the sequence's query tokens
};

__device__ __forceinline__ int sequence_of_query(const PagedAttentionParams& p, int query) {
  if (p.query_start_loc == nullptr) return query;
  int low = 0, high = p.num_seqs - 1;  // the last sequence that starts at or before it
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.query_start_loc[middle] <= query) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ TokenRange tokens_of_query(const PagedAttentionParams& p, int query) {
  const int seq = sequence_of_query(p, query);
  const RowRange queries = query_range(p, seq);
  const RowRange keys = key_range(p, seq);
  const int index = query - queries.first;
  const int position = first_position(p, seq, keys.count, queries.count) + index;
  const VisibleTokens visible = visible_stored_tokens(p, position, position, keys.count);
  return {.seq = seq,
          .begin = visible.begin,
          .end = visible.end,
          .seq_len = keys.count,
          .first_key = keys.first,
          .query = index >= 0 && index < queries.count ? query : -1,
          .position = position,
          .index = index};
}

// A warp's running result for the CTA's query heads. Lane l has dimensions l, l + 32, ...
struct SimtState {
  float row_max[kSimtHeads];
  float sum[kSimtHeads];  // this lane's tokens only
  float out[kSimtHeads][kSimtMaxHeadSize / 32];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int head = 0; head < kSimtHeads; ++head) {
      row_max[head] = kRowMaxInit;
      sum[head] = 0.0f;
#pragma unroll
      for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) out[head][i] = 0.0f;
    }
  }

  // One step of 32 scores, one a lane: raises row_max, rescales, and returns this lane's p.
  __device__ __forceinline__ float softmax_step(int head, float score) {
    const float updated = fmaxf(row_max[head], warp_max(score));
    const float factor = update_row_max(row_max[head], updated);
    const float prob = exp2_approx(score - updated);
    sum[head] = sum[head] * factor + prob;
#pragma unroll
    for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) out[head][i] *= factor;
    return prob;
  }

  // Partials in shared memory: stats [warp][head], out [warp][head][head_size].
  __device__ __forceinline__ void store(const HeadRange& heads, int head_size, float2* stats,
                                        float* outs, int warp, int lane) const {
#pragma unroll
    for (int head = 0; head < kSimtHeads; ++head) {
      if (head >= heads.count) break;
      const float total = warp_sum(sum[head]);
      const int row = warp * heads.count + head;
      if (lane == 0) stats[row] = {row_max[head], total};
#pragma unroll
      for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) {
        const int d = i * 32 + lane;
        if (d < head_size) outs[row * head_size + d] = out[head][i];
      }
    }
  }
};

// One CTA's view of the call.
template <typename Query, typename Cache>
struct SimtCta {
  static constexpr bool kIsInt4 = kValuesOf<Cache> == 2;
  const PagedAttentionParams& p;
  const HeadRange heads;
  const TokenRange tokens;
  const float* query;  // shared, [heads][head_size], scaled to log2 units
  float* probs;        // shared, this warp's [heads][32]
  int lane;

  // Bit `head` is set if the token is visible to that head.
  __device__ __forceinline__ uint32_t visible_heads(int token) const {
    if (tree_hides(p, tokens.query, tokens.index, token - tokens.position + tokens.index)) return 0;
    if (!p.sparse.on()) return (1u << heads.count) - 1;
    uint32_t bits = 0;
    for (int head = 0; head < heads.count; ++head) {
      const int offset =
          p.sparse.head_offset(heads.first + head, heads.kv_head, p.num_heads, p.kv.num_kv_heads);
      bits |= p.sparse.is_visible(token, tokens.seq_len, offset) ? 1u << head : 0u;
    }
    return bits;
  }

  __device__ __forceinline__ void scores(float (&score)[kSimtHeads], const Cache* keys, int block,
                                         int slot) const {
#pragma unroll
    for (int head = 0; head < kSimtHeads; ++head) score[head] = 0.0f;
    if (block < 0) return;
    const int stored = p.kv.head_size, head_size = stored * kValuesOf<Cache>;
    const auto add = [&](int d, float key) {
#pragma unroll
      for (int head = 0; head < kSimtHeads; ++head) {
        if (head < heads.count) score[head] += query[head * head_size + d] * key;
      }
    };
    [[maybe_unused]] float2 scale_zero;
    if constexpr (kIsInt4) scale_zero = key_scale_zero(block, slot);
    for (int d = 0; d < stored; ++d) {
      const Cache key = keys[p.kv.key_offset(block, heads.kv_head, slot, d)];
      if constexpr (kIsInt4) {
        add(d, dequantized(key.bits, scale_zero.x, scale_zero.y));
        add(stored + d, dequantized(key.bits >> 4, scale_zero.x, scale_zero.y));
      } else {
        add(d, to_float(key));
      }
    }
  }

  __device__ __forceinline__ float modified(float score, int head, int token) const {
    modify_scores<true>(
        p, score_cap(p.softcap),
        [&] { return ScoreRow{heads.first + head, p.stripe.position_of(token) - tokens.position}; },
        [&](const auto& modification) { score = modification(score, 0); });
    return score;
  }

  // Whether scales of tokens multiply scores and weights. Those of int4 multiply its elements.
  __device__ __forceinline__ bool has_token_scales() const {
    if constexpr (std::is_same_v<Cache, int8_t>) return p.token_scales.any();
    return false;
  }
  // The scales of a token's K and V; 0 where there is no token.
  __device__ __forceinline__ float2 token_scales(int block, int slot) const {
    if (block < 0) return {0.0f, 0.0f};
    const TokenScales& scales = p.token_scales;
    return {scales.key[scales.key_offset(block, heads.kv_head) + slot],
            scales.value[scales.value_offset(block, heads.kv_head) + slot]};
  }

  // int4: scale and zero of a token's K, and of its V. (V: 0 where there is no token.)
  __device__ __forceinline__ float2 key_scale_zero(int block, int slot) const {
    const int64_t at = p.token_scales.key_offset(block, heads.kv_head) + slot;
    return {p.token_scales.key[at], p.token_scales.key_zero[at]};
  }
  __device__ __forceinline__ float2 value_scale_zero(int block, int slot) const {
    if (block < 0) return {0.0f, 0.0f};
    const int64_t at = p.token_scales.value_offset(block, heads.kv_head) + slot;
    return {p.token_scales.value[at], p.token_scales.value_zero[at]};
  }

  // Processes tokens [begin, end) in steps of 32. This warp takes every kSimtWarps-th step.
  __device__ __forceinline__ void attend(SimtState& state, int begin, int end, int warp) const {
    const int stored = p.kv.head_size, head_size = stored * kValuesOf<Cache>;
    const bool contiguous = p.key_start_loc != nullptr;  // all keys are rows of block 0
    const Cache* keys =
        static_cast<const Cache*>(p.kv.key) + tokens.first_key * p.kv.key_token_stride;
    const Cache* values =
        static_cast<const Cache*>(p.kv.value) + tokens.first_key * p.kv.value_token_stride;
    const int32_t* table = p.block_tables + tokens.seq * p.block_table_stride;
    for (int first = begin + warp * 32; first < end; first += kSimtWarps * 32) {
      const int token = first + lane;
      const uint32_t visible = token < end ? visible_heads(token) : 0;
      int block = visible == 0 ? -1 : contiguous ? 0 : table[token / p.kv.block_size];
      if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.kv.num_blocks)) block = -1;
      if (__all_sync(0xffffffffu, block < 0)) continue;  // a block-sparse pattern skips pages
      float score[kSimtHeads];
      scores(score, keys, block, token % p.kv.block_size);
      float value_scale = 1.0f;
      if (has_token_scales()) {
        const float2 scale = token_scales(block, token % p.kv.block_size);
#pragma unroll
        for (int head = 0; head < kSimtHeads; ++head) score[head] *= scale.x;
        value_scale = scale.y;
      }
      [[maybe_unused]] float2 scale_zero;
      if constexpr (kIsInt4) scale_zero = value_scale_zero(block, token % p.kv.block_size);
#pragma unroll
      for (int head = 0; head < kSimtHeads; ++head) {
        if (head >= heads.count) break;
        const bool seen = block >= 0 && (visible >> head & 1) != 0;
        const float masked = seen ? modified(score[head], head, token) : -INFINITY;
        const float prob = state.softmax_step(head, masked);
        probs[head * 32 + lane] = has_token_scales() ? prob * value_scale : prob;
      }
      __syncwarp();
      for (int t = 0; t < 32; ++t) {
        const int from = __shfl_sync(0xffffffffu, block, t);
        if (from < 0) continue;  // V of an absent or hidden token is not read: it may be NaN
        const int slot = (first + t) % p.kv.block_size;
        [[maybe_unused]] float scale, zero;
        if constexpr (kIsInt4) {
          scale = __shfl_sync(0xffffffffu, scale_zero.x, t);
          zero = __shfl_sync(0xffffffffu, scale_zero.y, t);
        }
#pragma unroll
        for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) {
          const int d = i * 32 + lane;
          if (d >= head_size) break;
          const bool upper = kIsInt4 && d >= stored;
          const Cache element =
              values[p.kv.value_offset(from, heads.kv_head, slot, upper ? d - stored : d)];
          float value;
          if constexpr (kIsInt4) {
            value = dequantized(upper ? element.bits >> 4 : element.bits, scale, zero);
          } else {
            value = to_float(element);
          }
#pragma unroll
          for (int head = 0; head < kSimtHeads; ++head) {
            if (head < heads.count) state.out[head][i] += probs[head * 32 + t] * value;
          }
        }
      }
      __syncwarp();
    }
  }

  // Writes 4 dimensions of a row from `d` on, and its log-sum-exp.
  __device__ __forceinline__ void write(int head, int d, const RowState& state) const {
    const int global = heads.first + head;
    const RowResult result = row_result<true>(p, heads.kv_head, global, state.row_max, state.sum);
    const float values[4] = {state.out.x * result.scale, state.out.y * result.scale,
                             state.out.z * result.scale, state.out.w * result.scale};
    Query* out = static_cast<Query*>(p.out) + tokens.query * p.out_stride +
                 int64_t{global} * kValuesOf<Cache> * p.kv.head_size + d;
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = from_float<Query>(values[i]);  // of any alignment
    if (p.lse != nullptr && d == 0) {
      p.lse[static_cast<int64_t>(tokens.query) * p.num_heads + global] = result.lse;
    }
  }
};

template <typename Query, typename Cache>
__global__ void __launch_bounds__(kSimtWarps * 32, sm90a_or(kSimtCtasPerSm, 3))
    paged_attention_simt_kernel(const __grid_constant__ PagedAttentionParams p,
                                const __grid_constant__ SimtShape shape,
                                const __grid_constant__ DecodeWorkspace workspace) {
  // In the loop: query [heads][head_size] and p [warps][heads][32]; then the warps' partials.
  extern __shared__ __align__(16) float simt_shared[];
  __shared__ bool is_last;
  launch_dependents();
  wait_for_primary_kernel();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = blockIdx.y, head_size = p.kv.head_size * kValuesOf<Cache>,
            fours = head_size / 4;
  const TokenRange tokens = tokens_of_query(p, blockIdx.x);
  const int visible = tokens.end - tokens.begin;
  const int num_splits = max(1, (visible - 1) / shape.split_tokens + 1);
  if (tokens.query < 0 && split == 0 && blockIdx.z == 0) {
    clear_row<kValuesOf<Cache>>(p, blockIdx.x, threadIdx.x, kSimtWarps * 32);
  }
  if (tokens.query < 0 || split >= num_splits) return;
  const HeadRange heads = head_range(p, blockIdx.z, shape.head_chunks);
  const float k_scale = sizeof(Cache) == 1 && p.kv.k_scale != nullptr
                            ? p.kv.k_scale[heads.kv_head * p.kv.scale_stride]
                            : 1.0f;
  const Query* rows = static_cast<const Query*>(p.query) + tokens.query * p.query_stride +
                      static_cast<int64_t>(heads.first) * head_size;
  for (int i = threadIdx.x; i < heads.count * head_size; i += blockDim.x) {
    simt_shared[i] = to_float(rows[i]) * p.scale * k_scale * kLog2E;
  }
  __syncthreads();
  const SimtCta<Query, Cache> cta{
      .p = p,
      .heads = heads,
      .tokens = tokens,
      .query = simt_shared,
      .probs = simt_shared + kSimtHeads * head_size + warp * kSimtHeads * 32,
      .lane = lane};
  SimtState state;
  state.clear();
  const int begin = tokens.begin + split * shape.split_tokens;
  cta.attend(state, begin, min(tokens.end, begin + shape.split_tokens), warp);
  __syncthreads();

  float* outs = simt_shared;  // [warps][heads][head_size]
  auto* stats = reinterpret_cast<float2*>(outs + kSimtWarps * heads.count * head_size);
  state.store(heads, head_size, stats, outs, warp, lane);
  __syncthreads();
  // Partials of this (query token, head): [splits][head_size], one after the other.
  const auto partial_row = [&](int head) {
    return (int64_t{tokens.query} * p.num_heads + heads.first + head) * shape.max_splits;
  };
  for (int i = threadIdx.x; i < heads.count * fours; i += blockDim.x) {
    const int head = i / fours, four = i % fours;
    RowState row;
    row.combine<1>(kSimtWarps, stats + head, heads.count,
                   reinterpret_cast<float4*>(outs) + head * fours + four, heads.count * fours,
                   SharedPartials{});
    if (num_splits == 1) {
      cta.write(head, four * 4, row);
    } else {
      const int64_t at = partial_row(head) + split;
      reinterpret_cast<float4*>(workspace.by_semaphore.out)[at * fours + four] = row.out;
      if (four == 0) workspace.by_semaphore.stats[at] = {row.row_max, row.sum};
    }
  }
  if (num_splits == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t last = num_splits - 1;
    const int64_t tile = int64_t{tokens.query} * gridDim.z + blockIdx.z;
    is_last = atomic_inc_acquire_release(&workspace.semaphores[tile], last) == last;
  }
  __syncthreads();
  if (!is_last) return;
  for (int i = threadIdx.x; i < heads.count * fours; i += blockDim.x) {
    const int head = i / fours, four = i % fours;
    RowState row;
    row.combine<1>(
        num_splits, workspace.by_semaphore.stats + partial_row(head), 1,
        reinterpret_cast<float4*>(workspace.by_semaphore.out) + partial_row(head) * fours + four,
        fours, SemaphorePartials{});
    cta.write(head, four * 4, row);
  }
}

// Launches the instantiation of the query's and the cache's type.
inline void launch_simt(const PagedAttentionParams& p, const KernelChoice& choice,
                        const DecodeWorkspace& workspace, void* stream) {
  const dim3 grid(grid_size("paged_attention", choice.grid.x), choice.grid.y, choice.grid.z);
  dispatch_float(p.dtype, [&](auto query) {
    using Query = decltype(query);
    const auto launch = [&](auto cache) {
      launch_kernel("paged_attention", paged_attention_simt_kernel<Query, decltype(cache)>, grid,
                    dim3(kSimtWarps * 32), choice.shared_bytes, stream, p, choice.simt, workspace);
    };
    if (p.kv.dtype == DType::kInt4x2) return launch(ScaledInt4{});
    dispatch_cache<Query>(p.kv.dtype, launch);
  });
}

}  // namespace vllm_kernels::cuda
