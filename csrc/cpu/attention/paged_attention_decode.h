// How paged attention on the CPU is cut into tasks.
//
// A row is one sequence, one KV head and up to kMaxHeads of its query heads, or several KV heads
// whose tokens lie side by side (layout NHD); it is cut in units of unit_tokens tokens. All units
// of the batch, row after row, are dealt to the tasks in equal contiguous runs, so every thread
// gets the same work whatever the batch looks like. A task writes the rows that lie wholly inside
// its run; of a row that crosses its borders it leaves a partial result, at most one at the front
// of its run and one at the back, and a second launch merges these.
#pragma once
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels::cpu {

struct PagedAttentionWork {
  PagedAttentionParams params;
  int32_t kv_heads_per_row;
  int32_t heads_per_row;  // query heads handled together
  int32_t chunks;         // rows a KV head needs for its group
  int32_t unit_tokens;
  int32_t tasks;
  int64_t units;
  float* partials;  // [tasks][2: front, back][heads_per_row][head_size + 2]: sum, max, sum of w v

  int64_t rows_per_seq() const {
    return int64_t{(params.kv.num_kv_heads + kv_heads_per_row - 1) / kv_heads_per_row} * chunks;
  }
  int64_t first_unit(int64_t task) const { return units * task / tasks; }
  int64_t partial_size() const {
    return static_cast<int64_t>(heads_per_row) * (params.kv.head_size + 2);
  }
};

struct PagedAttentionMerge {
  PagedAttentionWork work;
};

constexpr int32_t kMaxHeads = 64;                  // query heads of a row
constexpr int32_t kUnitTokens = 128;               // of short pages
constexpr int32_t kUncut = 1 << 30;                // tokens: a row is one unit
constexpr int64_t kAttentionTaskBytes = 32 << 10;  // of K and V; less is not worth a thread
constexpr int32_t kSpanBytes = 2 << 10;            // of a token in a row of several KV heads

// The query token of a sequence, which has at most one; -1 where it has none.
inline int32_t query_token(const PagedAttentionParams& p, int32_t seq) {
  const RowRange range = query_range(p, seq);
  return range.count > 0 ? range.first : -1;
}

// The tokens it sees.
inline VisibleTokens row_tokens(const PagedAttentionParams& p, int32_t seq) {
  if (query_token(p, seq) < 0) return {};
  const int32_t length = usable_seq_len(p, seq);
  return visible_tokens(p, length - 1, length - 1, length);
}

// Of layout vllm whole pages.
inline int32_t unit_tokens(const PagedKv& kv) {
  return kv.layout == KvLayout::kVllm && kv.block_size > kUnitTokens ? kv.block_size : kUnitTokens;
}

// How many KV heads of a token lie side by side and are worth reading together.
inline int32_t kv_heads_together(const PagedKv& kv) {
  if (kv.layout != KvLayout::kNHD || kv.key_head_stride != kv.head_size ||
      kv.value_head_stride != kv.head_size) {
    return 1;
  }
  const int32_t heads = kSpanBytes / static_cast<int32_t>(kv.head_size * size_of(kv.dtype));
  return heads < 1 ? 1 : heads < kv.num_kv_heads ? heads : kv.num_kv_heads;
}

// Cuts the work for `threads` threads; `partials` is left to the caller where tasks > 1.
inline PagedAttentionWork cut_paged_attention(const PagedAttentionParams& p, int64_t threads) {
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  int32_t together = kv_heads_together(p.kv);
  if (together > kMaxHeads / group) together = group < kMaxHeads ? kMaxHeads / group : 1;
  PagedAttentionWork work{.params = p,
                          .kv_heads_per_row = together,
                          .heads_per_row = group < kMaxHeads ? together * group : kMaxHeads,
                          .chunks = (group + kMaxHeads - 1) / kMaxHeads,
                          .unit_tokens = p.fixed_split_size > 0 ? kUncut : unit_tokens(p.kv),
                          .tasks = 1,
                          .units = 0,
                          .partials = nullptr};
  int64_t tokens = 0;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    const VisibleTokens seen = row_tokens(p, seq);
    const int64_t count = seen.end - seen.begin;
    tokens += count;
    work.units += count == 0 ? 1 : (count + work.unit_tokens - 1) / work.unit_tokens;
  }
  const auto units = [&] { return work.units * work.rows_per_seq(); };
  while (work.kv_heads_per_row > 1 && units() < 4 * threads) {
    work.kv_heads_per_row = (work.kv_heads_per_row + 1) / 2;
    work.heads_per_row = work.kv_heads_per_row * group;
  }
  work.units = units();
  const int64_t bytes =
      2 * tokens * p.kv.num_kv_heads * work.chunks * p.kv.head_size * size_of(p.kv.dtype);
  int64_t tasks = threads;
  if (tasks > bytes / kAttentionTaskBytes) tasks = bytes / kAttentionTaskBytes;
  if (tasks > work.units) tasks = work.units;
  work.tasks = tasks < 1 ? 1 : static_cast<int32_t>(tasks);
  return work;
}

}  // namespace vllm_kernels::cpu
