// paged_attention of many query rows a sequence (prompts, and chunks of them behind a cached
// prefix) on Hopper's warpgroup products: one launch of one block a multiprocessor for any batch.
//
// A block takes items (attention_prefill_work.cuh) one after the other. Two or three warpgroups
// attend, 64 of an item's rows each (attention_prefill.cuh), over tiles of tokens from the last to
// the first. Of one more warpgroup one warp copies K, one copies V, one the queries, and one finds
// items. They run ahead into the next item while the last one ends.
#pragma once
#include <bit>

#include "cuda/attention_prefill.cuh"
#include "cuda/cache_maps.cuh"
#include "cuda/launch.cuh"
#include "cuda/paged_attention_prefill.h"

namespace vllm_kernels::cuda {

constexpr int kPrefillQueue = 4;

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

// One warp: which items this block takes.
template <typename Config>
__device__ __forceinline__ void queue_items(const PagedAttentionParams& p,
                                            const PrefillShape& shape,
                                            PrefillShared<Config>& shared, uint32_t* next,
                                            int lane) {
  wait_for_predecessor();
  // Not before: what follows it here reads what the predecessor wrote, and does not wait for it.
  if (shape.leads) launch_dependents();
  PrefillPlan<Config::kHeadSize, Config::kRows, Config::kTokens> plan;
  plan.make(p, shape, lane);
  const uint32_t blocks = plan.blocks();
  const uint32_t count = blockIdx.x < blocks ? plan.items() : 0;
  uint32_t index = blockIdx.x;
  Turn<kPrefillQueue> turn;
#pragma unroll 1
  for (uint32_t number = 0;; ++number, turn.next()) {
    PrefillItem& item = shared.items[turn.at];
    barrier_wait(shared_address(&shared.item_empty[turn.at]), turn.parity ^ 1);
    if (index < count) plan.find(p, shape, index, lane, item);
    if (lane == 0) {
      if (index >= count) item.seq = -1;
      barrier_arrive(shared_address(&shared.item_full[turn.at]));
    }
    __syncwarp();
    if (index >= count) return;
    // Late, so that no block holds items back that others could start. The last of all calls
    // brings the counter back to 0.
    barrier_wait(shared_address(&shared.wanted), number & 1);
    index = count;
    if (lane == 0 && count > blocks) index = blocks + atomicInc(next, count - 1);
    index = __shfl_sync(0xffffffffu, index, 0);
  }
}

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

// One warp: K, or V, of those items.
template <typename Config, bool kValue>
__device__ __forceinline__ void copy_tiles(const PagedAttentionParams& p, const PrefillShape& shape,
                                           const CUtensorMap& map, PrefillShared<Config>& shared,
                                           uint32_t storage, int lane) {
  constexpr int kTokens = Config::kTokens;
  using Tile = PrefillTile<Config>;
  constexpr int kParts = Tile::kParts;
  constexpr int kAhead = 32 / kParts;  // tiles whose blocks are looked up together
  constexpr int kColumns = Config::kForm == PageForm::kRows ? Config::kColumns : 1;
  constexpr uint32_t kPartBytes =
      Config::kForm == PageForm::kRows ? kColumns * kPrefillPart * 128 : Tile::kPartBytes;
  constexpr uint32_t kPartStep =
      Config::kForm == PageForm::kRows ? kPrefillPart * 128 : Tile::kPartBytes;  // to the next part
  static_assert(kParts * kColumns <= 32);
  wait_for_predecessor();
  Turn<kValue ? Config::kValueStages : Config::kKeyStages> turn;
  each_item(shared, lane, [&](const PrefillItem& item) {
    const int32_t* table = p.block_tables + item.seq * p.block_table_stride;
    const int part = lane % kParts, column = lane / kParts;
    // Tokens that any row sees. Pages without them are not looked at.
    const int begin = item.begin, end = item.high + 1;
    const auto seen = [&](int token) { return token + kPrefillPart > begin && token < end; };
    int32_t blocks = -1;
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i, turn.next()) {
      const int tile = item.first_tile + item.tiles - 1 - i;
      if (i % kAhead == 0) {
        const int token = (tile - lane / kParts) * kTokens + part * kPrefillPart;
        const bool looks = lane < kAhead * kParts && token >= 0 && seen(token);
        blocks = looks ? table[token >> shape.page_shift] : -1;
      }
      const int token = tile * kTokens + part * kPrefillPart;
      const int32_t block = __shfl_sync(0xffffffffu, blocks, i % kAhead * kParts + part);
      const bool good = static_cast<uint32_t>(block) < static_cast<uint32_t>(p.kv.num_blocks);
      const int in_page = token & ((1 << shape.page_shift) - 1);
      const uint32_t stage = storage + turn.at * Config::kTileBytes;
      const uint32_t full =
          shared_address(kValue ? &shared.value_full[turn.at] : &shared.key_full[turn.at]);
      barrier_wait(
          shared_address(kValue ? &shared.value_empty[turn.at] : &shared.key_empty[turn.at]),
          turn.parity ^ 1);
      uint32_t by_hand = 0;  // bit l: lane l's part
      if constexpr (kValue) {
        const bool whole = token >= begin && token + kPrefillPart <= end;
        by_hand = __ballot_sync(0xffffffffu, good && !whole) & ((1u << kParts) - 1);
#pragma unroll 1
        for (uint32_t rest = by_hand; rest != 0; rest &= rest - 1) {
          const int of = __ffs(rest) - 1, first = tile * kTokens + of * kPrefillPart;
          copy_value_part<Config>(p.kv, item.kv_head, __shfl_sync(0xffffffffu, block, of),
                                  first & ((1 << shape.page_shift) - 1), begin - first, end - first,
                                  stage + of * kPartStep, lane);
        }
      } else {
        const uint32_t there = __ballot_sync(0xffffffffu, good || !seen(token));
        if (lane == 0) shared.parts[turn.at] = there & ((1u << kParts) - 1);
      }
      if (lane == 0) barrier_expect(full, (kParts - __popc(by_hand)) * kPartBytes);
      __syncwarp();
      // A block that is not there is read as zeros.
      const int from = good ? block : static_cast<int>(p.kv.num_blocks);
      const uint32_t to = stage + part * kPartStep;
      if (column < kColumns && (by_hand >> part & 1) == 0) {
        if constexpr (Config::kForm == PageForm::kRows) {
          bulk_copy_box(to + column * (kTokens * 128), &map, column * 64, in_page, item.kv_head,
                        from, full);
        } else if constexpr (kValue) {
          bulk_copy_box(to, &map, 0, 0, item.kv_head, from, full);
        } else {
          bulk_copy_box(to, &map, 0, 0, in_page / 8, item.kv_head, from, full);
        }
      }
      if (!kValue && i == max(0, item.tiles - 3) && lane == 0) {
        barrier_arrive(shared_address(&shared.wanted));
      }
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

// What one warpgroup does: 64 rows of all items, as one sequence of tiles. An item's first scores
// are under way before the item ahead of it has ended. The warpgroups do not wait for each other:
// their phases drift apart, so that one's products run while another takes exponentials.
template <typename Config>
__device__ __forceinline__ void attend(const PagedAttentionParams& p, const PrefillShape& shape,
                                       const ScoreCap& cap, PrefillShared<Config>& shared,
                                       uint32_t query, uint32_t key, uint32_t value, int warpgroup,
                                       int thread) {
  constexpr int kTokens = Config::kTokens;
  constexpr uint32_t kTileBytes = Config::kTileBytes;
  using Tile = PrefillTile<Config>;
  const int lane = thread % 32;
  const int row = warpgroup * 64 + thread / 32 * 16 + lane / 4;  // and 8 behind it
  query += warpgroup * 64 * 128;
  Tile tile;
  Turn<Config::kKeyStages> keys;
  Turn<Config::kValueStages> values;
  Turn<Config::kQueries> queries;
  Turn<kPrefillQueue> items;

  // The item at hand.
  uint32_t at_hand;  // its place in the queue
  int left;          // tiles of it whose scores are not under way
  int first;         // token of the next tile
  // Row r's query token of the sequence, and head.
  const auto place = [&](const PrefillItem& item, int r, int& head) {
    const int index = item.first_row + min(row + 8 * r, item.rows - 1);
    const int token = static_cast<int>(shape.group_divisor.divide(index));
    head = item.kv_head * shape.group + index - token * shape.group;
    return token;
  };
  const auto release_query = [&] {
    barrier_arrive_warp(shared_address(&shared.query_empty[queries.at]), lane);
    queries.next();
  };
  const auto take_item = [&] {  // whether there is one
    barrier_wait(shared_address(&shared.item_full[items.at]), items.parity);
    const PrefillItem& item = shared.items[items.at];
    if (item.seq < 0) return false;
    at_hand = items.at;
    left = item.tiles;
    first = (item.first_tile + item.tiles - 1) * kTokens;
    barrier_wait(shared_address(&shared.query_full[queries.at]), queries.parity);
    if constexpr (Config::kQueryInRegisters) {
      tile.load_query(query + queries.at * Config::kQueryBytes, thread);
      release_query();
    }
    return true;
  };
  const auto start_scores = [&] {
    tile.start_scores(query + queries.at * Config::kQueryBytes, key + keys.at * kTileBytes);
  };
  float factor[2];
  bool raised;
  uint32_t parts;  // of the tile whose scores are under way, that are there
  bool plain;      // whether every row sees every token of it
  const auto look = [&] {
    const PrefillItem& item = shared.items[at_hand];
    parts = shared.parts[keys.at];
    plain = first + kTokens <= item.low + 1 &&
            (p.sliding_window == 0 || first > item.high - p.sliding_window);
  };
  // What follows the products of those scores.
  const auto weigh = [&] {
    settle(tile.scores);
    barrier_arrive_warp(shared_address(&shared.key_empty[keys.at]), lane);
    keys.next();
    if (--left == 0 && !Config::kQueryInRegisters) release_query();
    if (Config::kAdjusts || !plain) {
      const PrefillItem& item = shared.items[at_hand];
      int head[2], behind[2];  // behind: tokens that the row sees from this lane's first column on
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        behind[r] = item.position + place(item, r, head[r]) - first - lane % 4 * 2;
      }
      if constexpr (Config::kAdjusts) {
        tile.each_score([&](int i, int j, float score) {
          return adjusted_score(p, cap, head[j / 2], i * 8 + j % 2 - behind[j / 2],
                                score * shape.to_log2);
        });
      } else {
        const int window = p.sliding_window > 0 ? p.sliding_window : INT32_MAX / 2;
        uint32_t seen[2];  // bit 2i + j % 2: column i of the row
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          seen[r] = Tile::columns_until(behind[r]);
          if (behind[r] >= window) seen[r] &= ~Tile::columns_until(behind[r] - window);
        }
        tile.each_score([&](int i, int j, float score) {
          return seen[j / 2] >> (2 * i + j % 2) & 1 ? score : -INFINITY;
        });
      }
    }
    if (parts != (1u << Tile::kParts) - 1) {
      tile.each_score(
          [&](int i, int, float score) { return parts >> i / 2 & 1 ? score : -INFINITY; });
    }
    raised = tile.weigh(Config::kAdjusts ? 1.0f : shape.to_log2, factor);
    first -= kTokens;
  };
  const auto start_out = [&] {
    barrier_wait(shared_address(&shared.value_full[values.at]), values.parity);
    tile.start_out(value + values.at * kTileBytes);
  };
  const auto end_out = [&] {
    wgmma_wait<0>();
    settle(tile.out);
    settle(tile.weights);
    barrier_arrive_warp(shared_address(&shared.value_empty[values.at]), lane);
    values.next();
  };
  // The item in `slot`.
  const auto finish = [&](uint32_t slot, const float (&maximum)[2], const float (&sum)[2]) {
    const PrefillItem& item = shared.items[slot];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int head;
      const int64_t token = item.first_query + place(item, r, head);
      const RowResult result = row_result(p, item.kv_head, head, maximum[r], quad_sum(sum[r]));
      const bool there = row + 8 * r < item.rows;
      tile.store(static_cast<typename Config::T*>(p.out) + token * p.out_stride +
                     head * int64_t{Config::kHeadSize},
                 there, r, result.scale, lane);
      if (p.lse != nullptr && there && lane % 4 == 0) {
        p.lse[token * p.num_heads + head] = result.lse;
      }
    }
    barrier_arrive_warp(shared_address(&shared.item_empty[slot]), lane);
  };

  wait_for_predecessor();
  if (take_item()) {
    tile.clear();
    tile.start_sums();
    barrier_wait(shared_address(&shared.key_full[keys.at]), keys.parity);
    start_scores();
    look();
    wgmma_wait<0>();
    weigh();
    tile.pack_weights();
    uint32_t slot = items.at;
    items.next();
    float maximum[2], sum[2];  // of the item that ends
#pragma unroll 1
    for (;;) {
      const bool ends = left == 0;
      if (ends) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          maximum[r] = tile.maximum[r];
          sum[r] = tile.sum[r];
        }
        if (!take_item()) break;
        tile.start_sums();
      }
      barrier_wait(shared_address(&shared.key_full[keys.at]), keys.parity);
      start_scores();
      start_out();
      look();
      wgmma_wait<1>();
      weigh();
      // ptxas moves the wait that follows ahead of whatever is no access to memory, and weights are
      // to be computed while the other product runs.
      if (lane == 0) {
        store_shared(shared_address(&shared.pin[warpgroup * 4 + thread / 32]),
                     tile.sum[0] + tile.sum[1]);
      }
      end_out();
      if (ends) {
        finish(slot, maximum, sum);
        tile.clear();
        slot = items.at;
        items.next();
      } else if (raised) {
        tile.rescale(factor);
      }
      tile.pack_weights();
    }
    start_out();
    end_out();
    finish(slot, maximum, sum);
  }
}

#endif

struct PrefillMaps {
  CUtensorMap key, value, query;
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    paged_attention_prefill_kernel(const __grid_constant__ PagedAttentionParams p,
                                   const __grid_constant__ PrefillShape shape,
                                   const __grid_constant__ ScoreCap cap,
                                   const __grid_constant__ PrefillMaps maps, uint32_t* next) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  using Shared = PrefillShared<Config>;
  constexpr int kWarps = 4 * Config::kGroups;       // that attend
  extern __shared__ __align__(1024) char memory[];  // the queries, K, V
  __shared__ Shared shared;
  if (!shape.leads) launch_dependents();
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const uint32_t query = shared_address(memory);
  const uint32_t key = query + Shared::kQueries * Config::kQueryBytes;
  const uint32_t value = key + Shared::kKeys * Config::kTileBytes;
  if (threadIdx.x == 0) {
    const auto init = [](auto& barriers, int arrivals) {
      for (uint64_t& barrier : barriers) barrier_init(shared_address(&barrier), arrivals);
    };
    init(shared.key_full, 1);
    init(shared.value_full, 1);
    init(shared.key_empty, kWarps * kWarpArrivals);
    init(shared.value_empty, kWarps * kWarpArrivals);
    init(shared.query_full, shape.query_boxes ? 1 : kWarpArrivals);
    init(shared.query_empty, kWarps * kWarpArrivals);
    init(shared.item_full, 1);
    init(shared.item_empty, (kWarps + 3) * kWarpArrivals);
    barrier_init(shared_address(&shared.wanted), 1);
    fence_barrier_init();
    prefetch_map(&maps.key);
    prefetch_map(&maps.value);
    if (shape.query_boxes) prefetch_map(&maps.query);
  }
  __syncthreads();
  if (warp >= kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kServantRegisters));
    if (warp == kWarps) {
      queue_items(p, shape, shared, next, lane);
    } else if (warp == kWarps + 1) {
      copy_tiles<Config, false>(p, shape, maps.key, shared, key, lane);
    } else if (warp == kWarps + 2) {
      copy_tiles<Config, true>(p, shape, maps.value, shared, value, lane);
    } else {
      copy_queries<Config>(p, shape, maps.query, shared, query, lane);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kRegisters));
    attend<Config>(p, shape, cap, shared, query, key, value, warp / 4, threadIdx.x % 128);
  }
#endif
}

// Pages of layout vllm as (8 tokens x 16 bytes, chunk, token / 8, KV head, block), and as (token,
// dimension, KV head, block): pages of 16 tokens in rows of 128 bytes. See attention_prefill.cuh.
template <typename Config>
PrefillMaps prefill_maps(const PagedAttentionParams& p, const PrefillShape& shape) {
  const PagedKv& kv = p.kv;
  const auto unsign = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  PrefillMaps maps;
  if (shape.query_boxes) {  // (dimension, head, token, 1): an item's rows follow each other
    const auto heads = static_cast<cuuint32_t>(shape.group);
    maps.query = cache_map<4>(
        const_cast<void*>(p.query),
        {unsign(kv.head_size), unsign(p.num_heads), unsign(p.num_tokens), 1},
        {unsign(kv.head_size * 2), unsign(p.query_stride * 2), unsign(p.query_stride * 2)},
        {64, heads, Config::kRows / heads, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  if (kv.layout != KvLayout::kVllm) {
    maps.key = row_map(kv, kv.key, kv.key_token_stride, kv.key_head_stride, kv.key_block_stride,
                       kPrefillPart);
    maps.value = row_map(kv, kv.value, kv.value_token_stride, kv.value_head_stride,
                         kv.value_block_stride, kPrefillPart);
    return maps;
  }
  const auto chunks = static_cast<cuuint32_t>(kv.head_size / 8);
  maps.key = cache_map<5>(
      kv.key,
      {64, chunks, unsign(kv.block_size / 8), unsign(kv.num_kv_heads), unsign(kv.num_blocks)},
      {unsign(kv.key_chunk_stride * 2), 128, unsign(kv.key_head_stride * 2),
       unsign(kv.key_block_stride * 2)},
      {64, chunks, 2, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
  const auto rows = static_cast<cuuint32_t>(kv.head_size / 4);
  maps.value =
      cache_map<4>(kv.value, {64, rows, unsign(kv.num_kv_heads), unsign(kv.num_blocks)},
                   {128, unsign(kv.value_head_stride * 2), unsign(kv.value_block_stride * 2)},
                   {64, rows, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  return maps;
}

template <typename T, int kHeadSize, PageForm kForm, bool kAdjusts>
void launch_prefill(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  using Config = PrefillConfig<T, kHeadSize, kForm, kAdjusts>;
  constexpr auto kKernel = paged_attention_prefill_kernel<Config>;
  const int group = p.num_heads / p.kv.num_kv_heads;
  const PrefillShape shape = {
      .group = group,
      .page_shift = static_cast<int>(std::bit_width(static_cast<uint32_t>(p.kv.block_size))) - 1,
      .least_rows = launch.least_query_len * group,
      .to_log2 = p.scale * kLog2E,
      .query_boxes = Config::kRows % group == 0,
      .leads = launch.leads,
      .group_divisor = FastDivisor(group)};
  dynamic_shared_memory<kKernel>("paged_attention");
  launch_kernel("paged_attention", kKernel, dim3(current_device_info().multiprocessors),
                dim3(Config::kThreads), Config::kSharedBytes, stream, p, shape,
                score_cap(p.softcap), prefill_maps<Config>(p, shape), launch.next);
}

template <int kHeadSize>
void launch_prefill(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  const auto with_type = [&](auto tag) {
    using T = decltype(tag);
    const auto with_form = [&](auto form) {
      constexpr PageForm kForm = decltype(form)::value;
      if (p.softcap > 0.0f || p.alibi_slopes != nullptr) {
        return launch_prefill<T, kHeadSize, kForm, true>(p, launch, stream);
      }
      launch_prefill<T, kHeadSize, kForm, false>(p, launch, stream);
    };
    if (p.kv.layout == KvLayout::kVllm) {
      with_form(std::integral_constant<PageForm, PageForm::kPages>{});
    } else {
      with_form(std::integral_constant<PageForm, PageForm::kRows>{});
    }
  };
  p.dtype == DType::kFloat16 ? with_type(Half{}) : with_type(BFloat16{});
}

}  // namespace vllm_kernels::cuda
