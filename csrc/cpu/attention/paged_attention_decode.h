// How the decode kernel of the CPU is cut into tasks.
//
// A tile is one sequence and one KV head with up to kMaxTileHeads of its query heads. In layout NHD
// it may be several KV heads whose rows are contiguous. A tile's KV range is divided into grains of
// grain_tokens tokens. All grains of the batch, tile after tile, form one list. Each task takes an
// equal and contiguous range of that list, so threads have equal work for any batch.
//
// A task's range of one tile is a split. A task writes the output of a tile that it has whole.
// Otherwise it stores a partial, and a second launch combines the partials (DecodeCombine). A task
// stores at most two partials. One is of a tile that began in an earlier task. The other is of a
// tile that ends in a later task.
#pragma once
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels::cpu {

constexpr int kPartialHeader = 3;  // floats

// The fields that the plans of both attention kernels share.
struct AttentionPlan {
  PagedAttentionParams params;
  int32_t heads_per_tile = 1;  // query heads
  int32_t queries_per_tile = 1;
  int32_t tiles_per_kv_head = 1;  // more than 1 for groups of more heads than a tile may have
  int32_t grain_tokens = 0;
  int32_t tasks = 1;
  int64_t num_grains = 0;  // of the batch
  // [tasks][2][rows of a tile][head_size + kPartialHeader]; index 1 is a tile that begins in this
  // task. A row is row_sum, row_max, exact_sum (epilogue.h), then the unnormalized output.
  float* partials = nullptr;

  // Task t has grains [first_grain(t), first_grain(t + 1)).
  int64_t first_grain(int64_t task) const { return num_grains * task / tasks; }
  int64_t partial_size() const {  // floats
    return int64_t{heads_per_tile} * queries_per_tile * (params.head_size() + kPartialHeader);
  }
  float* partial(int64_t task, bool starts_tile, int64_t row) const {
    return partials + (2 * task + (starts_tile ? 1 : 0)) * partial_size() +
           row * (params.head_size() + kPartialHeader);
  }
  // Chooses the number of tasks for `threads` threads and `bytes` bytes of K and V.
  void set_tasks(int64_t threads, int64_t bytes) {
    constexpr int64_t kMinTaskBytes = 32 << 10;  // less is not worth a thread
    int64_t most = threads < num_grains ? threads : num_grains;
    if (most > bytes / kMinTaskBytes) most = bytes / kMinTaskBytes;
    tasks = most < 1 ? 1 : static_cast<int32_t>(most);
  }
};

// Rows of a tile: row r has query token first_token + r / heads and head first_head + r % heads.
struct TileRows {
  int64_t first_token;
  int32_t first_head;
  int32_t heads;
  int32_t count;
};

struct DecodePlan : AttentionPlan {
  int32_t kv_heads_per_tile = 1;

  int64_t tiles_per_seq() const {
    return int64_t{(params.kv.num_kv_heads + kv_heads_per_tile - 1) / kv_heads_per_tile} *
           tiles_per_kv_head;
  }
};

// The second launch, where tasks > 1.
struct DecodeCombine {
  DecodePlan plan;
};

constexpr int32_t kMaxTileHeads = 64;       // query heads
constexpr int32_t kGrainTokens = 128;       // decode: larger pages are one grain
constexpr int32_t kUnsplit = 1 << 30;       // grain_tokens where tiles must not be split
constexpr int32_t kMaxSpanBytes = 2 << 10;  // of one token; limits contiguous KV heads

namespace {

inline int32_t min_int32(int64_t a, int64_t b) {
  return static_cast<int32_t>(a < b ? a : b);
}

// The sequence's query token; -1 if it has none. Decode sequences have at most one.
inline int32_t query_token(const PagedAttentionParams& p, int32_t seq) {
  const RowRange range = query_range(p, seq);
  return range.count > 0 ? range.first : -1;
}

// The tokens that are visible to it.
inline VisibleTokens decode_visible_tokens(const PagedAttentionParams& p, int32_t seq) {
  if (query_token(p, seq) < 0) return {};
  const int32_t length = usable_seq_len(p, seq);
  return visible_tokens(p, length - 1, length - 1, length);
}

// In layout vllm a grain is made of whole pages.
inline int32_t grain_tokens(const PagedKv& kv) {
  return kv.layout == KvLayout::kVllm && kv.block_size > kGrainTokens ? kv.block_size
                                                                      : kGrainTokens;
}

// KV heads whose rows of one token are contiguous and are read together.
inline int32_t contiguous_kv_heads(const PagedKv& kv) {
  if (kv.layout != KvLayout::kNHD || kv.key_head_stride != kv.head_size ||
      kv.value_head_stride != kv.head_size) {
    return 1;
  }
  const int32_t heads = kMaxSpanBytes / static_cast<int32_t>(kv.head_size * size_of(kv.dtype));
  return heads < 1 ? 1 : heads < kv.num_kv_heads ? heads : kv.num_kv_heads;
}

// Plans for `threads` threads. The caller allocates `partials` if tasks > 1.
inline DecodePlan plan_decode(const PagedAttentionParams& p, int64_t threads) {
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  int32_t kv_heads = contiguous_kv_heads(p.kv);
  if (kv_heads > kMaxTileHeads / group) {
    kv_heads = group < kMaxTileHeads ? kMaxTileHeads / group : 1;
  }
  DecodePlan plan;
  plan.params = p;
  plan.kv_heads_per_tile = kv_heads;
  plan.heads_per_tile = group < kMaxTileHeads ? kv_heads * group : kMaxTileHeads;
  plan.tiles_per_kv_head = (group + kMaxTileHeads - 1) / kMaxTileHeads;
  plan.grain_tokens = p.fixed_split_size > 0 ? kUnsplit : grain_tokens(p.kv);
  int64_t tokens = 0;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    const VisibleTokens visible = decode_visible_tokens(p, seq);
    const int64_t count = visible.end - visible.begin;
    tokens += count;
    plan.num_grains += count == 0 ? 1 : (count + plan.grain_tokens - 1) / plan.grain_tokens;
  }
  const auto num_grains = [&] { return plan.num_grains * plan.tiles_per_seq(); };
  while (plan.kv_heads_per_tile > 1 && num_grains() < 4 * threads) {
    plan.kv_heads_per_tile = (plan.kv_heads_per_tile + 1) / 2;
    plan.heads_per_tile = plan.kv_heads_per_tile * group;
  }
  plan.num_grains = num_grains();
  plan.set_tasks(threads, 2 * tokens * p.kv.num_kv_heads * plan.tiles_per_kv_head * p.kv.head_size *
                              size_of(p.kv.dtype));
  return plan;
}

}  // namespace

}  // namespace vllm_kernels::cpu
