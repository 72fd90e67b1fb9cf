// How the work of paged_attention on many query rows is cut, on the device, from lengths that only
// the device knows.
//
// An item is (sequence, KV head, chunk of query rows that share the head); its row i
// is query token i / group of the chunk, head i % group. It is nobody else's, so nothing is merged
// and what it gives does not depend on the batch. Each block of a fixed grid takes item blockIdx.x
// first, then whatever comes next. KV heads come in sections whose pages stay in the second-level
// cache while all of their items read them. In a section items that see the most tokens come first,
// in classes of equal width, so that what comes last is short; and those of one KV head follow each
// other.
//
// A warp finds items alone, as in attention/decode/tile_scheduler.cuh: lanes are sequences, 32 at a
// time.
#pragma once
#include "cuda/attention/common/scheduling.cuh"
#include "cuda/base/fast_divmod.cuh"

namespace vllm_kernels::cuda {

constexpr int kPrefillClasses = 16;
constexpr float kSectionBytes = 24e6f;  // of K and V

// What the blocks beside another launch go by, roughly, as an H200 has it: picoseconds of a block
// for a row, a token and a dimension, of 16 bits and of 8, or with scores that are capped or
// biased; tokens that an item's ends are worth; bytes that all blocks read in a nanosecond.
constexpr float kPrefillPicoseconds = 0.75f;
constexpr float k8BitPicoseconds = 1.15f;
constexpr float kAdjustPicoseconds = 1.3f;
constexpr float kEndTokens = 150.0f;
constexpr float kReadBytes = 4200.0f;

// A window that no sequence is longer than, and that a position can be added to.
constexpr int kMaxWindowRight = 1 << 30;

struct PrefillShape {
  int group;                 // query heads of a KV head
  int page_shift;            // log2 of the tokens of a page
  int min_rows;              // sequences of fewer query rows a KV head are left out
  float softmax_scale_log2;  // from product to log2 units
  int window_right;   // tokens after a query token's own that it sees, at most kMaxWindowRight
  int rows;           // of an item, where they are not the same in every launch
  bool query_by_tma;  // an item's queries are a box of the tensor of queries
  bool has_concurrent_launch;  // those other sequences' launch follows, and runs beside this one
  FastDivisor group_divisor;
};

// Scores are masked, as -inf, before they are scaled: by no zero, which would make NaN of them.
__device__ __forceinline__ float usable_scale(float scale) {
  return scale == 0.0f ? 0x1p-100f : scale;
}

struct PrefillTile {
  int seq;
  int kv_head;
  int first_row, rows;         // of the sequence's query_len * group
  int first_query;             // row of query of its query token 0
  int position;                // of that token
  int first_key;               // row of contiguous keys of token 0
  int begin, end;              // tokens that any row sees
  int whole_begin, whole_end;  // tokens that every row sees
  int first_tile, tiles;
};

// kTileRows: of an item, or 0 for shape.rows. kTokens: of a tile.
template <int kHeadSize, int kTileRows, int kTokens>
class PrefillTileScheduler {
 public:
  // All lanes of a warp.
  __device__ __forceinline__ void make(const PagedAttentionParams& p, const PrefillShape& shape,
                                       int lane) {
    uint32_t chunks = 0, longest = 0;
    float tokens = 0.0f, others = 0.0f;  // that chunks see; that sequences left out see
    const float window = p.sliding_window > 0 ? p.sliding_window : kMaxWindowRight;
#pragma unroll 1
    for (int round = 0; round < rounds_of(p); ++round) {
      load(p, shape, round, lane);
      chunks += chunks_;
      if (chunks_ > 0) {
        longest = max(longest, static_cast<uint32_t>(seq_len_));
        const float visible = fminf(seq_len_ - 0.5f * query_len_, window + tile_rows(shape));
        tokens += chunks_ * (visible + kTokens + kEndTokens);
      } else if (query_len_ > 0) {
        others += fminf(seq_len_, window);
      }
    }
    num_tiles_ = __reduce_add_sync(0xffffffffu, chunks) * p.kv.num_kv_heads;
    longest_ = __reduce_max_sync(0xffffffffu, longest);
    class_tokens_ = longest_ / kPrefillClasses + 1;
    blocks_ = gridDim.x;
    if (shape.has_concurrent_launch) choose_blocks(p, shape, lane_sum(tokens), lane_sum(others));
    before_ = 0;
    if (one_round(p)) {
      class_ = round_ = first_head_ = 0;
      start_round(p);
    } else {  // behind the last item of a round that is not there
      class_ = kPrefillClasses - 1;
      round_ = -1;
      first_head_ = p.kv.num_kv_heads;
      section_heads_ = 1;
      chunks_ = 0;
    }
  }

  __device__ __forceinline__ uint32_t num_tiles() const { return num_tiles_; }
  // Blocks that take items.
  __device__ __forceinline__ uint32_t blocks() const { return blocks_; }

  // Puts item `index` down. They are asked for in rising order. All lanes of a warp.
  __device__ __forceinline__ void get_tile(const PagedAttentionParams& p, const PrefillShape& shape,
                                           uint32_t index, int lane, PrefillTile& work_tile) {
#pragma unroll 1
    for (;;) {
      const uint32_t heads = min(section_heads_, p.kv.num_kv_heads - first_head_);
      // The last tokens that the lane's chunks [first, end) see are in this class's range.
      const int until = longest_ - class_ * class_tokens_;
      const int end = chunks_until(shape, until);
      const int first =
          class_ + 1 < kPrefillClasses ? chunks_until(shape, until - class_tokens_) : 0;
      const uint32_t mine = (end - first) * heads;
      uint32_t sum = mine;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
      }
      const uint32_t in_round = __shfl_sync(0xffffffffu, sum, 31);
      if (index - before_ >= in_round) {
        before_ += in_round;
        if (++class_ < kPrefillClasses) continue;
        class_ = 0;
        first_head_ += section_heads_;
        if (first_head_ < p.kv.num_kv_heads) continue;
        first_head_ = 0;
        do {  // the next round that has a chunk
          load(p, shape, ++round_, lane);
        } while (__all_sync(0xffffffffu, chunks_ == 0) && round_ + 1 < rounds_of(p));
        start_round(p);
        continue;
      }
      const int owner = __ffs(__ballot_sync(0xffffffffu, index - before_ < sum)) - 1;
      const auto of_owner = [&](int value) { return __shfl_sync(0xffffffffu, value, owner); };
      const int local = static_cast<int>(index - before_) - of_owner(sum - mine);
      const int last_chunk = of_owner(end) - 1, chunks = last_chunk + 1 - of_owner(first);
      const int head = divide(local, chunks);
      const int query_len = of_owner(query_len_), position = of_owner(seq_len_) - query_len;
      const int first_query = of_owner(first_query_), first_key = of_owner(first_key_);
      if (lane != 0) return;
      work_tile.seq = round_ * 32 + owner;
      work_tile.kv_head = first_head_ + head;
      work_tile.first_row = (last_chunk - (local - head * chunks)) * tile_rows(shape);
      work_tile.rows = min(tile_rows(shape), query_len * shape.group - work_tile.first_row);
      work_tile.first_query = first_query;
      work_tile.position = position;
      work_tile.first_key = first_key;
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
      return;
    }
  }

 private:
  static __device__ __forceinline__ int tile_rows(const PrefillShape& shape) {
    return kTileRows > 0 ? kTileRows : shape.rows;
  }
  static __device__ __forceinline__ int rounds_of(const PagedAttentionParams& p) {
    return (p.num_seqs + 31) / 32;
  }
  __device__ __forceinline__ void load(const PagedAttentionParams& p, const PrefillShape& shape,
                                       int round, int lane) {
    const int seq = round * 32 + lane;
    chunks_ = query_len_ = seq_len_ = first_query_ = first_key_ = 0;
    if (seq >= p.num_seqs) return;
    const RowRange keys = key_range(p, seq);
    first_key_ = keys.first;
    seq_len_ = keys.count;
    const RowRange queries = query_range(p, seq);
    first_query_ = queries.first;
    query_len_ = queries.count;
    const int rows = query_len_ * shape.group;
    if (rows >= shape.min_rows) chunks_ = (rows + tile_rows(shape) - 1) / tile_rows(shape);
  }
  // KV heads of a section, of the round at hand: sections are about equal.
  __device__ __forceinline__ void start_round(const PagedAttentionParams& p) {
    const float bytes =
        lane_sum(chunks_ > 0 ? static_cast<float>(seq_len_) : 0.0f) * token_bytes(p);
    const int heads = p.kv.num_kv_heads;
    const int sections =
        min(heads, static_cast<int>(fminf(bytes * heads / kSectionBytes, 1e6f)) + 1);
    section_heads_ = (heads + sections - 1) / sections;
  }
  // The lane's chunks that see no token from `until` on.
  __device__ __forceinline__ int chunks_until(const PrefillShape& shape, int until) const {
    if (until >= seq_len_) return chunks_;
    const int tokens = until - shape.window_right - (seq_len_ - query_len_);
    return tokens <= 0 ? 0 : min(chunks_, tokens * shape.group / tile_rows(shape));
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
  // The launch beside this one waits for memory, not for multiprocessors: this one's blocks are as
  // few as are done after a good half of its time. It starts on the others at once.
  __device__ __forceinline__ void choose_blocks(const PagedAttentionParams& p,
                                                const PrefillShape& shape, float tokens,
                                                float others) {
    const bool adjusts = p.softcap > 0.0f || p.alibi_slopes != nullptr;
    const float each = adjusts                    ? kAdjustPicoseconds
                       : size_of(p.kv.dtype) == 1 ? k8BitPicoseconds
                                                  : kPrefillPicoseconds;
    const float alone = tokens * each * (tile_rows(shape) * kHeadSize);  // of one block
    const float concurrent = others * token_bytes(p) * (1000.0f / kReadBytes);
    const float blocks = ceilf(__fdividef(alone, 0.55f * concurrent));
    if (blocks < 0.9f * gridDim.x) blocks_ = max(1, static_cast<int>(blocks));
  }

  uint32_t blocks_;
  // this lane's sequence of the round at hand
  int seq_len_, first_key_, first_query_, query_len_, chunks_;
  uint32_t num_tiles_;
  int longest_;        // tokens
  int class_tokens_;   // positions of a class
  int class_;          // of the last item
  int first_head_;     // of the last item's section
  int section_heads_;  // KV heads of a section
  int round_;          // of the last item
  uint32_t before_;    // items of the classes, sections and rounds before it
};

}  // namespace vllm_kernels::cuda
