// What a block of attention/prefill/sm90/prefill_kernel.cuh holds in shared memory, and how its
// warps tell each other; and the warps that copy K, V and queries of 16 bits.
#pragma once
#include "cuda/attention/common/tensor_maps.cuh"
#include "cuda/attention/prefill/sm90/mainloop.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

constexpr int kPrefillQueue = 4;

// Boxes of a part of K and V; of contiguous keys, of a tile, and of a part of V.
struct PrefillMaps {
  CUtensorMap key, value, value_box, query;
};

#if defined(VLLM_KERNELS_HAS_WGMMA)

// What the warps of a block tell each other.
template <typename Config>
struct PrefillShared {
  static constexpr int kKeys = Config::kKeyStages;
  static constexpr int kValues = Config::kValueStages;
  static constexpr int kQueries = Config::kQueries;
  uint64_t key_full[kKeys], key_empty[kKeys];
  uint64_t value_full[kValues], value_empty[kValues];
  uint64_t query_full[kQueries], query_empty[kQueries];
  uint64_t tile_full[kPrefillQueue], tile_empty[kPrefillQueue];
  uint64_t next_tile_wanted;  // the last tiles of K of the item at hand are under way
  uint32_t parts[kKeys];      // bit i: part i of the stage's K is there, or behind the sequence
  float pin[4 * Config::kGroups];         // written only: see attend()
  PrefillTile work_tiles[kPrefillQueue];  // seq < 0: there are no more
};

// Stages, or items, one after the other: which comes next, and the parity of its full barrier.
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

// Calls action(item) for every item of the block, in order.
template <typename Config, typename Action>
__device__ __forceinline__ void for_each_tile(PrefillShared<Config>& shared, int lane,
                                              const Action& action) {
  PipelineState<kPrefillQueue> state;
#pragma unroll 1
  for (;; state.advance()) {
    barrier_wait(shared_address(&shared.tile_full[state.index]), state.phase);
    const PrefillTile work_tile = shared.work_tiles[state.index];
    barrier_arrive_warp(shared_address(&shared.tile_empty[state.index]), lane);
    if (work_tile.seq < 0) return;
    action(work_tile);
  }
}

// The copier of K, behind the item's tile number i.
template <typename Config>
__device__ __forceinline__ void signal_wanted(PrefillShared<Config>& shared,
                                              const PrefillTile& work_tile, int i, int lane) {
  if (i == max(0, work_tile.tiles - 3) && lane == 0)
    barrier_arrive(shared_address(&shared.next_tile_wanted));
}

// Where the parts of an item's tiles are, which come from the last to the first. Tokens that no row
// sees are nowhere: pages without others are not looked at.
template <typename Config>
class TileBlocks {
 public:
  static constexpr int kBoxes = PrefillMma<Config>::kBoxes;

  __device__ __forceinline__ TileBlocks(const PagedAttentionParams& p, const PrefillShape& shape,
                                        const PrefillTile& work_tile, int lane)
      : table_(p.block_tables + work_tile.seq * p.block_table_stride),
        page_shift_(shape.page_shift),
        num_blocks_(static_cast<int>(p.kv.num_blocks)),
        contiguous_(Config::kForm == KvForm::kSwizzledRows && p.key_start_loc != nullptr),
        first_key_(work_tile.first_key),
        begin_(work_tile.begin),
        end_(work_tile.end),
        lane_(lane) {}

  __device__ __forceinline__ bool visible(
      int token) const {  // of those of a part from `token` on, any
    return token + kPrefillBoxTokens > begin_ && token < end_;
  }
  // All lanes, of every tile in turn: its number among the item's, and its first token.
  __device__ __forceinline__ void reach(int number, int first) {
    first_ = first;
    place_ = number % kAhead * kBoxes;
    if (place_ != 0 || contiguous_) return;
    const int token = first - lane_ / kBoxes * Config::kTokens + lane_ % kBoxes * kPrefillBoxTokens;
    const bool looks = lane_ < kAhead * kBoxes && token >= 0 && visible(token);
    blocks_ = looks ? table_[token >> page_shift_] : -1;
  }
  // All lanes: the block of a part of that tile, or -1.
  __device__ __forceinline__ int block(int part) const {
    int block = __shfl_sync(0xffffffffu, blocks_, place_ + part);
    if (contiguous_) block = visible(first_ + part * kPrefillBoxTokens) ? 0 : -1;
    return static_cast<uint32_t>(block) < static_cast<uint32_t>(num_blocks_) ? block : -1;
  }
  // A token's place in its block.
  __device__ __forceinline__ int row_in_block(int token) const {
    return contiguous_ ? first_key_ + token : token & ((1 << page_shift_) - 1);
  }

 private:
  static constexpr int kAhead = 32 / kBoxes;  // tiles whose blocks are looked up together

  const int32_t* table_;
  int page_shift_, num_blocks_;
  bool contiguous_;
  int first_key_, begin_, end_, lane_;
  int first_ = 0, place_ = 0;
  int blocks_ = -1;  // of part lane % kBoxes of the tile lane / kBoxes after the one looked up at
};

// V of a part of which only tokens [low, high) count, by all lanes: what lies beside them may be
// NaN and is taken for 0. `token`: of its page.
template <typename Config>
__device__ __forceinline__ void copy_value_box(const PagedKv& kv, int kv_head, int block, int token,
                                               int low, int high, uint32_t to, int lane) {
  using T = typename Config::T;
  constexpr int kHeadSize = Config::kHeadSize, kTokens = Config::kTokens;
  const T* from = static_cast<const T*>(kv.value) + block * kv.value_block_stride +
                  kv_head * kv.value_head_stride + token * kv.value_token_stride;
#pragma unroll 1
  for (int i = lane; i < 2 * kHeadSize; i += 32) {
    uint4 pack = {0, 0, 0, 0};
    if constexpr (Config::kForm == KvForm::kSwizzledRows) {
      constexpr int kChunks = kHeadSize / 8;
      const int row = i / kChunks, chunk = i % kChunks;
      if (row >= low && row < high) {
        pack = *reinterpret_cast<const uint4*>(from + row * kv.value_token_stride + chunk * 8);
      }
      store_shared(to + chunk / 8 * (kTokens * 128) + row * 128 + ((chunk ^ row) % 8) * 16, pack);
    } else {
      const int first = i % 2 * 8;  // of 8 tokens
      pack = *reinterpret_cast<const uint4*>(from + i / 2 * kv.value_dim_stride + first);
      const auto mask = [&](int pair) {  // of tokens 2 pair and 2 pair + 1 of the 8
        const int at = first + 2 * pair;
        return (at >= low && at < high ? 0xffffu : 0u) |
               (at + 1 >= low && at + 1 < high ? 0xffff0000u : 0u);
      };
      pack = uint4{pack.x & mask(0), pack.y & mask(1), pack.z & mask(2), pack.w & mask(3)};
      store_shared(to + ((i ^ i >> 3 & 7) * 16), pack);
    }
  }
  fence_async_proxy();
  __syncwarp();
}

// One warp: K, or V, of those items. Parts are what pages consist of; contiguous keys are copied a
// tile at a time, but for V of tiles that have tokens which no row sees.
template <typename Config, bool kValue>
__device__ __forceinline__ void copy_tiles(const PagedAttentionParams& p, const PrefillShape& shape,
                                           const PrefillMaps& maps, PrefillShared<Config>& shared,
                                           uint32_t storage, int lane) {
  constexpr int kTokens = Config::kTokens;
  using Blocks = TileBlocks<Config>;
  constexpr int kBoxes = Blocks::kBoxes;
  constexpr int kColumns = Config::kForm == KvForm::kSwizzledRows ? Config::kColumns : 1;
  constexpr bool kRows = Config::kForm == KvForm::kSwizzledRows;
  constexpr uint32_t kBoxBytes =
      kRows ? kColumns * kPrefillBoxTokens * 128 : PrefillMma<Config>::kBoxBytes;
  constexpr uint32_t kBoxStep = kRows ? kPrefillBoxTokens * 128 : kBoxBytes;  // to the next part
  constexpr uint32_t kAllBoxes = (1u << kBoxes) - 1;
  static_assert(kBoxes * kColumns <= 32);
  const bool contiguous = Config::kForm == KvForm::kSwizzledRows && p.key_start_loc != nullptr;
  const CUtensorMap& box_map = !kValue ? maps.key : contiguous ? maps.value_box : maps.value;
  wait_for_primary_kernel();
  PipelineState<kValue ? Config::kValueStages : Config::kKeyStages> state;
  for_each_tile(shared, lane, [&](const PrefillTile& work_tile) {
    Blocks blocks(p, shape, work_tile, lane);
    const int part = lane % kBoxes, column = lane / kBoxes;
    const int begin = work_tile.begin, end = work_tile.end;
#pragma unroll 1
    for (int i = 0; i < work_tile.tiles; ++i, state.advance()) {
      const int first = (work_tile.first_tile + work_tile.tiles - 1 - i) * kTokens;
      const int token = first + part * kPrefillBoxTokens;
      blocks.reach(i, first);
      const int block = blocks.block(part);
      const uint32_t stage = storage + state.index * Config::kTileBytes;
      const uint32_t full =
          shared_address(kValue ? &shared.value_full[state.index] : &shared.key_full[state.index]);
      barrier_wait(shared_address(kValue ? &shared.value_empty[state.index]
                                         : &shared.key_empty[state.index]),
                   state.phase ^ 1);
      if (contiguous && (!kValue || (first >= begin && first + kTokens <= end))) {
        if (lane == 0) {
          if (!kValue) shared.parts[state.index] = kAllBoxes;
          barrier_expect(full, Config::kTileBytes);
        }
        __syncwarp();
        if (lane < kColumns) {
          tma_copy_box(stage + lane * (kTokens * 128), kValue ? &maps.value : &maps.key, lane * 64,
                       blocks.row_in_block(first), work_tile.kv_head, 0, full);
        }
      } else {
        uint32_t by_hand = 0;  // bit l: lane l's part
        if constexpr (kValue) {
          const bool whole = token >= begin && token + kPrefillBoxTokens <= end;
          by_hand = __ballot_sync(0xffffffffu, block >= 0 && !whole) & kAllBoxes;
#pragma unroll 1
          for (uint32_t rest = by_hand; rest != 0; rest &= rest - 1) {
            const int of = __ffs(rest) - 1, at = first + of * kPrefillBoxTokens;
            copy_value_box<Config>(p.kv, work_tile.kv_head, __shfl_sync(0xffffffffu, block, of),
                                   blocks.row_in_block(at), begin - at, end - at,
                                   stage + of * kBoxStep, lane);
          }
        } else {
          const uint32_t present = __ballot_sync(0xffffffffu, block >= 0 || !blocks.visible(token));
          if (lane == 0) shared.parts[state.index] = present & kAllBoxes;
        }
        if (lane == 0) barrier_expect(full, (kBoxes - __popc(by_hand)) * kBoxBytes);
        __syncwarp();
        // A block that is not there is read as zeros.
        const int from = block >= 0 ? block : static_cast<int>(p.kv.num_blocks);
        const int row = blocks.row_in_block(token);
        const uint32_t to = stage + part * kBoxStep;
        if (column < kColumns && (by_hand >> part & 1) == 0) {
          if constexpr (Config::kForm == KvForm::kSwizzledRows) {
            tma_copy_box(to + column * (kTokens * 128), &box_map, column * 64, row,
                         work_tile.kv_head, from, full);
          } else if constexpr (kValue) {
            tma_copy_box(to, &box_map, 0, 0, work_tile.kv_head, from, full);
          } else {
            tma_copy_box(to, &box_map, 0, 0, row / 8, work_tile.kv_head, from, full);
          }
        }
      }
      if (!kValue) signal_wanted(shared, work_tile, i, lane);
    }
  });
}

// One warp: the queries of those items.
template <typename Config>
__device__ __forceinline__ void copy_queries(const PagedAttentionParams& p,
                                             const PrefillShape& shape, const CUtensorMap& map,
                                             PrefillShared<Config>& shared, uint32_t storage,
                                             int lane) {
  using T = typename Config::T;
  constexpr int kHeadSize = Config::kHeadSize, kChunks = kHeadSize / 8;
  wait_for_primary_kernel();
  PipelineState<Config::kQueries> state;
  for_each_tile(shared, lane, [&](const PrefillTile& work_tile) {
    const uint32_t query = storage + state.index * Config::kQueryBytes;
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
      const int index = work_tile.first_row + min(row, work_tile.rows - 1);
      const int token = static_cast<int>(shape.group_divisor.divide(index));
      const int head = work_tile.kv_head * shape.group + index - token * shape.group;
      copy16_async(query + chunk / 8 * (Config::kRows * 128) + row * 128 + ((chunk ^ row) % 8) * 16,
                   static_cast<const T*>(p.query) +
                       static_cast<int64_t>(work_tile.first_query + token) * p.query_stride +
                       head * kHeadSize + chunk * 8);
    }
    wait_all_copies();
    fence_async_proxy();
    barrier_arrive_warp(shared_address(&shared.query_full[state.index]), lane);
    state.advance();
  });
}

#endif

}  // namespace vllm_kernels::cuda
