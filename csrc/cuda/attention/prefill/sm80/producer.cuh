// How a tile of K and V reaches shared memory where the kernel for many query rows needs no more
// than sm_80 (attention/prefill/sm80/prefill_kernel.cuh): by cp.async, all warps, a tile ahead.
//
// Copies are of 16 bytes. Where 16 tokens lie in one page, as most do, a warp knows their place
// from a list that it makes for many tiles at once; else each token has a place of its own: pages
// may have any length. An 8-bit cache's copies stay with the thread that asked for them; it widens
// them into the tile of 16 bits.
#pragma once
#include "cuda/attention/prefill/sm80/mainloop.cuh"
#include "cuda/base/kv_element.cuh"

namespace vllm_kernels::cuda {

// Strides are in units of 16 bytes.
struct Sm80Shape {
  PrefillShape scheduler;
  ScoreCap cap;
  bool has_concurrent_launch;  // sequences of few query tokens are the next launch's
  int stages;                  // of K and V, in shared memory
  uint32_t key_block, key_head;
  uint32_t key_token;  // 1 in layout vllm
  uint32_t key_chunk;  // layout vllm: to the next 16 bytes of a token
  uint32_t value_block, value_head;
  uint32_t value_row;  // to the next token; layout vllm: to the next dimension, in bytes
  uint32_t page_tokens;
  FastDivisor page_divisor;
};

struct Sm80Tile : PrefillTile {
  int length;   // of the sequence
  int asks_at;  // the tile at which the block asks for its next item
};

// Where 16 tokens lie that are one page's, or null: of a KV head, from the first token and
// dimension on.
struct alignas(16) GroupAddress {
  const char* key;
  const char* value;
};
constexpr int kListedTiles = 32;  // one a lane

// Where a token of a group of 16 lies.
struct TokenAddress {
  uint64_t key, value;  // units of 16 bytes; value in layout vllm: of its page's row 0
  int in_page;
  bool present;  // its page is

  __device__ __forceinline__ TokenAddress of_lane(int lane) const {
    return {.key = __shfl_sync(0xffffffffu, key, lane),
            .value = __shfl_sync(0xffffffffu, value, lane),
            .in_page = __shfl_sync(0xffffffffu, in_page, lane),
            .present = __shfl_sync(0xffffffffu, present, lane) != 0};
  }
};

// A warp's share of a block's copies of a tile, of kShares: of the share % 4-th 16 tokens, and of
// the share / 4-th half of their dimensions; a lane's pieces are of 16 bytes.
constexpr int kShares = 8;
template <typename Config>
struct Sm80Producer {
  static constexpr bool kRows = Config::kForm == KvForm::kSwizzledRows;
  static constexpr int kHeadSize = Config::kHeadSize;
  static constexpr int kGroups = Config::kTokens / 16;
  static constexpr int kElements = Config::kCopied;        // of a copy
  static constexpr int kPieces = Config::kPieces;          // of a lane, of K and of V
  static constexpr int kChunks = 2 * kPieces;              // of a token, a warp's
  static constexpr int kDimensions = kChunks * kElements;  // a warp's
  // Rows: lanes side by side in one, and the pieces of a lane in one.
  static constexpr int kAcross = kChunks & -kChunks, kTimes = kChunks / kAcross;
  static constexpr uint32_t kTileBytes = Config::kTileBytes;

  const PagedAttentionParams& p;
  const Sm80Shape& shape;
  GroupAddress* addresses;  // of the share's groups in kListedTiles tiles
  uint32_t storage;         // stages of K and V, then the raw copies
  uint32_t share, lane;

  __device__ __forceinline__ uint32_t key_at(int stage) const {
    return storage + stage * 2 * kTileBytes;
  }
  __device__ __forceinline__ uint32_t value_at(int stage) const {
    return key_at(stage) + kTileBytes;
  }
  // First of the share's 16 tokens.
  __device__ __forceinline__ int first_of(int tile) const {
    return tile * Config::kTokens + static_cast<int>(group()) * 16;
  }

  // Starts the copies of a tile, and says which of its tokens are there. All warps. `begins`: it is
  // the item's first, that is its last tile; the others follow in order.
  __device__ __forceinline__ void start(const Sm80Tile& work_tile, int tile, bool begins, int stage,
                                        uint32_t (&present)[2]) const {
    if (begins || (tile & kListedTiles - 1) == kListedTiles - 1) list_addresses(work_tile, tile);
    const GroupAddress address = addresses[tile & kListedTiles - 1];
    uint32_t bits = ~0u;
    if (address.key != nullptr) {
      copy_group(address, stage);
    } else {
      const int first = first_of(tile);
      const TokenAddress token = locate(work_tile, first + lane % 16);
      bits =
          ~__ballot_sync(0xffffffffu, !token.present && is_visible(work_tile, first + lane % 16));
      if constexpr (kRows) {
        copy_rows(token, stage);
      } else {
        copy_pages(work_tile, first, token, stage);
        if (!Config::kCacheIs8Bit) hide_values(hidden_tokens(work_tile, first), stage);
      }
    }
    if (lane == 0 && share < kGroups) {
      reinterpret_cast<uint16_t*>(present)[share] = static_cast<uint16_t>(bits);
    }
  }

  // 8-bit caches, once this thread's copies of a tile are there: the tile as it is to lie.
  __device__ __forceinline__ void warpgroup_fence_operand(const Sm80Tile& work_tile, int tile,
                                                          int stage) const {
    const int hidden = kRows ? 0 : hidden_tokens(work_tile, first_of(tile));
    switch (p.kv.dtype) {
      case DType::kFp8E4M3:
        return dequantize_stage<__nv_fp8_e4m3>(hidden, stage);
      case DType::kFp8E5M2:
        return dequantize_stage<__nv_fp8_e5m2>(hidden, stage);
      default:
        return dequantize_stage<int8_t>(hidden, stage);
    }
  }

 private:
  __device__ __forceinline__ uint32_t group() const { return share % kGroups; }
  // A lane's i-th piece of K, and of V in rows: `chunk` of a token of the 16.
  __device__ __forceinline__ uint32_t token(int i) const {
    return kRows ? lane / kAcross + 32 / kAcross * (i / kTimes) : lane % 16;
  }
  __device__ __forceinline__ uint32_t chunk(int i) const {
    return share / kGroups * kChunks +
           (kRows ? lane % kAcross + i % kTimes * kAcross : lane / 16 + 2 * i);
  }
  // Its i-th piece of V in layout vllm: 16 tokens of a dimension in 8 bits, 8 of them in 16.
  __device__ __forceinline__ uint32_t dimension(int i) const {
    return share / kGroups * kDimensions +
           (Config::kCacheIs8Bit ? lane + 32 * i : lane / 2 + 16 * i);
  }
  // Where these pieces go.
  __device__ __forceinline__ uint32_t key_to(int i, int stage) const {
    return Config::kCacheIs8Bit ? raw_at(i) : key_at(stage) + row_to(i);
  }
  __device__ __forceinline__ uint32_t value_to(int i, int stage) const {
    if (Config::kCacheIs8Bit) return raw_at(kPieces + i);
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
  __device__ __forceinline__ uint32_t raw_at(int split) const {
    return storage + shape.stages * 2 * kTileBytes + ((split * kShares + share) * 32 + lane) * 16;
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
  __device__ __forceinline__ bool is_visible(const Sm80Tile& work_tile, int token) const {
    const int together = kRows ? 1 : Config::kCacheIs8Bit && shape.page_tokens % 16 == 0 ? 16 : 8;
    return (token | (together - 1)) >= work_tile.begin && (token & -together) < work_tile.end;
  }
  __device__ __forceinline__ TokenAddress locate(const Sm80Tile& work_tile, int token) const {
    TokenAddress address;
    int block = -1;
    address.in_page = work_tile.first_key + token;
    if (p.key_start_loc != nullptr) {
      block = is_visible(work_tile, token) ? 0 : -1;
    } else {
      const uint32_t page = shape.page_divisor.divide(token);
      address.in_page = token - page * shape.page_tokens;
      if (is_visible(work_tile, token))
        block = p.block_tables[work_tile.seq * p.block_table_stride + page];
    }
    address.present = static_cast<uint32_t>(block) < static_cast<uint64_t>(p.kv.num_blocks);
    const uint64_t from = address.present ? block : 0;
    address.key = from * shape.key_block + uint64_t{shape.key_head} * work_tile.kv_head +
                  static_cast<uint64_t>(address.in_page) * shape.key_token;
    address.value = from * shape.value_block + uint64_t{shape.value_head} * work_tile.kv_head;
    if (kRows) address.value += static_cast<uint64_t>(address.in_page) * shape.value_row;
    return address;
  }

  __device__ __forceinline__ uint32_t head_size() const { return p.kv.head_size; }
  __device__ __forceinline__ const char* keys(uint64_t in_16_bytes) const {
    return static_cast<const char*>(p.kv.key) + in_16_bytes * 16;
  }
  __device__ __forceinline__ const char* values(uint64_t in_16_bytes) const {
    return static_cast<const char*>(p.kv.value) + in_16_bytes * 16;
  }

  // Whether a chunk is the tile's: past the head size it is, as zeros.
  static __device__ __forceinline__ bool in_tile(uint32_t chunk) {
    constexpr bool kAll = kShares / kGroups * kDimensions == kHeadSize;
    return kAll || chunk * kElements < kHeadSize;
  }
  // Of a copy, bytes that are not zeros.
  __device__ __forceinline__ int bytes_at(uint32_t first_dimension, int bytes) const {
    return first_dimension < head_size() ? bytes : 0;
  }

  // Tokens of one page of which the item sees all, or at least those of its sequence, lie together.
  __device__ __forceinline__ void list_addresses(const Sm80Tile& work_tile, int tile) const {
    const int first = first_of((tile & -kListedTiles) + static_cast<int>(lane));
    uint32_t block = 0, in_page = work_tile.first_key + first;
    bool together = first >= work_tile.begin && first + 16 <= work_tile.length;
    if (together && p.key_start_loc == nullptr) {
      const uint32_t page = shape.page_divisor.divide(first);
      in_page = first - page * shape.page_tokens;
      together = shape.page_tokens % 16 == 0;
      if (together) block = p.block_tables[work_tile.seq * p.block_table_stride + page];
      together &= block < static_cast<uint64_t>(p.kv.num_blocks);
    }
    const uint32_t head = work_tile.kv_head;
    const char* value =
        values(uint64_t{block} * shape.value_block + uint64_t{head} * shape.value_head +
               (kRows ? uint64_t{in_page} * shape.value_row : 0));
    if (!kRows) value += in_page * (16 / kElements);
    const char* key = keys(uint64_t{block} * shape.key_block + uint64_t{head} * shape.key_head +
                           uint64_t{in_page} * shape.key_token);
    __syncwarp();
    addresses[lane] = {.key = together ? key : nullptr, .value = value};
    __syncwarp();
  }
  __device__ __forceinline__ void copy_group(const GroupAddress& address, int stage) const {
    const char* key = address.key;
    const char* value = address.value;
    uint64_t key_step, value_step;  // bytes to the next piece
    if constexpr (kRows) {
      key += (uint64_t{shape.key_token} * token(0) + chunk(0)) * 16;
      value += (uint64_t{shape.value_row} * token(0) + chunk(0)) * 16;
      key_step = uint64_t{shape.key_token} * (16 * 32 / kAcross);
      value_step = uint64_t{shape.value_row} * (16 * 32 / kAcross);
    } else {
      key += (uint64_t{shape.key_chunk} * chunk(0) + token(0)) * 16;
      value +=
          uint64_t{shape.value_row} * dimension(0) + (Config::kCacheIs8Bit ? 0 : lane % 2 * 16);
      key_step = uint64_t{shape.key_chunk} * 32;
      value_step = uint64_t{shape.value_row} * (Config::kCacheIs8Bit ? 32 : 16);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int further = kRows ? i % kTimes * kAcross * 16 : 0;
      copy16_async(key_to(i, stage), key + further, bytes_at(chunk(i) * kElements, 16));
      copy16_async(value_to(i, stage), value + further,
                   bytes_at(kRows ? chunk(i) * kElements : dimension(i), 16));
      if (!kRows || i % kTimes == kTimes - 1) {
        key += key_step;
        value += value_step;
      }
    }
  }
  // Rows of tokens that may lie anywhere.
  __device__ __forceinline__ void copy_rows(const TokenAddress& mine, int stage) const {
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const TokenAddress address = mine.of_lane(token(i));
      const int bytes = address.present ? bytes_at(chunk(i) * kElements, 16) : 0;
      copy16_async(key_to(i, stage), keys(address.key + chunk(i)), bytes);
      copy16_async(value_to(i, stage), values(address.value + chunk(i)), bytes);
    }
  }
  // Layout vllm.
  __device__ __forceinline__ void copy_pages(const Sm80Tile& work_tile, int first,
                                             const TokenAddress& mine, int stage) const {
    const char* key = keys(mine.key + uint64_t{shape.key_chunk} * chunk(0));
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      copy16_async(key_to(i, stage), key, mine.present ? bytes_at(chunk(i) * kElements, 16) : 0);
      key += uint64_t{shape.key_chunk} * 32;
    }
    if (!Config::kCacheIs8Bit || shape.page_tokens % 16 == 0) {
      copy_values<16>(work_tile, first, mine,
                      Config::kCacheIs8Bit ? 0 : static_cast<int>(lane % 2) * 8, 0, stage);
    } else {  // two pages' 8 tokens
      copy_values<8>(work_tile, first, mine, 0, 0, stage);
      copy_values<8>(work_tile, first, mine, 8, 8, stage);
    }
  }
  // Tokens from `from` on of the 16, `kBytes` of each dimension, to `offset` of a piece.
  template <int kBytes>
  __device__ __forceinline__ void copy_values(const Sm80Tile& work_tile, int first,
                                              const TokenAddress& mine, int from, int offset,
                                              int stage) const {
    constexpr int kElementBytes = 16 / kElements;
    const TokenAddress address = mine.of_lane(from);
    const char* value = values(address.value) + uint64_t{shape.value_row} * dimension(0) +
                        address.in_page * kElementBytes;
    const int visible = min(kBytes, max(0, work_tile.end - first - from) * kElementBytes);
    const int bytes = address.present ? visible : 0;
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t to = value_to(i, stage) + offset;
      if constexpr (kBytes == 16) {
        copy16_async(to, value, bytes_at(dimension(i), bytes));
      } else {
        copy8_async(to, value, bytes_at(dimension(i), bytes));
      }
      value += uint64_t{shape.value_row} * (Config::kCacheIs8Bit ? 32 : 16);
    }
  }

  // Of 16 tokens of V, those before `begin`: they may be anything, and are to count as 0.
  static __device__ __forceinline__ int hidden_tokens(const Sm80Tile& work_tile, int first) {
    return min(16, max(0, work_tile.begin - first));
  }
  // What this thread copied of them.
  __device__ __forceinline__ void hide_values(int hidden, int stage) const {
    if (hidden == 0 || hidden == 16) return;  // 16: none of them was copied
    wait_all_copies();
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
    __syncwarp();
  }
  // `hidden`: of V's 16 tokens, those that count as 0.
  template <typename Cache>
  __device__ __forceinline__ void dequantize_stage(int hidden, int stage) const {
#pragma unroll 1
    for (int i = 0; i < kPieces; ++i) {
      const bool has_chunk = in_tile(chunk(i));
      const uint32_t to = row_chunk(token(i), 2 * chunk(i));
      const uint32_t second = row_chunk(token(i), 2 * chunk(i) + 1);
      if (has_chunk) {
        dequantize_chunk<Cache>(raw_at(i), 0, key_at(stage) + to, key_at(stage) + second);
      }
      if constexpr (kRows) {
        if (has_chunk) {
          dequantize_chunk<Cache>(raw_at(kPieces + i), 0, value_at(stage) + to,
                                  value_at(stage) + second);
        }
      } else if (in_tile(dimension(i) / kElements)) {
        dequantize_chunk<Cache>(raw_at(kPieces + i), hidden,
                                value_at(stage) + value_chunk(dimension(i), 0),
                                value_at(stage) + value_chunk(dimension(i), 1));
      }
    }
  }
  template <typename Cache>
  __device__ __forceinline__ void dequantize_chunk(uint32_t from, int hidden, uint32_t first,
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
      upcast4<Cache>(words[word], wide[2 * word], wide[2 * word + 1]);
    }
    store_shared(first, uint4{wide[0], wide[1], wide[2], wide[3]});
    store_shared(second, uint4{wide[4], wide[5], wide[6], wide[7]});
  }
};

}  // namespace vllm_kernels::cuda
