// paged_attention and varlen_attention of many query rows a sequence on the tensor cores as every
// architecture from sm_80 on has them. On Hopper it takes what paged_attention_prefill.cuh does
// not: 8-bit caches, other head sizes and pages.
//
// A block takes items (attention_prefill_work.cuh) one after the other, over tiles of 64 tokens
// from the last to the first. All its warps copy tiles, one ahead, and attend, 16 or 32 of the rows
// each (attention_prefill_mma.cuh). Two blocks share a multiprocessor where heads are small, so
// that one's products run while the other takes exponentials or waits.
//
// Copies are of 16 bytes, by cp.async, each with its token's place of its own: pages may have any
// length. An 8-bit cache's copies stay with the thread that asked for them; it widens them into
// the tile of 16 bits.
#pragma once
#include "cuda/attention_prefill_mma.cuh"
#include "cuda/cache_element.cuh"
#include "cuda/launch.cuh"
#include "cuda/paged_attention_prefill_mma.h"

namespace vllm_kernels::cuda {

// Strides are in units of 16 bytes.
struct PrefillMmaShape {
  PrefillShape plan;
  ScoreCap cap;
  bool leads;  // sequences of few query tokens are the next launch's
  uint32_t key_block, key_head;
  uint32_t key_token;  // 1 in layout vllm
  uint32_t key_chunk;  // layout vllm: to the next 16 bytes of a token
  uint32_t value_block, value_head;
  uint32_t value_row;  // to the next token; layout vllm: to the next dimension, in bytes
  uint32_t page_tokens;
  FastDivisor page_divisor;
};

struct PrefillMmaItem : PrefillItem {
  int length;   // of the sequence
  int asks_at;  // the tile at which the block asks for its next item
};

// What the query token at `position` sees of a sequence: tokens [first_seen, behind_seen).
__device__ __forceinline__ int first_seen(const PagedAttentionParams& p, int position) {
  return p.sliding_window > 0 ? max(0, position - p.sliding_window + 1) : 0;
}
__device__ __forceinline__ int behind_seen(const PrefillMmaShape& shape, int position, int length) {
  return min(length, position + shape.plan.window_right + 1);
}

// Tokens that any row of a warp sees, and those that every row sees.
struct alignas(16) WarpSight {
  int begin, end;
  int whole_begin, whole_end;
};

template <typename Config>
struct PrefillMmaShared {
  using Plan = PrefillPlan<Config::kHeadSize, Config::kRows, Config::kTokens, true>;
  PrefillMmaItem items[2];       // seq < 0: there are no more
  uint32_t present[2][2];        // bits, of a stage's tokens
  float factors[Config::kRows];  // what undoes a query row's scaling
  WarpSight sights[Config::kWarps];
  alignas(Plan) char plans[32 * sizeof(Plan)];  // the first warp's lanes'

  __device__ __forceinline__ Plan& plan(int lane) { return reinterpret_cast<Plan*>(plans)[lane]; }
};

// Where a token of a group of 16 lies.
struct TokenPlace {
  uint64_t key, value;  // units of 16 bytes; value in layout vllm: of its page's row 0
  int in_page;
  bool there;  // its page is

  __device__ __forceinline__ TokenPlace of_lane(int lane) const {
    return {.key = __shfl_sync(0xffffffffu, key, lane),
            .value = __shfl_sync(0xffffffffu, value, lane),
            .in_page = __shfl_sync(0xffffffffu, in_page, lane),
            .there = __shfl_sync(0xffffffffu, there, lane) != 0};
  }
};

// One block's copies of tiles. Warp w's are of the w % 4-th 16 tokens, and of all dimensions or,
// with 8 warps, of the w / 4-th half; a lane's pieces are of 16 bytes.
template <typename Config>
struct PrefillMmaCopies {
  static constexpr bool kRows = Config::kForm == PageForm::kRows;
  static constexpr int kHeadSize = Config::kHeadSize;
  static constexpr int kHalves = Config::kWarps / 4;
  static constexpr int kElements = Config::kWidens ? 16 : 8;       // of a copy
  static constexpr int kChunks = kHeadSize / kElements / kHalves;  // of a token, a warp's
  static constexpr int kDimensions = kHeadSize / kHalves;          // a warp's
  static constexpr int kPieces = kChunks / 2;                      // of a lane, of K and of V
  // Rows: lanes side by side in one, and the pieces of a lane in one.
  static constexpr int kAcross = kChunks & -kChunks, kTimes = kChunks / kAcross;
  static constexpr uint32_t kTileBytes = Config::kTileBytes;

  const PagedAttentionParams& p;
  const PrefillMmaShape& shape;
  uint32_t storage;  // stages of K and V, then the raw copies
  uint32_t warp, lane;

  __device__ __forceinline__ uint32_t key_at(int stage) const {
    return storage + stage * 2 * kTileBytes;
  }
  __device__ __forceinline__ uint32_t value_at(int stage) const {
    return key_at(stage) + kTileBytes;
  }
  // First of this warp's 16 tokens.
  __device__ __forceinline__ int first_of(int tile) const {
    return tile * Config::kTokens + static_cast<int>(group()) * 16;
  }

  // Starts the copies of a tile, and says which of its tokens are there. All warps.
  __device__ __forceinline__ void start(const PrefillMmaItem& item, int tile, int stage,
                                        uint32_t (&present)[2]) const {
    const int first = first_of(tile);
    uint32_t bits = ~0u;
    if (!copy_whole(item, first, stage)) {
      const TokenPlace place = locate(item, first + lane % 16);
      bits = ~__ballot_sync(0xffffffffu, !place.there && sees(item, first + lane % 16));
      if constexpr (kRows) {
        copy_rows(place, stage);
      } else {
        copy_pages(item, first, place, stage);
      }
    }
    if (lane == 0 && warp < 4) {
      reinterpret_cast<uint16_t*>(present)[warp] = static_cast<uint16_t>(bits);
    }
    commit_copies();
  }

  // Once this thread's copies of a tile are there: the tile as it is to lie, where it does not yet.
  __device__ __forceinline__ void settle(const PrefillMmaItem& item, int tile, int stage) const {
    // Tokens of V before `begin` may be anything, and are to count as 0.
    const int hidden = kRows ? 0 : min(16, max(0, item.begin - first_of(tile)));
    if constexpr (Config::kWidens) {
      switch (p.kv.dtype) {
        case DType::kFp8E4M3:
          return widen_tile<__nv_fp8_e4m3>(hidden, stage);
        case DType::kFp8E5M2:
          return widen_tile<__nv_fp8_e5m2>(hidden, stage);
        default:
          return widen_tile<int8_t>(hidden, stage);
      }
    } else if constexpr (!kRows) {
      if (hidden == 0 || hidden == 16) return;  // 16: none of them was copied
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) {
        const uint32_t at = value_at(stage) + value_chunk(dimension(i), lane % 2);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int token = static_cast<int>(lane % 2) * 8 + 2 * pair;
          const uint32_t keep =
              (token >= hidden ? 0xffffu : 0u) | (token + 1 >= hidden ? 0xffff0000u : 0u);
          store_shared(at + 4 * pair, load_shared(at + 4 * pair) & keep);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t group() const { return warp % 4; }
  // A lane's i-th piece of K, and of V in rows: `chunk` of a token of the 16.
  __device__ __forceinline__ uint32_t token(int i) const {
    return kRows ? lane / kAcross + 32 / kAcross * (i / kTimes) : lane % 16;
  }
  __device__ __forceinline__ uint32_t chunk(int i) const {
    return warp / 4 * kChunks + (kRows ? lane % kAcross + i % kTimes * kAcross : lane / 16 + 2 * i);
  }
  // Its i-th piece of V in layout vllm: 16 tokens of a dimension in 8 bits, 8 of them in 16.
  __device__ __forceinline__ uint32_t dimension(int i) const {
    return warp / 4 * kDimensions + (Config::kWidens ? lane + 32 * i : lane / 2 + 16 * i);
  }
  // Where these pieces go.
  __device__ __forceinline__ uint32_t key_to(int i, int stage) const {
    return Config::kWidens ? raw_at(i) : key_at(stage) + row_to(i);
  }
  __device__ __forceinline__ uint32_t value_to(int i, int stage) const {
    if (Config::kWidens) return raw_at(kPieces + i);
    return value_at(stage) + (kRows ? row_to(i) : value_chunk(dimension(i), lane % 2));
  }
  // row_chunk() of a piece, from that of the first where that is quicker.
  __device__ __forceinline__ uint32_t row_to(int i) const {
    const uint32_t first = row_chunk(token(0), chunk(0));
    if constexpr (kRows && kTimes == 1) {
      const int tokens = 32 / kAcross * i;
      return (first ^ tokens % 8 * 16) + tokens * kColumnBytes;
    } else if constexpr (!kRows && kChunks % 8 == 0) {
      return (first ^ 2 * i % 8 * 16) + 2 * i / 8 * kColumnStride<Config::kTokens>;
    } else {
      return row_chunk(token(i), chunk(i));
    }
  }
  __device__ __forceinline__ uint32_t raw_at(int piece) const {
    return storage + 4 * kTileBytes + (piece * Config::kThreads + warp * 32 + lane) * 16;
  }
  // Bytes from a tile on: 8 dimensions of one of the warp's tokens; 8 tokens of a dimension of V^T.
  __device__ __forceinline__ uint32_t row_chunk(uint32_t token, uint32_t chunk) const {
    return chunk / 8 * kColumnStride<Config::kTokens> + (group() * 16 + token) * kColumnBytes +
           ((chunk ^ token) % 8) * 16;
  }
  __device__ __forceinline__ uint32_t value_chunk(uint32_t d, uint32_t half) const {
    return d * kColumnBytes + (group() * 2 + half ^ value_swizzle(d)) * 16;
  }

  // Whether the item sees a token, or one that is copied with it.
  __device__ __forceinline__ bool sees(const PrefillMmaItem& item, int token) const {
    const int together = kRows ? 1 : Config::kWidens && shape.page_tokens % 16 == 0 ? 16 : 8;
    return (token | (together - 1)) >= item.begin && (token & -together) < item.end;
  }
  __device__ __forceinline__ TokenPlace locate(const PrefillMmaItem& item, int token) const {
    TokenPlace place;
    int block = -1;
    place.in_page = item.first_key + token;
    if (p.key_start_loc != nullptr) {
      block = sees(item, token) ? 0 : -1;
    } else {
      const uint32_t page = shape.page_divisor.divide(token);
      place.in_page = token - page * shape.page_tokens;
      if (sees(item, token)) block = p.block_tables[item.seq * p.block_table_stride + page];
    }
    place.there = static_cast<uint32_t>(block) < static_cast<uint64_t>(p.kv.num_blocks);
    const uint64_t from = place.there ? block : 0;
    place.key = from * shape.key_block + uint64_t{shape.key_head} * item.kv_head +
                static_cast<uint64_t>(place.in_page) * shape.key_token;
    place.value = from * shape.value_block + uint64_t{shape.value_head} * item.kv_head;
    if (kRows) place.value += static_cast<uint64_t>(place.in_page) * shape.value_row;
    return place;
  }

  __device__ __forceinline__ uint32_t head_size() const { return p.kv.head_size; }
  __device__ __forceinline__ const char* keys(uint64_t units) const {
    return static_cast<const char*>(p.kv.key) + units * 16;
  }
  __device__ __forceinline__ const char* values(uint64_t units) const {
    return static_cast<const char*>(p.kv.value) + units * 16;
  }

  // Rows of tokens that may lie anywhere.
  __device__ __forceinline__ void copy_rows(const TokenPlace& mine, int stage) const {
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const TokenPlace place = mine.of_lane(token(i));
      const int bytes = place.there ? 16 : 0;
      if (chunk(i) * kElements >= head_size()) continue;
      copy16_async(key_to(i, stage), keys(place.key + chunk(i)), bytes);
      copy16_async(value_to(i, stage), values(place.value + chunk(i)), bytes);
    }
  }
  // The 16 tokens, if the item sees all of them and they lie in one page that is there.
  __device__ __forceinline__ bool copy_whole(const PrefillMmaItem& item, int first,
                                             int stage) const {
    if (first < item.begin || first + 16 > item.end) return false;
    uint32_t block = 0, in_page = item.first_key + first;
    if (p.key_start_loc == nullptr) {
      if (shape.page_tokens % 16 != 0) return false;
      const uint32_t page = shape.page_divisor.divide(first);
      in_page = first - page * shape.page_tokens;
      block = p.block_tables[item.seq * p.block_table_stride + page];
      if (block >= static_cast<uint64_t>(p.kv.num_blocks)) return false;
    }
    uint64_t key_units = uint64_t{block} * shape.key_block +
                         uint64_t{static_cast<uint32_t>(item.kv_head)} * shape.key_head +
                         uint64_t{in_page + token(0)} * shape.key_token;
    uint64_t value_units = uint64_t{block} * shape.value_block +
                           uint64_t{static_cast<uint32_t>(item.kv_head)} * shape.value_head;
    uint64_t key_step, value_step;  // bytes to the next piece
    if constexpr (kRows) {
      key_units += chunk(0);
      value_units += uint64_t{in_page + token(0)} * shape.value_row + chunk(0);
      key_step = uint64_t{shape.key_token} * (16 * 32 / kAcross);
      value_step = uint64_t{shape.value_row} * (16 * 32 / kAcross);
    } else {
      key_units += uint64_t{shape.key_chunk} * chunk(0);
      key_step = uint64_t{shape.key_chunk} * 32;
      value_step = uint64_t{shape.value_row} * (Config::kWidens ? 32 : 16);
    }
    const char* key = keys(key_units);
    const char* value = values(value_units);
    if constexpr (!kRows) {
      value += uint64_t{shape.value_row} * dimension(0) +
               (Config::kWidens ? in_page : (in_page + lane % 2 * 8) * 2);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int further = kRows ? i % kTimes * kAcross * 16 : 0;
      if (chunk(i) * kElements < head_size()) copy16_async(key_to(i, stage), key + further);
      if ((kRows ? chunk(i) * kElements : dimension(i)) < head_size()) {
        copy16_async(value_to(i, stage), value + further);
      }
      if (!kRows || i % kTimes == kTimes - 1) {
        key += key_step;
        value += value_step;
      }
    }
    return true;
  }
  // Layout vllm.
  __device__ __forceinline__ void copy_pages(const PrefillMmaItem& item, int first,
                                             const TokenPlace& mine, int stage) const {
    const char* key = keys(mine.key + uint64_t{shape.key_chunk} * chunk(0));
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      if (chunk(i) * kElements < head_size()) {
        copy16_async(key_to(i, stage), key, mine.there ? 16 : 0);
      }
      key += uint64_t{shape.key_chunk} * 32;
    }
    if (!Config::kWidens || shape.page_tokens % 16 == 0) {
      copy_values<16>(item, first, mine, Config::kWidens ? 0 : static_cast<int>(lane % 2) * 8, 0,
                      stage);
    } else {  // two pages' 8 tokens
      copy_values<8>(item, first, mine, 0, 0, stage);
      copy_values<8>(item, first, mine, 8, 8, stage);
    }
  }
  // Tokens from `from` on of the 16, `kBytes` of each dimension, to `offset` of a piece.
  template <int kBytes>
  __device__ __forceinline__ void copy_values(const PrefillMmaItem& item, int first,
                                              const TokenPlace& mine, int from, int offset,
                                              int stage) const {
    constexpr int kElementBytes = 16 / kElements;
    const TokenPlace place = mine.of_lane(from);
    const char* value = values(place.value) + uint64_t{shape.value_row} * dimension(0) +
                        place.in_page * kElementBytes;
    const int seen = min(kBytes, max(0, item.end - first - from) * kElementBytes);
    const int bytes = place.there ? seen : 0;
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      if (dimension(i) < head_size()) {
        const uint32_t to = value_to(i, stage) + offset;
        if constexpr (kBytes == 16) {
          copy16_async(to, value, bytes);
        } else {
          copy8_async(to, value, bytes);
        }
      }
      value += uint64_t{shape.value_row} * (Config::kWidens ? 32 : 16);
    }
  }

  // `hidden`: of V's 16 tokens, those that count as 0.
  template <typename Cache>
  __device__ __forceinline__ void widen_tile(int hidden, int stage) const {
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const bool has_chunk = chunk(i) * 16 < head_size();
      const uint32_t to = row_chunk(token(i), 2 * chunk(i));
      const uint32_t second = row_chunk(token(i), 2 * chunk(i) + 1);
      if (has_chunk) {
        widen_piece<Cache>(raw_at(i), 0, key_at(stage) + to, key_at(stage) + second);
      }
      if constexpr (kRows) {
        if (has_chunk) {
          widen_piece<Cache>(raw_at(kPieces + i), 0, value_at(stage) + to,
                             value_at(stage) + second);
        }
      } else if (dimension(i) < head_size()) {
        widen_piece<Cache>(raw_at(kPieces + i), hidden,
                           value_at(stage) + value_chunk(dimension(i), 0),
                           value_at(stage) + value_chunk(dimension(i), 1));
      }
    }
  }
  template <typename Cache>
  __device__ __forceinline__ void widen_piece(uint32_t from, int hidden, uint32_t first,
                                              uint32_t second) const {
    const float4 bytes = load_shared<float4>(from);
    uint32_t words[4] = {__float_as_uint(bytes.x), __float_as_uint(bytes.y),
                         __float_as_uint(bytes.z), __float_as_uint(bytes.w)};
    if (hidden > 0) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int gone = min(4, max(0, hidden - 4 * word));
        words[word] &= gone == 4 ? 0 : 0xffffffffu << 8 * gone;
      }
    }
    uint32_t wide[8];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      widen4<Cache>(words[word], wide[2 * word], wide[2 * word + 1]);
    }
    store_shared(first, uint4{wide[0], wide[1], wide[2], wide[3]});
    store_shared(second, uint4{wide[4], wide[5], wide[6], wide[7]});
  }
};

// What one warp does with an item, tile by tile.
template <typename Config>
struct PrefillMmaRows {
  using T = typename Config::T;
  using Tile = PrefillMmaTile<Config>;
  using Bits = TokenBits<Config::kSpan>;  // one a token of a span
  static constexpr int kRowTiles = Config::kRowTiles, kSpan = Config::kSpan;
  static constexpr int kWarpRows = 16 * kRowTiles;

  const PagedAttentionParams& p;
  const PrefillMmaShape& shape;
  float* factors;     // of the block's rows
  WarpSight* sights;  // of the block's warps
  Tile tile;
  float k_scale;

  // Asked for where they are needed: registers are short.
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 * kWarpRows; }

  // The query token of the sequence, and the head, of this lane's row r of a row tile.
  __device__ __forceinline__ int place(const PrefillItem& item, int tile_index, int r,
                                       int& head) const {
    return place(item, Tile::row_of(lane(), tile_index, r), head);
  }
  __device__ __forceinline__ int place(const PrefillItem& item, int row, int& head) const {
    const int index = item.first_row + min(first_row() + row, item.rows - 1);
    const int token = static_cast<int>(shape.plan.group_divisor.divide(index));
    head = item.kv_head * shape.plan.group + index - token * shape.plan.group;
    return token;
  }
  __device__ __forceinline__ bool has(const PrefillItem& item, int row) const {
    return first_row() + row < item.rows;
  }

  __device__ __forceinline__ uint64_t head_offset(int head) const {  // unsigned: one instruction
    return uint64_t{static_cast<uint32_t>(head)} * static_cast<uint32_t>(p.kv.head_size);
  }

  template <typename Query>
  __device__ __forceinline__ void load_query(const PrefillItem& item) {
    tile.template load_query<Query>(
        [&](int row) -> const Query* {
          int head;
          const int token = place(item, row, head);
          if (!has(item, row)) return nullptr;
          return static_cast<const Query*>(p.query) +
                 static_cast<int64_t>(item.first_query + token) * p.query_stride +
                 head_offset(head);
        },
        p.kv.head_size, factors + first_row(), lane());
  }

  __device__ __forceinline__ void start(const PrefillMmaItem& item) {
    if constexpr (!Config::kWidens) {
      load_query<T>(item);
    } else {
      k_scale = p.kv.k_scale == nullptr ? 1.0f : p.kv.k_scale[item.kv_head * p.kv.scale_stride];
      p.dtype == DType::kFloat16 ? load_query<Half>(item) : load_query<BFloat16>(item);
    }
    tile.clear();
    if (lane() == 0) {
      WarpSight sight = {.begin = 0, .end = INT32_MIN, .whole_begin = 0, .whole_end = 0};
      if (has(item, 0)) {
        int head;
        const int low = item.position + place(item, 0, head);
        const int high = item.position + place(item, kWarpRows - 1, head);
        sight = {.begin = first_seen(p, low),
                 .end = behind_seen(shape, high, item.length),
                 .whole_begin = first_seen(p, high),
                 .whole_end = behind_seen(shape, low, item.length)};
      }
      sights[threadIdx.x / 32] = sight;
    }
    __syncwarp();
  }

  // A tile whose K, V and present tokens (a bit each) lie at these addresses.
  __device__ __forceinline__ void attend(const PrefillMmaItem& item, int tile_index, uint32_t key,
                                         uint32_t value, const uint32_t* present) {
    const bool adjusts = p.softcap > 0.0f || p.alibi_slopes != nullptr;
#pragma unroll 1
    for (int span = Config::kTokens / kSpan - 1; span >= 0; --span) {
      const int first = tile_index * Config::kTokens + span * kSpan;
      const WarpSight sight = sights[threadIdx.x / 32];
      if (first >= sight.end || first + kSpan <= sight.begin) continue;
      typename Tile::Scores scores;
      tile.multiply_keys(scores, key + span * kSpan * kColumnBytes);
      if (adjusts) adjust(item, first, scores);
      const Bits tokens = kSpan == 64 ? present[0] | Bits{present[1]} << 32 : present[span];
      if (tokens != kAllTokens<kSpan> || first < sight.whole_begin ||
          first + kSpan > sight.whole_end) {
        mask(item, first, tokens, scores);
      }
      tile.weigh(scores, [&](int t, int r) { return adjusts ? 1.0f : unit(t, r); });
      tile.multiply_values(scores, value, span);
    }
  }

  __device__ __forceinline__ void finish(const PrefillItem& item) const {
    if (!Config::kWidens) return store<T>(item);
    p.dtype == DType::kFloat16 ? store<Half>(item) : store<BFloat16>(item);
  }

 private:
  // From a row's score to log2 units.
  __device__ __forceinline__ float unit(int tile_index, int r) const {
    if constexpr (!Config::kWidens) return shape.plan.to_log2;
    return shape.plan.to_log2 * k_scale *
           factors[first_row() + Tile::row_of(lane(), tile_index, r)];
  }

  // action(score, tile_index, r, column) for all of this lane's; columns are relative to its first.
  template <typename Action>
  static __device__ __forceinline__ void each_score(typename Tile::Scores& scores, int t, int r,
                                                    const Action& action) {
#pragma unroll
    for (int i = 0; i < Tile::kScoreTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) action(scores[t][i][2 * r + j], 8 * i + j);
    }
  }

  // Scores to log2 units, capped and biased.
  __device__ __forceinline__ void adjust(const PrefillItem& item, int first,
                                         typename Tile::Scores& scores) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int distance = first + lane() % 4 * 2 - item.position - place(item, t, r, head);
        const float scale = unit(t, r);
        each_score(scores, t, r, [&](float& score, int) { score *= scale; });
        if (p.softcap > 0.0f) {
          each_score(scores, t, r, [&](float& score, int) { score = capped(shape.cap, score); });
        }
        if (p.alibi_slopes != nullptr) {
          const float slope = p.alibi_slopes[head] * kLog2E;
          each_score(scores, t, r, [&](float& score, int column) {
            score = biased(slope, distance + column, score);
          });
        }
      }
    }
  }

  // `tokens`: whose pages are there.
  __device__ __forceinline__ void mask(const PrefillMmaItem& item, int first, Bits tokens,
                                       typename Tile::Scores& scores) const {
    const int column = lane() % 4 * 2;
    tokens >>= column;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int position = item.position + place(item, t, r, head);
        const int begin = first_seen(p, position) - first - column;
        const int end = behind_seen(shape, position, item.length) - first - column;
        const Bits seen = tokens & tokens_until(end) & ~tokens_until(begin);
        each_score(scores, t, r, [&](float& score, int at) {
          if ((seen >> at & 1) == 0) score = -INFINITY;
        });
      }
    }
  }
  static __device__ __forceinline__ Bits tokens_until(int count) {
    return count <= 0 ? 0 : count >= kSpan ? kAllTokens<kSpan> : (Bits{1} << count) - 1;
  }

  template <typename Out>
  __device__ __forceinline__ void store(const PrefillItem& item) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int64_t token = item.first_query + place(item, t, r, head);
        const RowResult result =
            row_result(p, item.kv_head, head, tile.maximum[t][r], quad_sum(tile.sum[t][r]));
        const bool there = has(item, Tile::row_of(lane(), t, r));
        tile.template store<Out>(
            static_cast<Out*>(p.out) + token * p.out_stride + head_offset(head), there,
            p.kv.head_size, t, r, result.scale, lane());
        if (p.lse != nullptr && there && lane() % 4 == 0) {
          p.lse[token * p.num_heads + head] = result.lse;
        }
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    paged_attention_prefill_mma_kernel(const __grid_constant__ PagedAttentionParams p,
                                       const __grid_constant__ PrefillMmaShape shape,
                                       uint32_t* next) {
  using Shared = PrefillMmaShared<Config>;
  extern __shared__ __align__(128) char memory[];
  __shared__ Shared shared;
  if (!shape.leads) launch_dependents();
  if (p.kv.head_size < Config::kHeadSize) {  // K past the head size is read, and never copied
    for (int i = threadIdx.x * 16; i < 4 * Config::kTileBytes; i += Config::kThreads * 16) {
      *reinterpret_cast<uint4*>(memory + i) = uint4{0, 0, 0, 0};
    }
  }
  wait_for_predecessor();
  // Not before: what follows it here reads what the predecessor wrote, and does not wait for it.
  if (shape.leads) launch_dependents();

  // Item `index`, or that there are no more, to items[slot]. The first warp.
  const auto put_item = [&](typename Shared::Plan& plan, uint32_t index, int slot) {
    const int lane = threadIdx.x % 32;
    PrefillMmaItem& item = shared.items[slot];
    if (index >= plan.items()) {
      if (lane == 0) item.seq = -1;
      return;
    }
    plan.find(p, shape.plan, index, lane, item);
    if (lane != 0) return;
    item.length = key_range(p, item.seq).count;
    item.asks_at = item.first_tile + (item.tiles > 1 ? 1 : 0);
  };
  if (threadIdx.x < 32) {
    typename Shared::Plan plan;
    plan.make(p, shape.plan, threadIdx.x);
    put_item(plan, blockIdx.x, 0);
    shared.plan(threadIdx.x) = plan;
  }
  __syncthreads();
  if (shared.items[0].seq < 0) return;

  // Made anew for every tile: what follows from the thread is not worth registers in between.
  const auto copies = [&] {
    const uint32_t thread = in_register(threadIdx.x);
    return PrefillMmaCopies<Config>{.p = p,
                                    .shape = shape,
                                    .storage = shared_address(memory),
                                    .warp = thread / 32,
                                    .lane = thread % 32};
  };
  PrefillMmaRows<Config> rows = {
      .p = p, .shape = shape, .factors = shared.factors, .sights = shared.sights};
  rows.tile.set_addresses(threadIdx.x % 32);
  rows.tile.query_rest = in_register(shared_address(memory) + 4 * Config::kTileBytes +
                                     Config::kRawBytes + threadIdx.x * 16);
  const auto last_tile = [](const PrefillItem& item) { return item.first_tile + item.tiles - 1; };
  copies().start(shared.items[0], last_tile(shared.items[0]), 0, shared.present[0]);
  // Bit 0: the stage at hand, bit 1: the item's place. (In one register.)
  int turn = 0;
#pragma unroll 1
  for (;; turn ^= 2) {
    const PrefillMmaItem& item = shared.items[turn >> 1];
    rows.start(item);
    int tile = last_tile(item);
#pragma unroll 1
    for (bool ends = false; !ends; --tile, turn ^= 1) {
      const int stage = turn & 1, slot = turn >> 1;
      wait_all_copies();
      copies().settle(item, tile, stage);
      __syncthreads();  // the tile is there, and nobody reads the one before it
      ends = tile == item.first_tile;
      // Late, so that no block holds items back that others could start. The last of all calls
      // brings the counter back to 0.
      if (tile == item.asks_at && threadIdx.x < 32) {
        typename Shared::Plan plan = shared.plan(threadIdx.x);
        const uint32_t count = plan.items();
        uint32_t index = count;
        if (threadIdx.x == 0 && count > gridDim.x) index = gridDim.x + atomicInc(next, count - 1);
        put_item(plan, __shfl_sync(0xffffffffu, index, 0), slot ^ 1);
        shared.plan(threadIdx.x) = plan;
      }
      if (item.tiles == 1) __syncthreads();  // the item that follows is there
      const PrefillMmaItem& copied = shared.items[slot ^ ends];
      if (copied.seq >= 0) {
        copies().start(copied, ends ? last_tile(copied) : tile - 1, stage ^ 1,
                       shared.present[stage ^ 1]);
      }
      rows.attend(item, tile, copies().key_at(stage), copies().value_at(stage),
                  shared.present[stage]);
    }
    rows.finish(item);
    if (shared.items[turn >> 1 ^ 1].seq < 0) return;
  }
}

template <typename T, int kHeadSize, PageForm kForm, bool kWidens>
bool launch_prefill_mma(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  using Config = PrefillMmaConfig<T, kHeadSize, kForm, kWidens>;
  constexpr auto kKernel = paged_attention_prefill_mma_kernel<Config>;
  if (dynamic_shared_memory<kKernel>("paged_attention") < Config::kSharedBytes) return false;
  const PagedKv& kv = p.kv;
  const int group = p.num_heads / kv.num_kv_heads;
  const bool rows = kv.layout != KvLayout::kVllm;
  const auto units = [&](int64_t stride) {
    return static_cast<uint32_t>(stride * size_of(kv.dtype) / 16);
  };
  const PrefillMmaShape shape = {
      .plan = {.group = group,
               .page_shift = 0,
               .least_rows = launch.least_query_len * group,
               .to_log2 = p.scale * kLog2E,
               .window_right = std::min(p.window_right, kMostRight),
               .query_boxes = false,
               .leads = false,
               .group_divisor = FastDivisor(group)},
      .cap = score_cap(p.softcap),
      .leads = launch.leads,
      .key_block = units(kv.key_block_stride),
      .key_head = units(kv.key_head_stride),
      .key_token = rows ? units(kv.key_token_stride) : 1,
      .key_chunk = units(kv.key_chunk_stride),
      .value_block = units(kv.value_block_stride),
      .value_head = units(kv.value_head_stride),
      .value_row = rows ? units(kv.value_token_stride)
                        : static_cast<uint32_t>(kv.value_dim_stride * size_of(kv.dtype)),
      .page_tokens = static_cast<uint32_t>(kv.block_size),
      .page_divisor = FastDivisor(kv.block_size)};
  launch_kernel("paged_attention", kKernel,
                dim3(current_device_info().multiprocessors * Config::kBlocks),
                dim3(Config::kThreads), Config::kSharedBytes, stream, p, shape, launch.next);
  return true;
}

// Padded head sizes.
template <typename T, PageForm kForm, bool kWidens>
bool launch_prefill_mma(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  const int head_size = p.kv.head_size;
  if (head_size <= 64) return launch_prefill_mma<T, 64, kForm, kWidens>(p, launch, stream);
  if (head_size <= 96) return launch_prefill_mma<T, 96, kForm, kWidens>(p, launch, stream);
  if (head_size <= 128) return launch_prefill_mma<T, 128, kForm, kWidens>(p, launch, stream);
  if (head_size <= 192) return launch_prefill_mma<T, 192, kForm, kWidens>(p, launch, stream);
  return launch_prefill_mma<T, 256, kForm, kWidens>(p, launch, stream);
}

}  // namespace vllm_kernels::cuda
