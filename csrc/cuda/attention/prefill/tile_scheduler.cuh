// The tile scheduler of the prefill kernels: cuts the work on the device, from lengths that only
// the device knows.
//
// A work tile is (sequence, KV head, block of packed query rows). Its row i is query token i /
// group of the block, head i % group. Each CTA of a fixed grid takes tile blockIdx.x first, then
// the next one from a counter.
//
// Splits (sm90): where few or unequal tiles would leave SMs without work, several CTAs share the
// keys of a tile (sm90/combine_splits.cuh). A work item is a tile or a split of one. The longest
// tiles of a batch have n splits. Those of a class that ends at token e of the longest one's L have
// n e / L, rounded up, but none of fewer than kMinPrefillSplitTokens.
//
// Order of tiles:
// - KV heads come in sections. The pages of a section stay in L2 while all its tiles read them.
//   Sequences of one tile a head need none: all heads of a page are read at the same time.
// - A section has 16 classes of equal width, by the last visible token of a tile. The class of the
//   latest tokens comes first, so the last tiles are short.
// - Tiles of one KV head follow each other.
//
// A warp computes the schedule by itself, as in attention/decode/tile_scheduler.cuh: a lane holds a
// sequence, and a round is 32 sequences. Early reads: none, the callers wait for the primary kernel
// first.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/attention/common/divide.h"
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/scheduling.cuh"
#include "cuda/attention/common/workspace.h"
#include "cuda/base/device.h"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/reduce.cuh"

namespace vllm_kernels::cuda {

// No sequence is longer, and a position plus this does not overflow.
constexpr int kMaxWindowRight = 1 << 30;

// Boxes of V that TMA copies from pages of layout vllm: V^T, a row of tokens per dimension. The
// largest box that divides a page and a KV tile takes the fewest lines. (mainloop.cuh)
struct ValueBoxes {
  int shift = 0;        // log2 of a box's tokens / 16: 0, 1 or 2
  int swizzle = 7;      // chunk i of 16 bytes of a box lies at i ^ (i / 8 & swizzle)
  int permutation = 3;  // output column n is dimension n ^ (n / 8 & permutation)
};

struct PrefillTile {
  int seq;
  int kv_head;
  int first_row, rows;         // of the sequence's query_len * group
  int first_query;             // row of query of its query token 0
  int position;                // of that token
  int first_key;               // row of token 0 in contiguous keys
  int begin, end;              // tokens visible to any row
  int whole_begin, whole_end;  // tokens visible to every row
  int first_tile, tiles;
};
struct SplitTile : PrefillTile {  // of sm90
  uint16_t splits, split;         // of the tile, and which of them this is
  uint32_t slot;                  // of split 0
};

// Where CTAs that share a work tile leave their results. `slots`: room for so many.
struct PrefillSplits {
  SplitPartials partials = {};
  uint32_t* num_tiles = nullptr;  // work tiles of classes that are split
  SplitTile* tiles = nullptr;     // [slots / 2], split 0 of each of them
  uint32_t slots = 0;
};

// For work tiles of `rows` rows, a multiple of 64.
template <int kHeadSize>
PrefillSplits prefill_splits(const DecodeWorkspace& workspace, int rows) {
  constexpr int64_t kCountBytes = 64, kMaxSlots = prefill_slots(64, kHeadSize);
  static_assert(kCountBytes + kMaxSlots / 2 * int64_t{sizeof(SplitTile)} <=
                kDecodeOutBytes - kMaxSlots * 64 * 4 * kHeadSize);
  const int64_t slots = prefill_slots(rows, kHeadSize);
  const SplitPartials& partials = workspace.by_semaphore;
  char* end = reinterpret_cast<char*>(partials.out) + slots * rows * 4 * kHeadSize;
  return {partials, reinterpret_cast<uint32_t*>(end),
          reinterpret_cast<SplitTile*>(end + kCountBytes), static_cast<uint32_t>(slots)};
}

struct PrefillShape {
  int group;                   // query heads of a KV head
  int page_shift;              // log2 of the tokens of a page
  int head_size;               // of the tensors; the kernel pads it
  int min_rows;                // sequences of fewer query rows a KV head are left out
  float softmax_scale_log2;    // scores to log2 units
  int window_right;            // visible tokens past a query token, at most kMaxWindowRight
  int rows;                    // that a work tile may have: 64 a consumer warpgroup in sm90
  bool query_by_tma;           // a tile's queries are one TMA box
  bool has_concurrent_launch;  // a decode launch for the sequences left out runs concurrently
  FastDivisor group_divisor;
  float section_bytes;                       // K and V of a section of KV heads
  float concurrent_ratio;                    // see concurrent_ratio()
  ValueBoxes value_boxes;                    // sm90, layout vllm
  const int32_t* gathered_starts = nullptr;  // see PrefillLaunch
  bool takes_gathered = false;
  const int32_t* value_starts = nullptr;  // see PrefillLaunch
  PrefillSplits splits = {};
};

// A concurrent launch waits for DRAM, not for SMs. This launch takes only so many CTAs that it
// lasts kConcurrentShare of the other's time:
//   CTAs = ratio * (tokens visible to its work tiles) / (tokens that the other launch reads)
inline float concurrent_ratio(const PagedAttentionParams& p, const DeviceModel& device, int rows,
                              int head_size) {
  const float bytes_per_ns = kReadShareOfBus * device.bytes_per_ns();
  if (bytes_per_ns == 0.0f || device.clock_khz == 0) return INFINITY;  // unknown: every CTA
  const int element_bytes = size_of(p.kv.dtype);
  const float cycles = p.modifies_scores()  ? kPrefillCyclesAdjusted
                       : element_bytes == 1 ? kPrefillCycles8Bit
                                            : kPrefillCycles;
  const float compute_ns = cycles * 1e6f / device.clock_khz * rows * head_size;  // a visible token
  const float read_ns = 2 * head_size * element_bytes / bytes_per_ns;            // a token read
  return compute_ns / (kConcurrentShare * read_ns);
}

// Fills the fields that both prefill kernels set alike.
inline PrefillShape prefill_shape(const PagedAttentionParams& p, int min_query_len) {
  const int group = p.num_heads / p.kv.num_kv_heads;
  const auto l2_bytes = static_cast<float>(current_device_model().l2_bytes);
  return {.group = group,
          .head_size = p.kv.head_size,
          .min_rows = min_query_len * group,
          .softmax_scale_log2 = p.scale * kLog2E,
          .window_right = std::min(p.window_right, kMaxWindowRight),
          .group_divisor = FastDivisor(group),
          .section_bytes = std::min(kMaxSectionBytes, kSectionShareOfL2 * l2_bytes)};
}

// Masked scores are -inf before the scaling, and -inf * 0 is NaN.
__device__ __forceinline__ float usable_scale(float scale) {
  return scale == 0.0f ? 0x1p-100f : scale;
}

// The query token of row `row` in its sequence, and its head. Rows past the last count as the last.
__device__ __forceinline__ int token_of_row(const PrefillShape& shape, const PrefillTile& work_tile,
                                            int row, int& head) {
  const int index = work_tile.first_row + min(row, work_tile.rows - 1);
  const int token = static_cast<int>(shape.group_divisor.divide(index));
  head = work_tile.kv_head * shape.group + index - token * shape.group;
  return token;
}

// What only a scheduler of splits has.
struct SplitScheduler {
  uint32_t splits_ = 1;  // that the longest tiles may have
  int entry_;
  uint32_t slots_before_, entries_before_;  // of the classes before the last tile that are split
};
struct WholeScheduler {};

// kTileRows: rows of a work tile, or 0 for shape.rows. kTokens: tokens of a KV tile. kOnlyPages:
// keys are never contiguous.
template <int kHeadSize, int kTileRows, int kTokens, bool kMaySplit, bool kOnlyPages>
class PrefillTileScheduler : std::conditional_t<kMaySplit, SplitScheduler, WholeScheduler> {
 public:
  using Tile = std::conditional_t<kMaySplit, SplitTile, PrefillTile>;

  // All lanes of a warp. Returns the number of work tiles in classes that are split.
  __device__ __forceinline__ uint32_t build(const PagedAttentionParams& p,
                                            const PrefillShape& shape, int lane) {
    uint32_t row_blocks = 0, longest = 0, shortest = UINT32_MAX;
    float tokens = 0.0f, others = 0.0f;  // visible to work tiles; read by the other launch
    const float window = PrefillTileScheduler::window(p);
#pragma unroll 1
    for (int round = 0; round < rounds_of(p); ++round) {
      load(p, shape, round, lane);
      row_blocks += row_blocks_;
      if (row_blocks_ > 0) {
        longest = max(longest, static_cast<uint32_t>(seq_len_));
        if (kMaySplit) shortest = min(shortest, first_block_end(shape));
        const float visible = fminf(seq_len_ - 0.5f * query_len_, window + tile_rows(shape));
        tokens += row_blocks_ * (visible + kTokens + kEndTokens);
      } else if (query_len_ > 0) {
        others += fminf(seq_len_, window);
      }
    }
    num_items_ = __reduce_add_sync(0xffffffffu, row_blocks) * p.kv.num_kv_heads;
    longest_ = __reduce_max_sync(0xffffffffu, longest);
    num_ctas_ = gridDim.x;
    // No launch that may split has a concurrent one.
    if (!kMaySplit && shape.has_concurrent_launch) {
      choose_ctas(shape, lane_sum(tokens), lane_sum(others));
    }
    uint32_t split_tiles = 0;
    if constexpr (kMaySplit) {
      shortest = __reduce_min_sync(0xffffffffu, shortest);
      const bool one_class = longest_ - shortest < class_tokens();
      if (num_items_ > 0 && !(one_class && 2 * num_items_ > shape.splits.slots)) {
        const uint32_t tiles =
            one_class ? (lane == 0 ? num_items_ : 0) : tiles_of_class(p, shape, lane);
        split_tiles =
            choose_splits(p, shape, tiles, one_class, lane_sum(tokens) * p.kv.num_kv_heads, lane);
      }
      this->slots_before_ = this->entries_before_ = 0;
    }
    before_ = 0;
    if (one_round(p)) {
      class_ = round_ = first_head_ = 0;
      start_round(p, shape);
    } else {  // past the end of round -1: get_tile() starts round 0
      class_ = kPrefillClasses - 1;
      round_ = -1;
      first_head_ = p.kv.num_kv_heads;
      section_heads_ = 1;
      row_blocks_ = 0;
    }
    return split_tiles;
  }

  __device__ __forceinline__ uint32_t num_items() const { return num_items_; }
  // Of the last tile, in PrefillSplits::tiles, or -1. Lane 0.
  __device__ __forceinline__ int entry() const { return this->entry_; }
  // CTAs that take work tiles.
  __device__ __forceinline__ uint32_t num_ctas() const { return kMaySplit ? gridDim.x : num_ctas_; }

  // Writes work item `index` to `work_tile`. Indices rise from call to call. All lanes of a warp.
  // Returns false if a short tile has fewer splits than others of its class, and this is none.
  __device__ __forceinline__ bool get_tile(const PagedAttentionParams& p, const PrefillShape& shape,
                                           uint32_t index, int lane, Tile& work_tile) {
#pragma unroll 1
    for (;;) {
      const uint32_t heads = min(section_heads_, p.kv.num_kv_heads - first_head_);
      const auto [first, end] = blocks_of_class(shape, class_);
      const uint32_t lane_tiles = (end - first) * heads;
      const uint32_t class_tiles = __reduce_add_sync(0xffffffffu, lane_tiles);
      uint32_t splits = 1;
      if constexpr (kMaySplit) {
        if (class_tiles > 0) splits = splits_of_class(p, shape, class_, this->splits_);
      }
      if (index - before_ >= class_tiles * splits) {
        before_ += class_tiles * splits;
        if constexpr (kMaySplit) {
          if (splits > 1) {
            this->slots_before_ += class_tiles * splits;
            this->entries_before_ += class_tiles;
          }
        }
        ++class_;
        if (__any_sync(0xffffffffu, first > 0)) continue;  // later classes have blocks
        class_ = 0;
        first_head_ += section_heads_;
        if (first_head_ < p.kv.num_kv_heads) continue;
        first_head_ = 0;
        do {  // the next round with a work tile
          load(p, shape, ++round_, lane);
        } while (__all_sync(0xffffffffu, row_blocks_ == 0) && round_ + 1 < rounds_of(p));
        start_round(p, shape);
        continue;
      }
      const uint32_t item = index - before_;
      const uint32_t tile = kMaySplit ? divide(item, splits) : item;
      const uint32_t sum = inclusive_sum(lane_tiles);
      const int owner = __ffs(__ballot_sync(0xffffffffu, tile < sum)) - 1;
      const auto of_owner = [&](int value) { return __shfl_sync(0xffffffffu, value, owner); };
      const int local = static_cast<int>(tile) - of_owner(sum - lane_tiles);
      const int last_block = of_owner(end) - 1, row_blocks = last_block + 1 - of_owner(first);
      const int head = divide(local, row_blocks);
      const int query_len = of_owner(query_len_), position = of_owner(seq_len_) - query_len;
      const int first_query = of_owner(first_query_), first_key = of_owner(first_key_);
      bool is_there = true;
      if (lane == 0) {
        work_tile.seq = round_ * 32 + owner;
        work_tile.kv_head = first_head_ + head;
        work_tile.first_row = (last_block - (local - head * row_blocks)) * tile_rows(shape);
        work_tile.rows = min(tile_rows(shape), query_len * shape.group - work_tile.first_row);
        work_tile.first_query = first_query;
        work_tile.position = position;
        work_tile.first_key = first_key;
        find_keys(p, shape, query_len, work_tile);
        if constexpr (kMaySplit) {
          this->entry_ = splits > 1 ? static_cast<int>(this->entries_before_ + tile) : -1;
          work_tile.slot = this->slots_before_ + tile * splits;
          is_there = take_split(splits, item - tile * splits, work_tile);
        }
      }
      return !kMaySplit || __shfl_sync(0xffffffffu, is_there, 0);
    }
  }

 private:
  // Sets the visible tokens of a tile and its KV tiles.
  static __device__ __forceinline__ void find_keys(const PagedAttentionParams& p,
                                                   const PrefillShape& shape, int query_len,
                                                   PrefillTile& work_tile) {
    const int position = work_tile.position;
    const auto position_of = [&](int row) {
      return position + static_cast<int>(shape.group_divisor.divide(row));
    };
    const int low = position_of(work_tile.first_row);
    const int high = position_of(work_tile.first_row + work_tile.rows - 1);
    const auto visible_from = [&](int at) {
      return p.sliding_window > 0 ? max(0, at - p.sliding_window + 1) : 0;
    };
    const auto visible_until = [&](int at) {
      return min(at + shape.window_right + 1, position + query_len);
    };
    work_tile.begin = visible_from(low);
    work_tile.end = visible_until(high);
    work_tile.whole_begin = visible_from(high);
    work_tile.whole_end = visible_until(low);
    work_tile.first_tile = work_tile.begin / kTokens;
    // At least one, so that every output row is written.
    work_tile.tiles = max(0, work_tile.end - 1) / kTokens - work_tile.first_tile + 1;
  }
  // Leaves of a tile's KV tiles those of its split `split`, one of at most `splits`. Returns false
  // if it has fewer.
  static __device__ __forceinline__ bool take_split(int splits, int split, SplitTile& work_tile) {
    const int all = work_tile.tiles;
    const int most = max(1, all * kTokens / kMinPrefillSplitTokens);
    const int wanted = min(splits, most);
    const int tiles = divide(all + wanted - 1, wanted);
    work_tile.splits = divide(all + tiles - 1, tiles);
    work_tile.split = split;
    if (split >= work_tile.splits) return false;
    if (work_tile.splits == 1) return true;
    work_tile.first_tile += split * tiles;
    work_tile.tiles = min(tiles, all - split * tiles);
    work_tile.begin = max(work_tile.begin, work_tile.first_tile * kTokens);
    work_tile.end = min(work_tile.end, (work_tile.first_tile + work_tile.tiles) * kTokens);
    return true;
  }
  static __device__ __forceinline__ int tile_rows(const PrefillShape& shape) {
    return kTileRows > 0 ? kTileRows : shape.rows;
  }
  __device__ __forceinline__ void load(const PagedAttentionParams& p, const PrefillShape& shape,
                                       int round, int lane) {
    const int seq = round * 32 + lane;
    row_blocks_ = query_len_ = seq_len_ = first_query_ = first_key_ = 0;
    if (seq >= p.num_seqs) return;
    const RowRange keys = key_range(p, seq);
    // With lengths in scratch memory, key_start_loc is the caller's and may be negative.
    if (!kOnlyPages) first_key_ = max(keys.first, 0);
    seq_len_ = keys.count;
    const RowRange queries = query_range(p, seq);
    first_query_ = queries.first;
    query_len_ = queries.count;
    const int rows = query_len_ * shape.group;
    const int32_t* starts = shape.gathered_starts;
    if (starts != nullptr && (starts[seq + 1] > starts[seq]) != shape.takes_gathered) return;
    if (rows >= shape.min_rows) row_blocks_ = (rows + tile_rows(shape) - 1) / tile_rows(shape);
  }
  // Sets the KV heads of a section of this round. Sections are about equal. Only pages that several
  // tiles read count.
  __device__ __forceinline__ void start_round(const PagedAttentionParams& p,
                                              const PrefillShape& shape) {
    const float bytes =
        lane_sum(row_blocks_ > 1 ? static_cast<float>(seq_len_) : 0.0f) * token_bytes(p);
    const int heads = p.kv.num_kv_heads;
    const int sections =
        min(heads, static_cast<int>(fminf(bytes * heads / shape.section_bytes, 1e6f)) + 1);
    section_heads_ = (heads + sections - 1) / sections;
  }
  // The lane's blocks of rows [first, end) of a class, by their last visible token.
  struct RowBlocks {
    int first, end;
  };
  __device__ __forceinline__ int class_tokens() const { return longest_ / kPrefillClasses + 1; }
  __device__ __forceinline__ int class_end(int index) const {
    return longest_ - index * class_tokens();
  }
  __device__ __forceinline__ RowBlocks blocks_of_class(const PrefillShape& shape, int index) const {
    const int until = class_end(index), end = blocks_until(shape, until);
    const bool is_last = index + 1 == kPrefillClasses;
    return {is_last ? 0 : blocks_until(shape, until - class_tokens()), end};
  }
  // The last token that a row of the lane's first block sees, without a right window, plus 1. There
  // may be more query tokens than keys.
  __device__ __forceinline__ uint32_t first_block_end(const PrefillShape& shape) const {
    const int tokens = static_cast<int>(shape.group_divisor.divide(tile_rows(shape)));
    return max(0, seq_len_ - max(0, query_len_ - tokens));
  }
  // The number of the lane's blocks of rows whose visible tokens are all below `until`.
  __device__ __forceinline__ int blocks_until(const PrefillShape& shape, int until) const {
    if (until >= seq_len_) return row_blocks_;
    const int tokens = until - shape.window_right - (seq_len_ - query_len_);
    return tokens <= 0 ? 0 : min(row_blocks_, tokens * shape.group / tile_rows(shape));
  }

  // K and V of a KV head.
  static __device__ __forceinline__ float token_bytes(const PagedAttentionParams& p) {
    return static_cast<float>(2 * kHeadSize * size_of(p.kv.dtype));
  }
  static __device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
  }
  // See concurrent_ratio(). Almost all CTAs count as all.
  __device__ __forceinline__ void choose_ctas(const PrefillShape& shape, float tokens,
                                              float others) {
    const float ctas = ceilf(__fdividef(tokens * shape.concurrent_ratio, others));
    if (ctas < kAlmostAllCtas * gridDim.x) num_ctas_ = max(1, static_cast<int>(ctas));
  }

  // Lane i gets the number of work tiles of class i.
  __device__ __forceinline__ uint32_t tiles_of_class(const PagedAttentionParams& p,
                                                     const PrefillShape& shape, int lane) {
    uint32_t blocks = 0;
#pragma unroll 1
    for (int round = 0; round < rounds_of(p); ++round) {
      if (!one_round(p)) load(p, shape, round, lane);
#pragma unroll 1
      for (int index = 0; index < kPrefillClasses; ++index) {
        const auto [first, end] = blocks_of_class(shape, index);
        const uint32_t sum = __reduce_add_sync(0xffffffffu, end - first);
        if (lane == index) blocks += sum;
      }
    }
    return blocks * p.kv.num_kv_heads;
  }

  // The most splits of a tile of a class, if those of the longest tiles have `splits`.
  __device__ __forceinline__ uint32_t splits_of_class(const PagedAttentionParams& p,
                                                      const PrefillShape& shape, int index,
                                                      uint32_t splits) const {
    const float widest = widest_tile(p, shape), end = fminf(class_end(index), widest);
    return min(splits, max(1, static_cast<int>(ceilf(__fdividef(splits * end, widest)))));
  }
  // Tokens that a tile may see.
  __device__ __forceinline__ float widest_tile(const PagedAttentionParams& p,
                                               const PrefillShape& shape) const {
    return fminf(longest_, window(p) + tile_rows(shape));
  }
  static __device__ __forceinline__ float window(const PagedAttentionParams& p) {
    return p.sliding_window > 0 ? p.sliding_window : kMaxWindowRight;
  }

  // Sets the number of splits that the longest tiles may have, and the number of work items. A lane
  // estimates the time of as many splits as its number, in tokens of a CTA. `tiles`: of class
  // `lane`. `tokens`: of all tiles with their ends. Returns the tiles of classes that are split.
  __device__ __forceinline__ uint32_t choose_splits(const PagedAttentionParams& p,
                                                    const PrefillShape& shape, uint32_t tiles,
                                                    bool one_class, float tokens, int lane) {
    static_assert(kMaxPrefillSplits == 32);
    const uint32_t splits = lane + 1;
    const float widest = widest_tile(p, shape);
    uint32_t items = 0, slots = 0, split_tiles = 0;
#pragma unroll 1
    for (int index = 0; index < (one_class ? 1 : kPrefillClasses); ++index) {
      const uint32_t of_class = __shfl_sync(0xffffffffu, tiles, index);
      if (of_class == 0) continue;
      const uint32_t most = splits_of_class(p, shape, index, splits);
      items += of_class * most;
      slots += most > 1 ? of_class * most : 0;
      split_tiles += most > 1 ? of_class : 0;
    }
    tokens -= num_items_ * (kTokens + kEndTokens);
    float time = one_class ? split_time(num_items_, tokens / num_items_, widest, splits, gridDim.x)
                           : unequal_split_time(items, tokens, widest, splits, gridDim.x);
    const bool has_room = slots <= shape.splits.slots && splits * kMinPrefillSplitTokens <= widest;
    time = lane == 0 ? kWorthSplitting * time : has_room ? time : INFINITY;
    const uint32_t min_time = __reduce_min_sync(0xffffffffu, __float_as_uint(time));
    const int best = __ffs(__ballot_sync(0xffffffffu, __float_as_uint(time) == min_time)) - 1;
    this->splits_ = best + 1;
    num_items_ = __shfl_sync(0xffffffffu, items, best);
    return __shfl_sync(0xffffffffu, split_tiles, best);
  }

  uint32_t num_ctas_;
  // of this lane's sequence in this round
  int seq_len_, first_key_, first_query_, query_len_, row_blocks_;
  uint32_t num_items_;
  int longest_;        // tokens
  int class_;          // of the last tile
  int first_head_;     // of the last tile's section
  int section_heads_;  // KV heads of a section
  int round_;          // of the last tile
  uint32_t before_;    // work items of the classes, sections and rounds before it
};

}  // namespace vllm_kernels::cuda
