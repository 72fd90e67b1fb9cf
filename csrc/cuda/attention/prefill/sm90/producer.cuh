// Shared memory and mbarriers of the sm90 prefill kernel (prefill_kernel.cuh). This file also has
// the producer warps for queries, and for K and V that TMA copies as wgmma operands.
// dequant_producer.cuh has the producers of 8-bit caches.
//
// Early reads: none. Each producer warp waits for the primary kernel before its first read.
#pragma once
#include <type_traits>

#include "cuda/attention/common/tensor_maps.cuh"
#include "cuda/attention/prefill/sm90/mainloop.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

constexpr int kPrefillQueue = 4;  // work tiles in shared memory

// Pages: boxes of kPrefillBoxTokens tokens. Contiguous keys: `key` and `value` are boxes of a full
// KV tile, `value_box` of kPrefillBoxTokens tokens.
struct PrefillMaps {
  CUtensorMap key, value, value_box, query;
};

#if defined(VLLM_KERNELS_HAS_WGMMA)

// With a stride of 64 bytes, splits over 8-bit caches do not spill. The compiler then reads
// vectors, which would reach into the field before an unaligned tile. Over 16-bit caches such reads
// cost a fifth. (prefill/splits.md, 4x64_on_8k: 69 to 86 us.)
struct alignas(64) AlignedTile : SplitTile {};

// Static shared memory of a CTA. full: the copies have landed; empty: all readers have released.
template <typename Config>
struct PrefillShared {
  static constexpr int kKeyStages = Config::kKeyStages;
  static constexpr int kValueStages = Config::kValueStages;
  static constexpr int kQueryStages = Config::kQueryStages;
  uint64_t key_full[kKeyStages], key_empty[kKeyStages];
  uint64_t value_full[kValueStages], value_empty[kValueStages];
  uint64_t query_full[kQueryStages], query_empty[kQueryStages];
  uint64_t tile_full[kPrefillQueue], tile_empty[kPrefillQueue];
  uint64_t next_tile_requested;  // by the producer of K, near the end of the current work tile
  uint32_t
      present_boxes[kKeyStages];  // bit i: box i of the stage's K has a valid page, or is masked
  float ordering_dummy[4 * Config::kConsumers];  // written only: see consume_tiles()
  std::conditional_t<Config::kMaySplit && Config::kCacheIs8Bit, AlignedTile, SplitTile>
      work_tiles[kPrefillQueue];  // seq < 0: no more
};

// The next of kCount buffers in circular order, and the phase of its full barrier.
template <int kCount>
struct PipelineState {
  uint32_t index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kCount) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Calls action(work_tile) for every work tile of the CTA, in order. A producer warp.
template <typename Config, typename Action>
__device__ __forceinline__ void for_each_tile(PrefillShared<Config>& shared, int lane,
                                              const Action& action) {
  PipelineState<kPrefillQueue> state;
#pragma unroll 1
  for (;; state.advance()) {
    barrier_wait(shared_address(&shared.tile_full[state.index]), state.phase);
    const SplitTile work_tile = shared.work_tiles[state.index];
    barrier_arrive_warp(shared_address(&shared.tile_empty[state.index]), lane);
    if (work_tile.seq < 0) return;
    action(work_tile);
  }
}

// Called by the producer of K after KV tile i. Two KV tiles before the end of the work tile it asks
// for the next work tile: early enough to hide the latency, late enough to balance the CTAs.
template <typename Config>
__device__ __forceinline__ void request_next_tile(PrefillShared<Config>& shared,
                                                  const SplitTile& work_tile, int i, int lane) {
  if (i == max(0, work_tile.tiles - 3) && lane == 0)
    barrier_arrive(shared_address(&shared.next_tile_requested));
}

// Block-table entries of a work tile's KV tiles, which come from the last to the first. The warp
// reads the entries of kLookUpTiles KV tiles at once. Boxes whose tokens are all masked have none.
// A copy may take 1 << box_shift boxes of 16 tokens: all of them have the first one's entry.
template <typename Config>
class TilePages {
 public:
  static constexpr int kBoxes = PrefillMma<Config>::kBoxes;

  __device__ __forceinline__ TilePages(const PagedAttentionParams& p, const PrefillShape& shape,
                                       const SplitTile& work_tile, int lane, int box_shift = 0)
      : table_(p.block_tables + work_tile.seq * p.block_table_stride),
        page_shift_(shape.page_shift),
        num_blocks_(static_cast<int>(p.kv.num_blocks)),
        contiguous_(Config::kForm == KvForm::kSwizzledRows && p.key_start_loc != nullptr),
        first_key_(work_tile.first_key),
        begin_(work_tile.begin),
        end_(work_tile.end),
        box_tokens_(kPrefillBoxTokens << box_shift),
        lane_(lane) {}

  // Whether any token of the copy that begins at `token` is visible to a row.
  __device__ __forceinline__ bool visible(int token) const {
    return token + box_tokens_ > begin_ && token < end_;
  }
  // Goes to KV tile `number` of the work tile, in order; `first` is its first token. All lanes.
  __device__ __forceinline__ void look_up(int number, int first) {
    first_ = first;
    first_lane_ = number % kLookUpTiles * kBoxes;
    if (first_lane_ != 0 || contiguous_) return;
    const int token = first - lane_ / kBoxes * Config::kTokens + lane_ % kBoxes * kPrefillBoxTokens;
    const bool is_looked_up = lane_ < kLookUpTiles * kBoxes && token >= 0 && visible(token);
    blocks_ = is_looked_up ? table_[token >> page_shift_] : -1;
  }
  // The physical block of a box of that KV tile, or -1. All lanes.
  __device__ __forceinline__ int block(int box) const {
    int block = __shfl_sync(0xffffffffu, blocks_, first_lane_ + box);
    if (contiguous_) block = visible(first_ + box * kPrefillBoxTokens) ? 0 : -1;
    return static_cast<uint32_t>(block) < static_cast<uint32_t>(num_blocks_) ? block : -1;
  }
  // Row of a token in its block.
  __device__ __forceinline__ int row_in_block(int token) const {
    return contiguous_ ? first_key_ + token : token & ((1 << page_shift_) - 1);
  }

 private:
  static constexpr int kLookUpTiles = 32 / kBoxes;  // KV tiles whose entries are read together

  const int32_t* table_;
  int page_shift_, num_blocks_;
  bool contiguous_;
  int first_key_, begin_, end_, box_tokens_, lane_;
  int first_ = 0, first_lane_ = 0;
  int blocks_ = -1;  // of box lane % kBoxes in KV tile lane / kBoxes of the look-up
};

// Copies V of a box in which only tokens [low, high) are visible. The others may be NaN and become
// 0. `token`: the box's first, in its page. All lanes.
template <typename Config>
__device__ __forceinline__ void copy_value_box(const PagedKv& kv, const ValueBoxes& boxes,
                                               int kv_head, int block, int token, int low, int high,
                                               uint32_t to, int lane) {
  using T = typename Config::T;
  constexpr int kHeadSize = Config::kHeadSize, kTokens = Config::kTokens;
  const T* from = static_cast<const T*>(kv.value) + block * kv.value_block_stride +
                  kv_head * kv.value_head_stride + token * kv.value_token_stride;
  if constexpr (Config::kForm == KvForm::kSwizzledRows) {
    constexpr int kChunks = kHeadSize / 8;
#pragma unroll 4
    for (int i = lane; i < kPrefillBoxTokens * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool present = row >= low && row < high && chunk * 8 < kv.head_size;
      copy16_async(to + chunk / 8 * (kTokens * 128) + row * 128 + ((chunk ^ row) % 8) * 16,
                   present ? from + row * kv.value_token_stride + chunk * 8 : from,
                   present ? 16 : 0);
    }
    wait_all_copies();
  } else {
    const int row_shift = boxes.shift + 1;  // log2 of the chunks of a row, 8 tokens each
    const auto address = [&](int i) { return to + (i ^ (i >> 3 & boxes.swizzle)) * 16; };
#pragma unroll 2
    for (int i = lane; i < kHeadSize << row_shift; i += 32) {
      const int dim = i >> row_shift, first = (i & (1 << row_shift) - 1) * 8;
      const int tokens = dim < kv.head_size && first + 8 > low ? min(max(high - first, 0), 8) : 0;
      copy16_async(address(i), tokens > 0 ? from + dim * kv.value_dim_stride + first : from,
                   tokens * 2);
    }
    wait_all_copies();
    if (low > 0 && low % 8 != 0) {  // a window begins within a chunk
      __syncwarp();
      for (int dim = lane; dim < kHeadSize; dim += 32) {
        const uint32_t at = address((dim << row_shift) + low / 8);
        uint4 elements = load_shared<uint4>(at);
        const auto mask = [&](int pair) {  // of tokens 2 pair and 2 pair + 1
          return (2 * pair >= low % 8 ? 0xffffu : 0u) | (2 * pair + 1 >= low % 8 ? ~0xffffu : 0u);
        };
        elements = uint4{elements.x & mask(0), elements.y & mask(1), elements.z & mask(2),
                         elements.w & mask(3)};
        store_shared(at, elements);
      }
    }
  }
  fence_async_proxy();
  __syncwarp();
}

// Producer warp of K, or of V, by TMA. Pages are copied box by box, contiguous keys a KV tile at a
// time. V boxes with masked tokens are copied by the lanes, which write zeros for those.
template <typename Config, bool kValue>
__device__ __forceinline__ void copy_tiles(const PagedAttentionParams& p, const PrefillShape& shape,
                                           const PrefillMaps& maps, PrefillShared<Config>& shared,
                                           uint32_t stages, int lane) {
  constexpr int kTokens = Config::kTokens;
  using Pages = TilePages<Config>;
  constexpr int kBoxes = Pages::kBoxes;
  constexpr int kColumns = Config::kForm == KvForm::kSwizzledRows ? Config::kColumns : 1;
  constexpr bool kRowForm = Config::kForm == KvForm::kSwizzledRows;
  constexpr uint32_t kBoxBytes =
      kRowForm ? kColumns * kPrefillBoxTokens * 128 : PrefillMma<Config>::kBoxBytes;
  constexpr uint32_t kBoxStep = kRowForm ? kPrefillBoxTokens * 128 : kBoxBytes;  // to the next box
  constexpr uint32_t kAllBoxes = (1u << kBoxes) - 1;
  static_assert(kBoxes * kColumns <= 32);
  // Layout vllm: a copy of V has 1 << box_shift boxes, by the lane of the first.
  const ValueBoxes value_boxes = value_boxes_of<Config>(shape);
  const int box_shift = kValue && !kRowForm ? value_boxes.shift : 0;
  const bool contiguous = Config::kForm == KvForm::kSwizzledRows && p.key_start_loc != nullptr;
  const CUtensorMap& box_map = !kValue ? maps.key : contiguous ? maps.value_box : maps.value;
  wait_for_primary_kernel();
  PipelineState<kValue ? Config::kValueStages : Config::kKeyStages> state;
  for_each_tile(shared, lane, [&](const SplitTile& work_tile) {
    Pages pages(p, shape, work_tile, lane, box_shift);
    const int box = lane % kBoxes, column = lane / kBoxes;
    const bool copies = column < kColumns && (box & (1 << box_shift) - 1) == 0;
    const int begin = work_tile.begin, end = work_tile.end;
#pragma unroll 1
    for (int i = 0; i < work_tile.tiles; ++i, state.advance()) {
      const int first = (work_tile.first_tile + work_tile.tiles - 1 - i) * kTokens;
      const int token = first + box * kPrefillBoxTokens;
      pages.look_up(i, first);
      const int block = pages.block(box);
      const uint32_t stage = stages + state.index * Config::kTileBytes;
      const uint32_t full =
          shared_address(kValue ? &shared.value_full[state.index] : &shared.key_full[state.index]);
      barrier_wait(shared_address(kValue ? &shared.value_empty[state.index]
                                         : &shared.key_empty[state.index]),
                   state.phase ^ 1);
      if (contiguous && (!kValue || (first >= begin && first + kTokens <= end))) {
        if (lane == 0) {
          if (!kValue) shared.present_boxes[state.index] = kAllBoxes;
          barrier_expect(full, Config::kTileBytes);
        }
        __syncwarp();
        if (lane < kColumns) {
          tma_copy_box(stage + lane * (kTokens * 128), kValue ? &maps.value : &maps.key, lane * 64,
                       pages.row_in_block(first), work_tile.kv_head, 0, full);
        }
      } else {
        uint32_t masked_boxes = 0;  // bit i: box i of V has masked tokens; the lanes copy it
        if constexpr (kValue) {
          const bool whole = token >= begin && token + (kPrefillBoxTokens << box_shift) <= end;
          masked_boxes = __ballot_sync(0xffffffffu, copies && block >= 0 && !whole) & kAllBoxes;
#pragma unroll 1
          for (uint32_t remaining = masked_boxes; remaining != 0; remaining &= remaining - 1) {
            const int masked_box = __ffs(remaining) - 1,
                      box_token = first + masked_box * kPrefillBoxTokens;
            copy_value_box<Config>(p.kv, value_boxes, work_tile.kv_head,
                                   __shfl_sync(0xffffffffu, block, masked_box),
                                   pages.row_in_block(box_token), begin - box_token,
                                   end - box_token, stage + masked_box * kBoxStep, lane);
          }
        } else {
          const uint32_t present = __ballot_sync(0xffffffffu, block >= 0 || !pages.visible(token));
          // Beside V that was copied, a page that is not valid has zeros.
          const uint32_t boxes = kIsFp8<typename Config::Operand> ? kAllBoxes : present & kAllBoxes;
          if (lane == 0) shared.present_boxes[state.index] = boxes;
        }
        if (lane == 0) {
          barrier_expect(full, (kBoxes - (__popc(masked_boxes) << box_shift)) * kBoxBytes);
        }
        __syncwarp();
        // TMA reads zeros from a block out of bounds.
        const int from = block >= 0 ? block : static_cast<int>(p.kv.num_blocks);
        const int row = pages.row_in_block(token);
        const uint32_t to = stage + box * kBoxStep;
        if (copies && (masked_boxes >> box & 1) == 0) {
          if constexpr (Config::kForm == KvForm::kSwizzledRows) {
            tma_copy_box(to + column * (kTokens * 128), &box_map, column * 64, row,
                         work_tile.kv_head, from, full);
          } else if constexpr (kValue) {
            tma_copy_box(to, &box_map, row, 0, work_tile.kv_head, from, full);
          } else {
            tma_copy_box(to, &box_map, 0, 0, row / 8, work_tile.kv_head, from, full);
          }
        }
      }
      if (!kValue) request_next_tile(shared, work_tile, i, lane);
    }
  });
}

// Producer warp of V for e4m3 queries: V^T of a KV tile is one TMA box (fp8.cuh).
template <typename Config>
__device__ __forceinline__ void copy_transposed_values(const PrefillShape& shape,
                                                       const PrefillMaps& maps,
                                                       PrefillShared<Config>& shared,
                                                       uint32_t stages, int lane) {
  constexpr int kTokens = Config::kTokens;
  wait_for_primary_kernel();
  PipelineState<Config::kValueStages> state;
  for_each_tile(shared, lane, [&](const SplitTile& work_tile) {
    const int first_row = shape.value_starts[work_tile.seq];
#pragma unroll 1
    for (int i = work_tile.tiles - 1; i >= 0; --i, state.advance()) {
      const uint32_t full = shared_address(&shared.value_full[state.index]);
      barrier_wait(shared_address(&shared.value_empty[state.index]), state.phase ^ 1);
      if (lane == 0) {
        barrier_expect(full, Config::kHeadSize * kTokens);
        const int row = first_row + (work_tile.first_tile + i) * kTokens;
        tma_copy_box(stages + state.index * Config::kTileBytes, &maps.value, row / 2, 0,
                     work_tile.kv_head, 0, full);
      }
      __syncwarp();
    }
  });
}

// Producer warp of the queries: one TMA box a column, or cp.async where `group` does not divide
// rows.
template <typename Config>
__device__ __forceinline__ void copy_queries(const PagedAttentionParams& p,
                                             const PrefillShape& shape, const CUtensorMap& map,
                                             PrefillShared<Config>& shared, uint32_t stages,
                                             int lane) {
  using Element = typename Config::Operand;
  constexpr int kChunk = 16 / sizeof(Element);  // elements
  constexpr int kChunks = Config::kHeadSize / kChunk;
  wait_for_primary_kernel();
  PipelineState<Config::kQueryStages> state;
  for_each_tile(shared, lane, [&](const SplitTile& work_tile) {
    const uint32_t query = stages + state.index * Config::kQueryBytes;
    barrier_wait(shared_address(&shared.query_empty[state.index]), state.phase ^ 1);
    if (shape.query_by_tma) {
      const uint32_t full = shared_address(&shared.query_full[state.index]);
      if (lane == 0) barrier_expect(full, Config::kQueryBytes);
      __syncwarp();
      if (lane < Config::kColumns) {
        tma_copy_box(query + lane * (Config::kRows * 128), &map, lane * 64,
                     work_tile.kv_head * shape.group,
                     work_tile.first_query +
                         static_cast<int>(shape.group_divisor.divide(work_tile.first_row)),
                     0, full);
      }
      state.advance();
      return;
    }
#pragma unroll 4
    for (int i = lane; i < Config::kRows * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      int head;
      const int token = token_of_row(shape, work_tile, row, head);
      const bool present = chunk * kChunk < shape.head_size;
      copy16_async(query + chunk / 8 * (Config::kRows * 128) + row * 128 + ((chunk ^ row) % 8) * 16,
                   static_cast<const Element*>(p.query) +
                       static_cast<int64_t>(work_tile.first_query + token) * p.query_stride +
                       head * shape.head_size + (present ? chunk * kChunk : 0),
                   present ? 16 : 0);
    }
    wait_all_copies();
    fence_async_proxy();
    barrier_arrive_warp(shared_address(&shared.query_full[state.index]), lane);
    state.advance();
  });
}

#endif

}  // namespace vllm_kernels::cuda
