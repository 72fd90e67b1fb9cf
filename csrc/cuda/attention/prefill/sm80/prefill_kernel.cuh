// paged_attention and varlen_attention of many query rows a sequence on the tensor cores as every
// architecture from sm_80 on has them. On Hopper it takes what
// attention/prefill/sm90/prefill_kernel.cuh does not: other head sizes and pages, heads above 192
// of 8 bits.
//
// A block, one a multiprocessor, takes items (attention/prefill/tile_scheduler.cuh) one after the
// other, over tiles of 64 tokens from the last to the first. Its warps copy tiles into stages
// (attention/prefill/sm80/producer.cuh), one ahead, and attend, 16 or 32 of the rows each
// (attention/prefill/sm80/mainloop.cuh). Barriers of the stages, not of the block, let warps fall
// out of step: of the two that share a tensor core one multiplies while the other takes
// exponentials.
//
// What limits it on Hopper: a product takes its tensor core 6 cycles, and any other instruction
// that reads registers another (benchmarks/probes/mma_sync.cu). So instructions are saved
// everywhere.
#pragma once
#include "cuda/attention/prefill/prefill_sm80.h"
#include "cuda/attention/prefill/sm80/mainloop.cuh"
#include "cuda/attention/prefill/sm80/producer.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

// Tokens that any row of a warp sees, and those that every row sees.
struct alignas(16) WarpSight {
  int begin, end;
  int whole_begin, whole_end;
};

template <typename Config>
struct PrefillMmaShared {
  using Plan = PrefillPlan<Config::kHeadSize, 0, Config::kTokens>;
  // One warp writes the next while others end the last; seq < 0: there are no more.
  PrefillMmaItem items[3];
  // Of stages: their copies are there; nobody reads them any more.
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint32_t present[Config::kStages][2];  // bits, of a stage's tokens
  // 8-bit caches: what undoes a query row's scaling, times K's scale.
  float factors[Config::kWidens ? Config::kWarps * Config::kWarpRows : 1];
  WarpSight sights[Config::kWarps];
  GroupPlace places[kShares][kListedTiles];
  alignas(Plan) char plans[32 * sizeof(Plan)];  // the first warp's lanes'

  __device__ __forceinline__ Plan& plan(int lane) { return reinterpret_cast<Plan*>(plans)[lane]; }
};

// What one warp does with an item, tile by tile.
template <typename Config>
struct PrefillMmaRows {
  using T = typename Config::T;
  using Tile = PrefillMmaTile<Config>;
  static constexpr int kRowTiles = Config::kRowTiles, kWarpRows = Config::kWarpRows;
  static constexpr int kTokens = Config::kTokens;

  const PagedAttentionParams& p;
  const PrefillMmaShape& shape;
  float* factors;     // of the block's rows
  WarpSight* sights;  // of the block's warps
  Tile tile;

  // Asked for where they are needed: registers are short.
  static __device__ __forceinline__ int lane() { return in_register(threadIdx.x) % 32; }
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
      p.dtype == DType::kFloat16 ? load_query<Half>(item) : load_query<BFloat16>(item);
      if (p.kv.k_scale != nullptr && lane() < kWarpRows) {
        float& factor = factors[first_row() + lane()];
        factor = usable_scale(factor * p.kv.k_scale[item.kv_head * p.kv.scale_stride]);
      }
    }
    tile.clear();
    if (lane() == 0) {
      WarpSight sight = {.begin = 0, .end = INT32_MIN, .whole_begin = 0, .whole_end = 0};
      if (has(item, 0)) {
        int head;
        const int low = item.position + place(item, 0, head);
        const int high = item.position + place(item, kWarpRows - 1, head);
        const SeenTokens any = seen_tokens(p, low, high, item.length);
        const SeenTokens every = seen_tokens(p, high, low, item.length);
        sight = {
            .begin = any.begin, .end = any.end, .whole_begin = every.begin, .whole_end = every.end};
      }
      sights[threadIdx.x / 32] = sight;
    }
    __syncwarp();
  }

  // A tile whose K, V and present tokens (a bit each) lie at these addresses.
  __device__ __forceinline__ void attend(const PrefillMmaItem& item, int tile_index, uint32_t key,
                                         uint32_t value, const uint32_t* present) {
    const int first = tile_index * kTokens;
    const WarpSight sight = sights[threadIdx.x / 32];
    if (first >= sight.end || first + kTokens <= sight.begin) return;
    const bool adjusts = p.softcap > 0.0f || p.alibi_slopes != nullptr;
    typename Tile::Scores scores;
    tile.multiply_keys(scores, key);
    if (adjusts) adjust(item, first, scores);
    const uint64_t tokens = present[0] | uint64_t{present[1]} << 32;
    if (tokens != ~uint64_t{0} || first < sight.whole_begin || first + kTokens > sight.whole_end) {
      mask(item, first, tokens, scores);
    }
    tile.weigh(scores, [&](int t, int r) { return adjusts ? 1.0f : unit(t, r); });
    tile.multiply_values(scores, value);
  }

  __device__ __forceinline__ void finish(const PrefillItem& item) const {
    if (!Config::kWidens) return store<T>(item);
    p.dtype == DType::kFloat16 ? store<Half>(item) : store<BFloat16>(item);
  }

 private:
  // From a row's product to log2 units.
  __device__ __forceinline__ float unit(int tile_index, int r) const {
    if constexpr (!Config::kWidens) return shape.plan.to_log2;
    return shape.plan.to_log2 * factors[first_row() + Tile::row_of(lane(), tile_index, r)];
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
  __device__ __forceinline__ void mask(const PrefillMmaItem& item, int first, uint64_t tokens,
                                       typename Tile::Scores& scores) const {
    const int column = lane() % 4 * 2;
    tokens >>= column;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int position = item.position + place(item, t, r, head);
        const SeenTokens seen_here = seen_tokens(p, position, position, item.length);
        const int before = first + column;
        const uint64_t seen =
            tokens & tokens_until(seen_here.end - before) & ~tokens_until(seen_here.begin - before);
        each_score(scores, t, r, [&](float& score, int at) {
          if ((seen >> at & 1) == 0) score = -INFINITY;
        });
      }
    }
  }
  static __device__ __forceinline__ uint64_t tokens_until(int count) {
    return count <= 0 ? 0 : count >= kTokens ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
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
__global__ void __launch_bounds__(Config::kThreads, 1)
    paged_attention_prefill_mma_kernel(const __grid_constant__ PagedAttentionParams p,
                                       const __grid_constant__ PrefillMmaShape shape,
                                       uint32_t* next) {
  using Shared = PrefillMmaShared<Config>;
  extern __shared__ __align__(128) char memory[];
  __shared__ Shared shared;
  if (!shape.leads) launch_dependents();
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
  if (threadIdx.x == 0) {
    const int arrivals = blockDim.x / 32 * kWarpArrivals;
    for (int stage = 0; stage < Config::kStages; ++stage) {
      // Every lane's copies of a tile arrive, and the lane that says which tokens are there.
      barrier_init(shared_address(&shared.full[stage]),
                   arrivals + (Config::kWidens ? 0 : blockDim.x));
      barrier_init(shared_address(&shared.empty[stage]), arrivals);
    }
  }
  __syncthreads();
  if (shared.items[0].seq < 0) return;

  // Made anew for every tile: what follows from the thread is not worth registers in between.
  const auto copies = [&](uint32_t share) {
    return PrefillMmaCopies<Config>{.p = p,
                                    .shape = shape,
                                    .places = shared.places[share],
                                    .storage = shared_address(memory),
                                    .share = share,
                                    .lane = in_register(threadIdx.x) % 32u};
  };
  // share(i) for all of this warp's shares of a tile's copies.
  const auto each_share = [&](const auto& share) {
    uint32_t i = in_register(threadIdx.x) / 32u;
#pragma unroll 1
    do {
      share(i);
    } while ((i += blockDim.x / 32) < kShares);
  };
  PrefillMmaRows<Config> rows = {
      .p = p, .shape = shape, .factors = shared.factors, .sights = shared.sights};
  rows.tile.set_addresses(threadIdx.x % 32);
  constexpr int kQueryRest =  // of a warp
      Config::kRowTiles * (Config::kHeadSize / 16 - Config::kHeldSteps) * 32 * 16;
  rows.tile.query_rest =
      in_register(shared_address(memory) + shape.stages * 2 * Config::kTileBytes +
                  Config::kRawBytes + threadIdx.x / 32 * kQueryRest + threadIdx.x % 32 * 16);
  const auto last_tile = [](const PrefillItem& item) { return item.first_tile + item.tiles - 1; };
  const auto after = [](int i, int count) { return i == count - 1 ? 0 : i + 1; };
  // Into a stage as soon as it is empty. `phase`: of the barriers of its turn.
  const auto start_copies = [&](const PrefillMmaItem& item, int tile, bool begins, int stage,
                                int phase) {
    barrier_wait(shared_address(&shared.empty[stage]), phase ^ 1);
    each_share([&](uint32_t share) {
      copies(share).start(item, tile, begins, stage, shared.present[stage]);
    });
    if constexpr (!Config::kWidens) {
#pragma unroll
      for (int i = 0; i < Config::kStages; ++i) {  // the instruction wants an address of the warp's
        if (i == stage) barrier_arrive_copies(shared_address(&shared.full[i]));
      }
      // For what the lane itself has written: which tokens are there, and the item that follows.
      if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) {
        barrier_arrive(shared_address(&shared.full[stage]));
      }
    }
  };
  start_copies(shared.items[0], last_tile(shared.items[0]), true, 0, 0);
  int stage = 0, phase = 0, slot = 0;
#pragma unroll 1
  for (;; slot = after(slot, 3)) {
    const PrefillMmaItem& item = shared.items[slot];
    const auto next_slot = [&] { return after(in_register(slot), 3); };
    rows.start(item);
    int tile = last_tile(item);
#pragma unroll 1
    for (bool ends = false; !ends; --tile) {
      const uint32_t full = shared_address(&shared.full[stage]);
      if constexpr (Config::kWidens) {
        wait_all_copies();
        each_share([&](uint32_t share) { copies(share).settle(item, tile, stage); });
        barrier_arrive_warp(full, in_register(threadIdx.x) % 32);
      }
      const int first_tile = item.first_tile, asks_at = item.asks_at;
      barrier_wait(full, phase);
      ends = tile == first_tile;
      // Late, so that no block holds items back that others could start. The last of all calls
      // brings the counter back to 0. (That the item is there is seen by the next tile's barrier.)
      if (tile == asks_at && threadIdx.x < 32) {
        typename Shared::Plan plan = shared.plan(threadIdx.x);
        const uint32_t count = plan.items();
        uint32_t index = count;
        if (threadIdx.x == 0 && count > gridDim.x) index = gridDim.x + atomicInc(next, count - 1);
        put_item(plan, __shfl_sync(0xffffffffu, index, 0), next_slot());
        shared.plan(threadIdx.x) = plan;
      }
      if (ends && tile == asks_at) __syncthreads();  // the item that follows is there
      const int next_stage = after(stage, shape.stages);
      const int next_phase = next_stage == 0 ? phase ^ 1 : phase;
      const PrefillMmaItem& copied = shared.items[ends ? next_slot() : slot];
      if (!ends || copied.seq >= 0) {
        start_copies(copied, ends ? last_tile(copied) : tile - 1, ends, next_stage, next_phase);
      }
      rows.attend(item, tile, copies(0).key_at(stage), copies(0).value_at(stage),
                  shared.present[stage]);
      barrier_arrive_warp(shared_address(&shared.empty[stage]), in_register(threadIdx.x) % 32);
      stage = next_stage;
      phase = next_phase;
    }
    rows.finish(item);
    if (shared.items[next_slot()].seq < 0) return;
  }
}

template <typename T, int kHeadSize, PageForm kForm, bool kWidens>
bool launch_prefill_mma(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  using Config = PrefillMmaConfig<T, kHeadSize, kForm, kWidens>;
  constexpr auto kKernel = paged_attention_prefill_mma_kernel<Config>;
  const PagedKv& kv = p.kv;
  const int group = p.num_heads / kv.num_kv_heads;
  const bool rows = kv.layout != KvLayout::kVllm;
  // With fewer items than multiprocessors: twice as many, of half the rows.
  const int multiprocessors = current_device_info().multiprocessors;
  const int most_rows = Config::kWarps * Config::kWarpRows;
  const int64_t items =
      (int64_t{p.num_tokens} * group + most_rows - 1) / most_rows * kv.num_kv_heads;
  int warps = items < multiprocessors ? Config::kWarps / 2 : Config::kWarps;
  int stages = Config::kStages;
  const int room = dynamic_shared_memory<kKernel>("paged_attention");
  if (Config::shared_bytes(warps, stages) > room) stages = 2;
  while (warps > 2 && Config::shared_bytes(warps, stages) > room) warps /= 2;
  if (Config::shared_bytes(warps, stages) > room) return false;
  const auto units = [&](int64_t stride) {
    return static_cast<uint32_t>(stride * size_of(kv.dtype) / 16);
  };
  const PrefillMmaShape shape = {
      .plan = {.group = group,
               .page_shift = 0,
               .least_rows = launch.least_query_len * group,
               .to_log2 = p.scale * kLog2E,
               .window_right = std::min(p.window_right, kMostRight),
               .rows = Config::kWarpRows * warps,
               .query_boxes = false,
               .leads = false,
               .group_divisor = FastDivisor(group)},
      .cap = score_cap(p.softcap),
      .leads = launch.leads,
      .stages = stages,
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
  launch_kernel("paged_attention", kKernel, dim3(multiprocessors), dim3(32 * warps),
                Config::shared_bytes(warps, stages), stream, p, shape, launch.next);
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
