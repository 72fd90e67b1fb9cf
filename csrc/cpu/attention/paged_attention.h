// How the general attention kernel of the CPU is cut into tasks. paged_attention runs here unless
// fits_decode_kernel(), and varlen_attention always.
//
// A query tile is a few query tokens of one sequence with the query heads of one KV head. These are
// up to kQueryTileRows rows (PackGQA) that read the same K and V. The visible KV range of a tile is
// divided into grains of grain_tokens tokens. All grains of the batch, tile after tile, form one
// list. Each task takes an equal and contiguous range of that list.
//
// As in paged_attention_decode.h, a task writes the tiles that it has whole and stores partials of
// the others. PagedAttentionCombine is the second launch, which combines the partials.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/attention/paged_attention_decode.h"

namespace vllm_kernels::cpu {

constexpr int32_t kQueryTileRows = 256;

struct PagedAttentionPlan : AttentionPlan {};

// The second launch, where tasks > 1.
struct PagedAttentionCombine {
  PagedAttentionPlan plan;
};

struct QueryTile {
  int32_t seq;
  int32_t kv_head;
  int32_t first_head;
  int32_t heads;
  int32_t first_token;     // a row of query
  int32_t queries;         // query tokens
  int32_t first_position;  // of first_token in the sequence; may be negative
  int32_t first_new;       // position of the sequence's query token 0
  RowRange keys;           // of the sequence
  int32_t begin, end;      // tokens of the sequence that are visible to any row
  int64_t first_grain;
  int64_t num_grains;

  TileRows rows() const { return {first_token, first_head, heads, queries * heads}; }
};

namespace {

inline int32_t max_int32(int32_t a, int32_t b) {
  return a > b ? a : b;
}

// Writes lse -inf and, with p.zero_unowned, out 0 to the rows that no sequence owns. Starts are
// in order, because the binding has checked them.
inline void clear_unowned_rows(const PagedAttentionParams& p) {
  if (p.query_start_loc == nullptr) return;
  const auto clear = [&](int64_t begin, int64_t end) {
    // Not out_stride, which may be any number for a single row.
    const int64_t row_bytes = int64_t{p.num_heads} * p.head_size() * size_of(p.dtype);
    if (p.zero_unowned) {
      std::memset(static_cast<char*>(p.out) + begin * row_bytes, 0, (end - begin) * row_bytes);
    }
    if (p.lse == nullptr) return;
    for (int64_t at = begin * p.num_heads; at < end * p.num_heads; ++at) p.lse[at] = -INFINITY;
  };
  clear(0, p.query_start_loc[0]);
  clear(p.query_start_loc[p.num_seqs], p.num_tokens);
}

// Calls body(tile) for the tiles that have any of the grains [begin, end), in order. If `end` is
// past the last grain, it returns the number of grains of the batch.
template <typename Body>
int64_t for_each_query_tile(const PagedAttentionPlan& plan, int64_t begin, int64_t end,
                            Body&& body) {
  const PagedAttentionParams& p = plan.params;
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  const int64_t rows = static_cast<int64_t>(p.kv.num_kv_heads) * plan.tiles_per_kv_head;
  int64_t grain = 0;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    const RowRange range = query_range(p, seq);
    const RowRange keys = key_range(p, seq);
    for (int32_t query = 0; query < range.count; query += plan.queries_per_tile) {
      QueryTile tile{};
      tile.seq = seq;
      tile.first_token = range.first + query;
      tile.queries = min_int32(plan.queries_per_tile, range.count - query);
      tile.first_new = first_position(p, seq, keys.count, range.count);
      tile.first_position = tile.first_new + query;
      tile.keys = keys;
      const VisibleTokens visible = visible_stored_tokens(
          p, tile.first_position, tile.first_position + tile.queries - 1, keys.count);
      tile.begin = visible.begin;
      tile.end = visible.end;
      tile.num_grains =
          (int64_t{tile.end} - tile.begin + plan.grain_tokens - 1) / plan.grain_tokens;
      if (tile.num_grains == 0) tile.num_grains = 1;
      const int64_t skipped = begin > grain ? (begin - grain) / tile.num_grains : 0;
      for (int64_t row = skipped; row < rows; ++row) {
        tile.first_grain = grain + row * tile.num_grains;
        if (tile.first_grain >= end) return grain;
        const int32_t first =
            static_cast<int32_t>(row % plan.tiles_per_kv_head) * plan.heads_per_tile;
        tile.kv_head = static_cast<int32_t>(row / plan.tiles_per_kv_head);
        tile.first_head = tile.kv_head * group + first;
        tile.heads = min_int32(plan.heads_per_tile, group - first);
        body(tile);
      }
      grain += rows * tile.num_grains;
    }
  }
  return grain;
}

// Replaces the caller's bounds by the bounds of the batch: the longest query, and no sliding window
// if no sequence is longer than it. With fixed_split_size nothing may depend on the batch.
[[maybe_unused]] PagedAttentionParams tighten_bounds(const PagedAttentionParams& p) {
  PagedAttentionParams tight = p;
  if (p.fixed_split_size > 0) return tight;
  int32_t max_query_len = 1, max_keys = 0;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    max_query_len = max_int32(max_query_len, query_range(p, seq).count);
    max_keys = max_int32(max_keys, key_range(p, seq).count);
  }
  tight.max_query_len = max_query_len;
  if (p.sliding_window >= max_keys && !p.stripe.any()) tight.sliding_window = 0;
  return tight;
}

// Whether the decode kernel can run it. It is the faster one.
[[maybe_unused]] bool fits_decode_kernel(const PagedAttentionParams& p) {
  if (p.max_query_len > 1 || p.key_start_loc != nullptr || p.stripe.any()) return false;
  return p.kv.layout != KvLayout::kVllm || (p.kv.block_size >= 8 && p.sliding_window == 0);
}

// Plans for `threads` threads. The caller allocates `partials` if tasks > 1.
[[maybe_unused]] PagedAttentionPlan plan_paged_attention(const PagedAttentionParams& p,
                                                         int64_t threads) {
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  PagedAttentionPlan plan;
  plan.params = p;
  plan.heads_per_tile = min_int32(group, kQueryTileRows);
  plan.queries_per_tile = min_int32(kQueryTileRows / plan.heads_per_tile, p.max_query_len);
  if (plan.queries_per_tile < 1) plan.queries_per_tile = 1;
  plan.tiles_per_kv_head = (group + kQueryTileRows - 1) / kQueryTileRows;
  plan.grain_tokens = p.fixed_split_size > 0 ? kUnsplit : kGrainTokens;
  int64_t tokens = 0;
  plan.num_grains = for_each_query_tile(
      plan, 0, INT64_MAX, [&](const QueryTile& tile) { tokens += tile.end - tile.begin; });
  plan.set_tasks(threads, 2 * tokens * p.kv.head_size * size_of(p.kv.dtype));
  return plan;
}

}  // namespace

}  // namespace vllm_kernels::cpu
