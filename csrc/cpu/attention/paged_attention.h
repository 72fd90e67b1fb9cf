// How the general kernel of paged attention on the CPU is cut into tasks.
//
// A tile is a few query tokens of one sequence with the query heads of one KV head: up to
// kTileRows rows that share the K and V they see. What a tile sees is cut in units of unit_tokens
// tokens. All units of the batch, tile after tile, are dealt to the tasks in equal contiguous runs.
// A task writes the tiles that lie wholly inside its run; of a tile that crosses its borders it
// leaves a partial result, at most one at the front of its run and one at the back, and a second
// launch merges these.
#pragma once
#include <cstdint>

#include "cpu/attention/paged_attention_decode.h"

namespace vllm_kernels::cpu {

constexpr int32_t kTileRows = 256;
constexpr int32_t kGeneralUnitTokens = 128;
constexpr int64_t kGeneralTaskBytes = 32 << 10;  // of K and V; less is not worth a thread

struct GeneralAttentionWork {
  PagedAttentionParams params;
  int32_t heads_per_tile;
  int32_t queries_per_tile;
  int32_t head_chunks;  // tiles a KV head needs for its group
  int32_t unit_tokens;
  int32_t tasks = 1;
  int64_t units = 0;
  float* partials = nullptr;  // [tasks][2: front, back][rows][head_size + 2]: sum, max, sum of w v

  int64_t first_unit(int64_t task) const { return units * task / tasks; }
  int64_t partial_size() const {
    return static_cast<int64_t>(heads_per_tile) * queries_per_tile * (params.kv.head_size + 2);
  }
};

struct GeneralAttentionMerge {
  GeneralAttentionWork work;
};

struct AttentionTile {
  int32_t seq;
  int32_t kv_head;
  int32_t first_head;
  int32_t heads;
  int32_t first_token;     // of query
  int32_t queries;         // query tokens
  int32_t first_position;  // of its first query token in the sequence; may be negative
  RowRange keys;           // of the sequence
  int32_t begin, end;      // tokens of the sequence that any of its rows sees
  int64_t first_unit;
  int64_t units;
};

namespace {

inline int32_t smaller(int64_t a, int64_t b) {
  return static_cast<int32_t>(a < b ? a : b);
}

inline int32_t larger(int32_t a, int32_t b) {
  return a > b ? a : b;
}

// Calls body(tile) for the tiles that have one of the units [begin, end), in order. Returns the
// number of units it walked over: with end behind all of them, that of the batch.
template <typename Body>
int64_t for_each_tile(const GeneralAttentionWork& work, int64_t begin, int64_t end, Body&& body) {
  const PagedAttentionParams& p = work.params;
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  const int64_t rows = static_cast<int64_t>(p.kv.num_kv_heads) * work.head_chunks;
  int64_t unit = 0;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    const RowRange range = query_range(p, seq);
    const RowRange keys = key_range(p, seq);
    for (int32_t query = 0; query < range.count; query += work.queries_per_tile) {
      AttentionTile tile{};
      tile.seq = seq;
      tile.first_token = range.first + query;
      tile.queries = smaller(work.queries_per_tile, range.count - query);
      tile.first_position = keys.count - range.count + query;
      tile.keys = keys;
      const VisibleTokens seen = visible_tokens(p, tile.first_position,
                                                tile.first_position + tile.queries - 1, keys.count);
      tile.begin = seen.begin;
      tile.end = seen.end;
      tile.units = (int64_t{tile.end} - tile.begin + work.unit_tokens - 1) / work.unit_tokens;
      if (tile.units == 0) tile.units = 1;
      const int64_t skipped = begin > unit ? (begin - unit) / tile.units : 0;
      for (int64_t row = skipped; row < rows; ++row) {
        tile.first_unit = unit + row * tile.units;
        if (tile.first_unit >= end) return unit;
        const int32_t first = static_cast<int32_t>(row % work.head_chunks) * work.heads_per_tile;
        tile.kv_head = static_cast<int32_t>(row / work.head_chunks);
        tile.first_head = tile.kv_head * group + first;
        tile.heads = smaller(work.heads_per_tile, group - first);
        body(tile);
      }
      unit += rows * tile.units;
    }
  }
  return unit;
}

// The same attention with the batch's own longest query in place of the caller's bound, and without
// a window that no sequence is longer than. Pieces of fixed_split_size must not depend on the
// batch.
[[maybe_unused]] PagedAttentionParams as_the_batch_has_it(const PagedAttentionParams& p) {
  PagedAttentionParams own = p;
  if (p.fixed_split_size > 0) return own;
  int32_t most_queries = 1, most_keys = 0;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    most_queries = larger(most_queries, query_range(p, seq).count);
    most_keys = larger(most_keys, key_range(p, seq).count);
  }
  own.max_query_len = most_queries;
  if (p.sliding_window >= most_keys) own.sliding_window = 0;
  return own;
}

// Whether the kernel of v1 and v2 does it, faster.
[[maybe_unused]] bool is_plain_decode(const PagedAttentionParams& p) {
  if (p.max_query_len > 1 || p.key_start_loc != nullptr) return false;
  return p.kv.layout != KvLayout::kVllm || (p.kv.block_size >= 8 && p.sliding_window == 0);
}

// Cuts the work for `threads` threads; `partials` is left to the caller where tasks > 1.
[[maybe_unused]] GeneralAttentionWork cut_general_attention(const PagedAttentionParams& p,
                                                            int64_t threads) {
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  GeneralAttentionWork work{};
  work.params = p;
  work.heads_per_tile = smaller(group, kTileRows);
  work.queries_per_tile = smaller(kTileRows / work.heads_per_tile, p.max_query_len);
  if (work.queries_per_tile < 1) work.queries_per_tile = 1;
  work.head_chunks = (group + kTileRows - 1) / kTileRows;
  work.unit_tokens = p.fixed_split_size > 0 ? kUncut : kGeneralUnitTokens;
  work.tasks = 1;
  int64_t tokens = 0;
  work.units = for_each_tile(work, 0, INT64_MAX,
                             [&](const AttentionTile& tile) { tokens += tile.end - tile.begin; });
  const int64_t bytes = 2 * tokens * p.kv.head_size * size_of(p.kv.dtype);
  work.tasks = smaller(smaller(threads, work.units), bytes / kGeneralTaskBytes);
  if (work.tasks < 1) work.tasks = 1;
  return work;
}

}  // namespace

}  // namespace vllm_kernels::cpu
