// The producer of the sm80 prefill kernel (prefill_kernel.cuh). All warps copy K and V with
// cp.async in chunks of 16 bytes, one KV tile ahead.
//
// Pages may have any length. Most groups of 16 tokens lie in one page. For these, a warp lists the
// addresses of kListedTiles KV tiles at once. In all other groups each token has its own address.
//
// 8-bit caches: the chunks go to a raw buffer. The thread that copied a chunk upcasts it into the
// KV tile.
#pragma once
#include "cuda/attention/prefill/sm80/mainloop.cuh"
#include "cuda/base/kv_element.cuh"

namespace vllm_kernels::cuda {

// Strides are in units of 16 bytes.
struct Sm80Shape {
  PrefillShape scheduler;
  ScoreCap cap;
  bool has_concurrent_launch;  // a decode launch has the sequences of few query tokens
  int stages;                  // KV tiles in shared memory
  uint32_t key_block, key_head;
  uint32_t key_token;  // 1 in layout vllm
  uint32_t key_chunk;  // layout vllm: to the next 16 bytes of a token
  uint32_t value_block, value_head;
  uint32_t value_row;  // to the next token; layout vllm: to the next dimension, in bytes
  uint32_t page_tokens;
  FastDivisor page_divisor;
};

struct Sm80Tile : PrefillTile {
  int length;        // of the sequence
  int request_tile;  // the KV tile at which the CTA requests its next work tile
};

// Address of a group of 16 tokens of one page and KV head: its first token and dimension. `key` is
// null where the group has no single address.
struct alignas(16) GroupAddress {
  const char* key;
  const char* value;
};
constexpr int kListedTiles = 32;  // KV tiles, one a lane

// Address of one token.
struct TokenAddress {
  uint64_t key, value;  // units of 16 bytes; V of layout vllm: of its page's first token
  int in_page;
  bool present;  // its page is valid

  __device__ __forceinline__ TokenAddress of_lane(int lane) const {
    return {.key = __shfl_sync(0xffffffffu, key, lane),
            .value = __shfl_sync(0xffffffffu, value, lane),
            .in_page = __shfl_sync(0xffffffffu, in_page, lane),
            .present = __shfl_sync(0xffffffffu, present, lane) != 0};
  }
};

// The copies of a KV tile are cut into kCopySlices, one for a warp at a time. Slice i has tokens 16
// (i % 4) to 16 (i % 4) + 15, and half i / 4 of their dimensions.
constexpr int kCopySlices = 8;
template <typename Config>
struct Sm80Producer {
  static constexpr bool kRowForm = Config::kForm == KvForm::kSwizzledRows;
  static constexpr int kHeadSize = Config::kHeadSize;
  static constexpr int kGroups = Config::kTokens / 16;
  static constexpr int kChunkElements = Config::kChunkElements;      // of a 16-byte chunk
  static constexpr int kLaneChunks = Config::kLaneChunks;            // of K, and as many of V
  static constexpr int kTokenChunks = 2 * kLaneChunks;               // of a token, in a slice
  static constexpr int kDimensions = kTokenChunks * kChunkElements;  // of a slice
  // kRowForm: adjacent lanes that copy one row, and chunks of a lane in that row.
  static constexpr int kRowLanes = kTokenChunks & -kTokenChunks,
                       kRowChunks = kTokenChunks / kRowLanes;
  static constexpr uint32_t kTileBytes = Config::kTileBytes;

  const PagedAttentionParams& p;
  const Sm80Shape& shape;
  GroupAddress* addresses;  // list of this slice's groups
  uint32_t stages;          // shared address of the stages of K and V, then of the raw chunks
  uint32_t copy_slice, lane;

  __device__ __forceinline__ uint32_t key_at(int stage) const {
    return stages + stage * 2 * kTileBytes;
  }
  __device__ __forceinline__ uint32_t value_at(int stage) const {
    return key_at(stage) + kTileBytes;
  }
  // First token of this slice's group in a KV tile.
  __device__ __forceinline__ int first_of(int tile) const {
    return tile * Config::kTokens + static_cast<int>(group()) * 16;
  }

  // Starts the copies of a KV tile, and writes which of its tokens are present. All warps call it,
  // for the KV tiles of a work tile in order, from the last to the first. `is_first`: the first
  // call of the work tile.
  __device__ __forceinline__ void start(const Sm80Tile& work_tile, int tile, bool is_first,
                                        int stage, uint32_t (&present)[2]) const {
    if (is_first || (tile & kListedTiles - 1) == kListedTiles - 1) list_addresses(work_tile, tile);
    const GroupAddress address = addresses[tile & kListedTiles - 1];
    uint32_t present_tokens = ~0u;
    if (address.key != nullptr) {
      copy_group(address, stage);
    } else {
      const int first = first_of(tile);
      const TokenAddress token = locate(work_tile, first + lane % 16);
      present_tokens =
          ~__ballot_sync(0xffffffffu, !token.present && is_visible(work_tile, first + lane % 16));
      if constexpr (kRowForm) {
        copy_rows(token, stage);
      } else {
        copy_pages(work_tile, first, token, stage);
        if (!Config::kCacheIs8Bit) mask_values(masked_tokens(work_tile, first), stage);
      }
    }
    if (lane == 0 && copy_slice < kGroups) {
      reinterpret_cast<uint16_t*>(present)[copy_slice] = static_cast<uint16_t>(present_tokens);
    }
  }

  // 8-bit caches: upcasts the chunks that this thread has copied into the KV tile.
  __device__ __forceinline__ void dequantize(const Sm80Tile& work_tile, int tile, int stage) const {
    const int masked = kRowForm ? 0 : masked_tokens(work_tile, first_of(tile));
    switch (p.kv.dtype) {
      case DType::kFp8E4M3:
        return dequantize_stage<__nv_fp8_e4m3>(masked, stage);
      case DType::kFp8E5M2:
        return dequantize_stage<__nv_fp8_e5m2>(masked, stage);
      default:
        return dequantize_stage<int8_t>(masked, stage);
    }
  }

 private:
  __device__ __forceinline__ uint32_t group() const { return copy_slice % kGroups; }
  // Chunk i of this lane, of K and of V in rows: token (of 16) and chunk of that token.
  __device__ __forceinline__ uint32_t token(int i) const {
    return kRowForm ? lane / kRowLanes + 32 / kRowLanes * (i / kRowChunks) : lane % 16;
  }
  __device__ __forceinline__ uint32_t chunk(int i) const {
    return copy_slice / kGroups * kTokenChunks +
           (kRowForm ? lane % kRowLanes + i % kRowChunks * kRowLanes : lane / 16 + 2 * i);
  }
  // Chunk i of this lane, of V in layout vllm: its dimension. It has 16 (8-bit) or 8 tokens.
  __device__ __forceinline__ uint32_t dimension(int i) const {
    return copy_slice / kGroups * kDimensions +
           (Config::kCacheIs8Bit ? lane + 32 * i : lane / 2 + 16 * i);
  }
  // Shared addresses that chunk i is copied to.
  __device__ __forceinline__ uint32_t key_to(int i, int stage) const {
    return Config::kCacheIs8Bit ? raw_at(i) : key_at(stage) + row_to(i);
  }
  __device__ __forceinline__ uint32_t value_to(int i, int stage) const {
    if (Config::kCacheIs8Bit) return raw_at(kLaneChunks + i);
    return value_at(stage) + (kRowForm ? row_to(i) : value_chunk(dimension(i), lane % 2));
  }
  // row_chunk() of chunk i, computed from that of chunk 0 where this is faster.
  __device__ __forceinline__ uint32_t row_to(int i) const {
    const uint32_t first = row_chunk(token(0), chunk(0));
    if constexpr (kRowForm && kRowChunks == 1) {
      const int tokens = 32 / kRowLanes * i;
      return (first ^ tokens % 8 * 16) + tokens * kColumnBytes;
    } else if constexpr (!kRowForm && kTokenChunks % 8 == 0) {
      return (first ^ 2 * i % 8 * 16) + 2 * i / 8 * kColumnStride<Config::kTokens>;
    } else {
      return row_chunk(token(i), chunk(i));
    }
  }
  __device__ __forceinline__ uint32_t raw_at(int chunk_index) const {
    return stages + shape.stages * 2 * kTileBytes +
           ((chunk_index * kCopySlices + copy_slice) * 32 + lane) * 16;
  }
  // Byte offsets in a KV tile: 8 dimensions of a token; 8 tokens of a dimension of V^T.
  __device__ __forceinline__ uint32_t row_chunk(uint32_t token, uint32_t chunk) const {
    return chunk / 8 * kColumnStride<Config::kTokens> + (group() * 16 + token) * kColumnBytes +
           ((chunk ^ token) % 8) * 16;
  }
  __device__ __forceinline__ uint32_t value_chunk(uint32_t d, uint32_t half) const {
    return d * kColumnBytes + (group() * 2 + half ^ value_swizzle(d)) * 16;
  }

  // Whether a token, or one that is copied with it, is visible to a row.
  __device__ __forceinline__ bool is_visible(const Sm80Tile& work_tile, int token) const {
    const int copied_tokens = kRowForm                                              ? 1
                              : Config::kCacheIs8Bit && shape.page_tokens % 16 == 0 ? 16
                                                                                    : 8;
    return (token | (copied_tokens - 1)) >= work_tile.begin &&
           (token & -copied_tokens) < work_tile.end;
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
    if (kRowForm) address.value += static_cast<uint64_t>(address.in_page) * shape.value_row;
    return address;
  }

  __device__ __forceinline__ uint32_t head_size() const { return p.kv.head_size; }
  __device__ __forceinline__ const char* keys(uint64_t in_16_bytes) const {
    return static_cast<const char*>(p.kv.key) + in_16_bytes * 16;
  }
  __device__ __forceinline__ const char* values(uint64_t in_16_bytes) const {
    return static_cast<const char*>(p.kv.value) + in_16_bytes * 16;
  }

  // Whether a chunk belongs to the padded head. Past the head size it is zeros.
  static __device__ __forceinline__ bool in_tile(uint32_t chunk) {
    constexpr bool kAll = kCopySlices / kGroups * kDimensions == kHeadSize;
    return kAll || chunk * kChunkElements < kHeadSize;
  }
  // Bytes of a copy that are read; cp.async fills the rest with zeros.
  __device__ __forceinline__ int bytes_at(uint32_t first_dimension, int bytes) const {
    return first_dimension < head_size() ? bytes : 0;
  }

  // Lists the group addresses of the kListedTiles KV tiles around `tile`. A group is listed if one
  // page holds it, past the work tile's `begin` and before the sequence's end.
  __device__ __forceinline__ void list_addresses(const Sm80Tile& work_tile, int tile) const {
    const int first = first_of((tile & -kListedTiles) + static_cast<int>(lane));
    uint32_t block = 0, in_page = work_tile.first_key + first;
    bool in_one_page = first >= work_tile.begin && first + 16 <= work_tile.length;
    if (in_one_page && p.key_start_loc == nullptr) {
      const uint32_t page = shape.page_divisor.divide(first);
      in_page = first - page * shape.page_tokens;
      in_one_page = shape.page_tokens % 16 == 0;
      if (in_one_page) block = p.block_tables[work_tile.seq * p.block_table_stride + page];
      in_one_page &= block < static_cast<uint64_t>(p.kv.num_blocks);
    }
    const uint32_t head = work_tile.kv_head;
    const char* value =
        values(uint64_t{block} * shape.value_block + uint64_t{head} * shape.value_head +
               (kRowForm ? uint64_t{in_page} * shape.value_row : 0));
    if (!kRowForm) value += in_page * (16 / kChunkElements);
    const char* key = keys(uint64_t{block} * shape.key_block + uint64_t{head} * shape.key_head +
                           uint64_t{in_page} * shape.key_token);
    __syncwarp();
    addresses[lane] = {.key = in_one_page ? key : nullptr, .value = value};
    __syncwarp();
  }
  __device__ __forceinline__ void copy_group(const GroupAddress& address, int stage) const {
    const char* key = address.key;
    const char* value = address.value;
    uint64_t key_step, value_step;  // bytes to the next chunk of this lane
    if constexpr (kRowForm) {
      key += (uint64_t{shape.key_token} * token(0) + chunk(0)) * 16;
      value += (uint64_t{shape.value_row} * token(0) + chunk(0)) * 16;
      key_step = uint64_t{shape.key_token} * (16 * 32 / kRowLanes);
      value_step = uint64_t{shape.value_row} * (16 * 32 / kRowLanes);
    } else {
      key += (uint64_t{shape.key_chunk} * chunk(0) + token(0)) * 16;
      value +=
          uint64_t{shape.value_row} * dimension(0) + (Config::kCacheIs8Bit ? 0 : lane % 2 * 16);
      key_step = uint64_t{shape.key_chunk} * 32;
      value_step = uint64_t{shape.value_row} * (Config::kCacheIs8Bit ? 32 : 16);
    }
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
      const int chunk_offset = kRowForm ? i % kRowChunks * kRowLanes * 16 : 0;
      copy16_async(key_to(i, stage), key + chunk_offset, bytes_at(chunk(i) * kChunkElements, 16));
      copy16_async(value_to(i, stage), value + chunk_offset,
                   bytes_at(kRowForm ? chunk(i) * kChunkElements : dimension(i), 16));
      if (!kRowForm || i % kRowChunks == kRowChunks - 1) {
        key += key_step;
        value += value_step;
      }
    }
  }
  // Copies rows of tokens that have an address each.
  __device__ __forceinline__ void copy_rows(const TokenAddress& lane_token, int stage) const {
#pragma unroll 1
    for (int i = 0; i < kLaneChunks; ++i) {
      const TokenAddress address = lane_token.of_lane(token(i));
      const int bytes = address.present ? bytes_at(chunk(i) * kChunkElements, 16) : 0;
      copy16_async(key_to(i, stage), keys(address.key + chunk(i)), bytes);
      copy16_async(value_to(i, stage), values(address.value + chunk(i)), bytes);
    }
  }
  // Layout vllm: copies tokens that have an address each.
  __device__ __forceinline__ void copy_pages(const Sm80Tile& work_tile, int first,
                                             const TokenAddress& lane_token, int stage) const {
    const char* key = keys(lane_token.key + uint64_t{shape.key_chunk} * chunk(0));
#pragma unroll 1
    for (int i = 0; i < kLaneChunks; ++i) {
      copy16_async(key_to(i, stage), key,
                   lane_token.present ? bytes_at(chunk(i) * kChunkElements, 16) : 0);
      key += uint64_t{shape.key_chunk} * 32;
    }
    if (!Config::kCacheIs8Bit || shape.page_tokens % 16 == 0) {
      copy_values<16>(work_tile, first, lane_token,
                      Config::kCacheIs8Bit ? 0 : static_cast<int>(lane % 2) * 8, 0, stage);
    } else {  // 8 tokens of two pages
      copy_values<8>(work_tile, first, lane_token, 0, 0, stage);
      copy_values<8>(work_tile, first, lane_token, 8, 8, stage);
    }
  }
  // Copies kBytes of each dimension of V, from token `from` of the 16 on, to byte `offset` of a
  // chunk.
  template <int kBytes>
  __device__ __forceinline__ void copy_values(const Sm80Tile& work_tile, int first,
                                              const TokenAddress& lane_token, int from, int offset,
                                              int stage) const {
    constexpr int kElementBytes = 16 / kChunkElements;
    const TokenAddress address = lane_token.of_lane(from);
    const char* value = values(address.value) + uint64_t{shape.value_row} * dimension(0) +
                        address.in_page * kElementBytes;
    const int visible = min(kBytes, max(0, work_tile.end - first - from) * kElementBytes);
    const int bytes = address.present ? visible : 0;
#pragma unroll 1
    for (int i = 0; i < kLaneChunks; ++i) {
      const uint32_t to = value_to(i, stage) + offset;
      if constexpr (kBytes == 16) {
        copy16_async(to, value, bytes_at(dimension(i), bytes));
      } else {
        copy8_async(to, value, bytes_at(dimension(i), bytes));
      }
      value += uint64_t{shape.value_row} * (Config::kCacheIs8Bit ? 32 : 16);
    }
  }

  // The number of V's 16 tokens before `begin`. They may hold NaN and must become 0.
  static __device__ __forceinline__ int masked_tokens(const Sm80Tile& work_tile, int first) {
    return min(16, max(0, work_tile.begin - first));
  }
  // Zeroes the first `masked` tokens of V in the chunks of this thread.
  __device__ __forceinline__ void mask_values(int masked, int stage) const {
    if (masked == 0 || masked == 16) return;  // 16: none was copied
    wait_all_copies();
#pragma unroll 1
    for (int i = 0; i < kLaneChunks; ++i) {
      const uint32_t at = value_at(stage) + value_chunk(dimension(i), lane % 2);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int token = static_cast<int>(lane % 2) * 8 + 2 * pair;
        const uint32_t keep =
            (token >= masked ? 0xffffu : 0u) | (token + 1 >= masked ? 0xffff0000u : 0u);
        store_shared(at + 4 * pair, load_shared(at + 4 * pair) & keep);
      }
    }
    __syncwarp();
  }
  // `masked`: so many of V's 16 tokens become 0.
  template <typename Cache>
  __device__ __forceinline__ void dequantize_stage(int masked, int stage) const {
#pragma unroll 1
    for (int i = 0; i < kLaneChunks; ++i) {
      const bool has_chunk = in_tile(chunk(i));
      const uint32_t to = row_chunk(token(i), 2 * chunk(i));
      const uint32_t second = row_chunk(token(i), 2 * chunk(i) + 1);
      if (has_chunk) {
        dequantize_chunk<Cache>(raw_at(i), 0, key_at(stage) + to, key_at(stage) + second);
      }
      if constexpr (kRowForm) {
        if (has_chunk) {
          dequantize_chunk<Cache>(raw_at(kLaneChunks + i), 0, value_at(stage) + to,
                                  value_at(stage) + second);
        }
      } else if (in_tile(dimension(i) / kChunkElements)) {
        dequantize_chunk<Cache>(raw_at(kLaneChunks + i), masked,
                                value_at(stage) + value_chunk(dimension(i), 0),
                                value_at(stage) + value_chunk(dimension(i), 1));
      }
    }
  }
  template <typename Cache>
  __device__ __forceinline__ void dequantize_chunk(uint32_t from, int masked, uint32_t first,
                                                   uint32_t second) const {
    const float4 bytes = load_shared<float4>(from);
    uint32_t words[4] = {__float_as_uint(bytes.x), __float_as_uint(bytes.y),
                         __float_as_uint(bytes.z), __float_as_uint(bytes.w)};
    if (masked > 0) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int masked_bytes = min(4, max(0, masked - 4 * word));
        words[word] &= masked_bytes == 4 ? 0 : 0xffffffffu << 8 * masked_bytes;
      }
    }
    uint32_t upcast_pairs[8];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      upcast4<Cache>(words[word], upcast_pairs[2 * word], upcast_pairs[2 * word + 1]);
    }
    store_shared(first, uint4{upcast_pairs[0], upcast_pairs[1], upcast_pairs[2], upcast_pairs[3]});
    store_shared(second, uint4{upcast_pairs[4], upcast_pairs[5], upcast_pairs[6], upcast_pairs[7]});
  }
};

}  // namespace vllm_kernels::cuda
