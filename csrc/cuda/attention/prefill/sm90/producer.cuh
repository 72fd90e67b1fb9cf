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
  CUtensorMap key, value, value_part, query;
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
  uint64_t item_full[kPrefillQueue], item_empty[kPrefillQueue];
  uint64_t wanted;        // the last tiles of K of the item at hand are under way
  uint32_t parts[kKeys];  // bit i: part i of the stage's K is there, or behind the sequence
  float pin[4 * Config::kGroups];    // written only: see attend()
  PrefillItem items[kPrefillQueue];  // seq < 0: there are no more
};

// Stages, or items, one after the other: which comes next, and the parity of its full barrier.
template <int kCount>
struct Turn {
  uint32_t at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == kCount) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Calls action(item) for every item of the block, in order.
template <typename Config, typename Action>
__device__ __forceinline__ void each_item(PrefillShared<Config>& shared, int lane,
                                          const Action& action) {
  Turn<kPrefillQueue> turn;
#pragma unroll 1
  for (;; turn.next()) {
    barrier_wait(shared_address(&shared.item_full[turn.at]), turn.parity);
    const PrefillItem item = shared.items[turn.at];
    barrier_arrive_warp(shared_address(&shared.item_empty[turn.at]), lane);
    if (item.seq < 0) return;
    action(item);
  }
}

// The copier of K, behind the item's tile number i.
template <typename Config>
__device__ __forceinline__ void tell_wanted(PrefillShared<Config>& shared, const PrefillItem& item,
                                            int i, int lane) {
  if (i == max(0, item.tiles - 3) && lane == 0) barrier_arrive(shared_address(&shared.wanted));
}

// Where the parts of an item's tiles are, which come from the last to the first. Tokens that no row
// sees are nowhere: pages without others are not looked at.
template <typename Config>
class TileBlocks {
 public:
  static constexpr int kParts = PrefillTile<Config>::kParts;

  __device__ __forceinline__ TileBlocks(const PagedAttentionParams& p, const PrefillShape& shape,
                                        const PrefillItem& item, int lane)
      : table_(p.block_tables + item.seq * p.block_table_stride),
        page_shift_(shape.page_shift),
        num_blocks_(static_cast<int>(p.kv.num_blocks)),
        contiguous_(Config::kForm == PageForm::kRows && p.key_start_loc != nullptr),
        first_key_(item.first_key),
        begin_(item.begin),
        end_(item.end),
        lane_(lane) {}

  __device__ __forceinline__ bool seen(
      int token) const {  // of those of a part from `token` on, any
    return token + kPrefillPart > begin_ && token < end_;
  }
  // All lanes, of every tile in turn: its number among the item's, and its first token.
  __device__ __forceinline__ void reach(int number, int first) {
    first_ = first;
    place_ = number % kAhead * kParts;
    if (place_ != 0 || contiguous_) return;
    const int token = first - lane_ / kParts * Config::kTokens + lane_ % kParts * kPrefillPart;
    const bool looks = lane_ < kAhead * kParts && token >= 0 && seen(token);
    blocks_ = looks ? table_[token >> page_shift_] : -1;
  }
  // All lanes: the block of a part of that tile, or -1.
  __device__ __forceinline__ int block(int part) const {
    int block = __shfl_sync(0xffffffffu, blocks_, place_ + part);
    if (contiguous_) block = seen(first_ + part * kPrefillPart) ? 0 : -1;
    return static_cast<uint32_t>(block) < static_cast<uint32_t>(num_blocks_) ? block : -1;
  }
  // A token's place in its block.
  __device__ __forceinline__ int place(int token) const {
    return contiguous_ ? first_key_ + token : token & ((1 << page_shift_) - 1);
  }

 private:
  static constexpr int kAhead = 32 / kParts;  // tiles whose blocks are looked up together

  const int32_t* table_;
  int page_shift_, num_blocks_;
  bool contiguous_;
  int first_key_, begin_, end_, lane_;
  int first_ = 0, place_ = 0;
  int blocks_ = -1;  // of part lane % kParts of the tile lane / kParts after the one looked up at
};

// V of a part of which only tokens [low, high) count, by all lanes: what lies beside them may be
// NaN and is taken for 0. `token`: of its page.
template <typename Config>
__device__ __forceinline__ void copy_value_part(const PagedKv& kv, int kv_head, int block,
                                                int token, int low, int high, uint32_t to,
                                                int lane) {
  using T = typename Config::T;
  constexpr int kHeadSize = Config::kHeadSize, kTokens = Config::kTokens;
  const T* from = static_cast<const T*>(kv.value) + block * kv.value_block_stride +
                  kv_head * kv.value_head_stride + token * kv.value_token_stride;
#pragma unroll 1
  for (int i = lane; i < 2 * kHeadSize; i += 32) {
    uint4 pack = {0, 0, 0, 0};
    if constexpr (Config::kForm == PageForm::kRows) {
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
  constexpr int kParts = Blocks::kParts;
  constexpr int kColumns = Config::kForm == PageForm::kRows ? Config::kColumns : 1;
  constexpr bool kRows = Config::kForm == PageForm::kRows;
  constexpr uint32_t kPartBytes =
      kRows ? kColumns * kPrefillPart * 128 : PrefillTile<Config>::kPartBytes;
  constexpr uint32_t kPartStep = kRows ? kPrefillPart * 128 : kPartBytes;  // to the next part
  constexpr uint32_t kAllParts = (1u << kParts) - 1;
  static_assert(kParts * kColumns <= 32);
  const bool contiguous = Config::kForm == PageForm::kRows && p.key_start_loc != nullptr;
  const CUtensorMap& part_map = !kValue ? maps.key : contiguous ? maps.value_part : maps.value;
  wait_for_predecessor();
  Turn<kValue ? Config::kValueStages : Config::kKeyStages> turn;
  each_item(shared, lane, [&](const PrefillItem& item) {
    Blocks blocks(p, shape, item, lane);
    const int part = lane % kParts, column = lane / kParts;
    const int begin = item.begin, end = item.end;
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i, turn.next()) {
      const int first = (item.first_tile + item.tiles - 1 - i) * kTokens;
      const int token = first + part * kPrefillPart;
      blocks.reach(i, first);
      const int block = blocks.block(part);
      const uint32_t stage = storage + turn.at * Config::kTileBytes;
      const uint32_t full =
          shared_address(kValue ? &shared.value_full[turn.at] : &shared.key_full[turn.at]);
      barrier_wait(
          shared_address(kValue ? &shared.value_empty[turn.at] : &shared.key_empty[turn.at]),
          turn.parity ^ 1);
      if (contiguous && (!kValue || (first >= begin && first + kTokens <= end))) {
        if (lane == 0) {
          if (!kValue) shared.parts[turn.at] = kAllParts;
          barrier_expect(full, Config::kTileBytes);
        }
        __syncwarp();
        if (lane < kColumns) {
          bulk_copy_box(stage + lane * (kTokens * 128), kValue ? &maps.value : &maps.key, lane * 64,
                        blocks.place(first), item.kv_head, 0, full);
        }
      } else {
        uint32_t by_hand = 0;  // bit l: lane l's part
        if constexpr (kValue) {
          const bool whole = token >= begin && token + kPrefillPart <= end;
          by_hand = __ballot_sync(0xffffffffu, block >= 0 && !whole) & kAllParts;
#pragma unroll 1
          for (uint32_t rest = by_hand; rest != 0; rest &= rest - 1) {
            const int of = __ffs(rest) - 1, at = first + of * kPrefillPart;
            copy_value_part<Config>(p.kv, item.kv_head, __shfl_sync(0xffffffffu, block, of),
                                    blocks.place(at), begin - at, end - at, stage + of * kPartStep,
                                    lane);
          }
        } else {
          const uint32_t there = __ballot_sync(0xffffffffu, block >= 0 || !blocks.seen(token));
          if (lane == 0) shared.parts[turn.at] = there & kAllParts;
        }
        if (lane == 0) barrier_expect(full, (kParts - __popc(by_hand)) * kPartBytes);
        __syncwarp();
        // A block that is not there is read as zeros.
        const int from = block >= 0 ? block : static_cast<int>(p.kv.num_blocks);
        const int place = blocks.place(token);
        const uint32_t to = stage + part * kPartStep;
        if (column < kColumns && (by_hand >> part & 1) == 0) {
          if constexpr (Config::kForm == PageForm::kRows) {
            bulk_copy_box(to + column * (kTokens * 128), &part_map, column * 64, place,
                          item.kv_head, from, full);
          } else if constexpr (kValue) {
            bulk_copy_box(to, &part_map, 0, 0, item.kv_head, from, full);
          } else {
            bulk_copy_box(to, &part_map, 0, 0, place / 8, item.kv_head, from, full);
          }
        }
      }
      if (!kValue) tell_wanted(shared, item, i, lane);
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
  wait_for_predecessor();
  Turn<Config::kQueries> turn;
  each_item(shared, lane, [&](const PrefillItem& item) {
    const uint32_t query = storage + turn.at * Config::kQueryBytes;
    barrier_wait(shared_address(&shared.query_empty[turn.at]), turn.parity ^ 1);
    if (shape.query_boxes) {
      const uint32_t full = shared_address(&shared.query_full[turn.at]);
      if (lane == 0) barrier_expect(full, Config::kQueryBytes);
      __syncwarp();
      if (lane < Config::kColumns) {
        bulk_copy_box(
            query + lane * (Config::kRows * 128), &map, lane * 64, item.kv_head * shape.group,
            item.first_query + static_cast<int>(shape.group_divisor.divide(item.first_row)), 0,
            full);
      }
      turn.next();
      return;
    }
#pragma unroll 4
    for (int i = lane; i < Config::kRows * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int index = item.first_row + min(row, item.rows - 1);
      const int token = static_cast<int>(shape.group_divisor.divide(index));
      const int head = item.kv_head * shape.group + index - token * shape.group;
      copy16_async(query + chunk / 8 * (Config::kRows * 128) + row * 128 + ((chunk ^ row) % 8) * 16,
                   static_cast<const T*>(p.query) +
                       static_cast<int64_t>(item.first_query + token) * p.query_stride +
                       head * kHeadSize + chunk * 8);
    }
    wait_all_copies();
    fence_async_proxy();
    barrier_arrive_warp(shared_address(&shared.query_full[turn.at]), lane);
    turn.next();
  });
}

#endif

}  // namespace vllm_kernels::cuda
