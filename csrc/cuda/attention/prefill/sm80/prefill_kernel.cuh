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
struct Sm80Shared {
  using Scheduler = PrefillTileScheduler<Config::kHeadSize, 0, Config::kTokens>;
  // One warp writes the next while others end the last; seq < 0: there are no more.
  Sm80Tile work_tiles[3];
  // Of stages: their copies are there; nobody reads them any more.
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint32_t present[Config::kStages][2];  // bits, of a stage's tokens
  // 8-bit caches: what undoes a query row's scaling, times K's scale.
  float factors[Config::kCacheIs8Bit ? Config::kWarps * Config::kWarpRows : 1];
  WarpSight sights[Config::kWarps];
  GroupAddress addresses[kShares][kListedTiles];
  alignas(Scheduler) char plans[32 * sizeof(Scheduler)];  // the first warp's lanes'

  __device__ __forceinline__ Scheduler& scheduler(int lane) {
    return reinterpret_cast<Scheduler*>(plans)[lane];
  }
};

// What one warp does with an item, tile by tile.
template <typename Config>
struct Sm80Rows {
  using T = typename Config::T;
  using Mma = Sm80Mma<Config>;
  static constexpr int kRowTiles = Config::kRowTiles, kWarpRows = Config::kWarpRows;
  static constexpr int kTokens = Config::kTokens;

  const PagedAttentionParams& p;
  const Sm80Shape& shape;
  float* factors;     // of the block's rows
  WarpSight* sights;  // of the block's warps
  Mma tile;

  // Asked for where they are needed: registers are short.
  static __device__ __forceinline__ int lane() { return opaque(threadIdx.x) % 32; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 * kWarpRows; }

  // The query token of the sequence, and the head, of this lane's row r of a row tile.
  __device__ __forceinline__ int token_of_row(const PrefillTile& work_tile, int tile_index, int r,
                                              int& head) const {
    return token_of_row(work_tile, Mma::row_of(lane(), tile_index, r), head);
  }
  __device__ __forceinline__ int token_of_row(const PrefillTile& work_tile, int row,
                                              int& head) const {
    const int index = work_tile.first_row + min(first_row() + row, work_tile.rows - 1);
    const int token = static_cast<int>(shape.scheduler.group_divisor.divide(index));
    head = work_tile.kv_head * shape.scheduler.group + index - token * shape.scheduler.group;
    return token;
  }
  __device__ __forceinline__ bool has(const PrefillTile& work_tile, int row) const {
    return first_row() + row < work_tile.rows;
  }

  __device__ __forceinline__ uint64_t head_offset(int head) const {  // unsigned: one instruction
    return uint64_t{static_cast<uint32_t>(head)} * static_cast<uint32_t>(p.kv.head_size);
  }

  template <typename Query>
  __device__ __forceinline__ void load_query(const PrefillTile& work_tile) {
    tile.template load_query<Query>(
        [&](int row) -> const Query* {
          int head;
          const int token = token_of_row(work_tile, row, head);
          if (!has(work_tile, row)) return nullptr;
          return static_cast<const Query*>(p.query) +
                 static_cast<int64_t>(work_tile.first_query + token) * p.query_stride +
                 head_offset(head);
        },
        p.kv.head_size, factors + first_row(), lane());
  }

  __device__ __forceinline__ void start(const Sm80Tile& work_tile) {
    if constexpr (!Config::kCacheIs8Bit) {
      load_query<T>(work_tile);
    } else {
      p.dtype == DType::kFloat16 ? load_query<Half>(work_tile) : load_query<BFloat16>(work_tile);
      if (p.kv.k_scale != nullptr && lane() < kWarpRows) {
        float& factor = factors[first_row() + lane()];
        factor = usable_scale(factor * p.kv.k_scale[work_tile.kv_head * p.kv.scale_stride]);
      }
    }
    tile.clear();
    if (lane() == 0) {
      WarpSight sight = {.begin = 0, .end = INT32_MIN, .whole_begin = 0, .whole_end = 0};
      if (has(work_tile, 0)) {
        int head;
        const int low = work_tile.position + token_of_row(work_tile, 0, head);
        const int high = work_tile.position + token_of_row(work_tile, kWarpRows - 1, head);
        const VisibleTokens any = visible_tokens(p, low, high, work_tile.length);
        const VisibleTokens every = visible_tokens(p, high, low, work_tile.length);
        sight = {
            .begin = any.begin, .end = any.end, .whole_begin = every.begin, .whole_end = every.end};
      }
      sights[threadIdx.x / 32] = sight;
    }
    __syncwarp();
  }

  // A tile whose K, V and present tokens (a bit each) lie at these addresses.
  __device__ __forceinline__ void attend(const Sm80Tile& work_tile, int tile_index, uint32_t key,
                                         uint32_t value, const uint32_t* present) {
    const int first = tile_index * kTokens;
    const WarpSight sight = sights[threadIdx.x / 32];
    if (first >= sight.end || first + kTokens <= sight.begin) return;
    const bool adjusts = p.softcap > 0.0f || p.alibi_slopes != nullptr;
    typename Mma::Scores scores;
    tile.multiply_keys(scores, key);
    if (adjusts) adjust(work_tile, first, scores);
    const uint64_t tokens = present[0] | uint64_t{present[1]} << 32;
    if (tokens != ~uint64_t{0} || first < sight.whole_begin || first + kTokens > sight.whole_end) {
      mask(work_tile, first, tokens, scores);
    }
    tile.online_softmax(scores, [&](int t, int r) { return adjusts ? 1.0f : score_scale(t, r); });
    tile.multiply_values(scores, value);
  }

  __device__ __forceinline__ void finish(const PrefillTile& work_tile) const {
    if (!Config::kCacheIs8Bit) return store<T>(work_tile);
    p.dtype == DType::kFloat16 ? store<Half>(work_tile) : store<BFloat16>(work_tile);
  }

 private:
  // From a row's product to log2 units.
  __device__ __forceinline__ float score_scale(int tile_index, int r) const {
    if constexpr (!Config::kCacheIs8Bit) return shape.scheduler.softmax_scale_log2;
    return shape.scheduler.softmax_scale_log2 *
           factors[first_row() + Mma::row_of(lane(), tile_index, r)];
  }

  // action(score, tile_index, r, column) for all of this lane's; columns are relative to its first.
  template <typename Action>
  static __device__ __forceinline__ void each_score(typename Mma::Scores& scores, int t, int r,
                                                    const Action& action) {
#pragma unroll
    for (int i = 0; i < Mma::kScoreTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) action(scores[t][i][2 * r + j], 8 * i + j);
    }
  }

  // Scores to log2 units, capped and biased.
  __device__ __forceinline__ void adjust(const PrefillTile& work_tile, int first,
                                         typename Mma::Scores& scores) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int distance =
            first + lane() % 4 * 2 - work_tile.position - token_of_row(work_tile, t, r, head);
        const float scale = score_scale(t, r);
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
  __device__ __forceinline__ void mask(const Sm80Tile& work_tile, int first, uint64_t tokens,
                                       typename Mma::Scores& scores) const {
    const int column = lane() % 4 * 2;
    tokens >>= column;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int position = work_tile.position + token_of_row(work_tile, t, r, head);
        const VisibleTokens visible_here = visible_tokens(p, position, position, work_tile.length);
        const int before = first + column;
        const uint64_t visible = tokens & tokens_until(visible_here.end - before) &
                                 ~tokens_until(visible_here.begin - before);
        each_score(scores, t, r, [&](float& score, int at) {
          if ((visible >> at & 1) == 0) score = -INFINITY;
        });
      }
    }
  }
  static __device__ __forceinline__ uint64_t tokens_until(int count) {
    return count <= 0 ? 0 : count >= kTokens ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  }

  template <typename Out>
  __device__ __forceinline__ void store(const PrefillTile& work_tile) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int64_t token = work_tile.first_query + token_of_row(work_tile, t, r, head);
        const RowResult result =
            row_result(p, work_tile.kv_head, head, tile.row_max[t][r], quad_sum(tile.sum[t][r]));
        const bool present = has(work_tile, Mma::row_of(lane(), t, r));
        tile.template store<Out>(
            static_cast<Out*>(p.out) + token * p.out_stride + head_offset(head), present,
            p.kv.head_size, t, r, result.scale, lane());
        if (p.lse != nullptr && present && lane() % 4 == 0) {
          p.lse[token * p.num_heads + head] = result.lse;
        }
      }
    }
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    paged_attention_prefill_sm80_kernel(const __grid_constant__ PagedAttentionParams p,
                                        const __grid_constant__ Sm80Shape shape, uint32_t* next) {
  using Shared = Sm80Shared<Config>;
  extern __shared__ __align__(128) char memory[];
  __shared__ Shared shared;
  if (!shape.has_concurrent_launch) launch_dependents();
  wait_for_primary_kernel();
  // Not before: what follows it here reads what the predecessor wrote, and does not wait for it.
  if (shape.has_concurrent_launch) launch_dependents();

  // Item `index`, or that there are no more, to items[slot]. The first warp.
  const auto put_tile = [&](typename Shared::Scheduler& scheduler, uint32_t index, int slot) {
    const int lane = threadIdx.x % 32;
    Sm80Tile& work_tile = shared.work_tiles[slot];
    if (index >= scheduler.num_tiles()) {
      if (lane == 0) work_tile.seq = -1;
      return;
    }
    scheduler.get_tile(p, shape.scheduler, index, lane, work_tile);
    if (lane != 0) return;
    work_tile.length = key_range(p, work_tile.seq).count;
    work_tile.asks_at = work_tile.first_tile + (work_tile.tiles > 1 ? 1 : 0);
  };
  if (threadIdx.x < 32) {
    typename Shared::Scheduler scheduler;
    scheduler.make(p, shape.scheduler, threadIdx.x);
    put_tile(scheduler, blockIdx.x, 0);
    shared.scheduler(threadIdx.x) = scheduler;
  }
  if (threadIdx.x == 0) {
    const int arrivals = blockDim.x / 32 * kWarpArrivals;
    for (int stage = 0; stage < Config::kStages; ++stage) {
      // Every lane's copies of a tile arrive, and the lane that says which tokens are there.
      barrier_init(shared_address(&shared.full[stage]),
                   arrivals + (Config::kCacheIs8Bit ? 0 : blockDim.x));
      barrier_init(shared_address(&shared.empty[stage]), arrivals);
    }
  }
  __syncthreads();
  if (shared.work_tiles[0].seq < 0) return;

  // Made anew for every tile: what follows from the thread is not worth registers in between.
  const auto copies = [&](uint32_t share) {
    return Sm80Producer<Config>{.p = p,
                                .shape = shape,
                                .addresses = shared.addresses[share],
                                .storage = shared_address(memory),
                                .share = share,
                                .lane = opaque(threadIdx.x) % 32u};
  };
  // share(i) for all of this warp's shares of a tile's copies.
  const auto each_share = [&](const auto& share) {
    uint32_t i = opaque(threadIdx.x) / 32u;
#pragma unroll 1
    do {
      share(i);
    } while ((i += blockDim.x / 32) < kShares);
  };
  Sm80Rows<Config> rows = {
      .p = p, .shape = shape, .factors = shared.factors, .sights = shared.sights};
  rows.tile.set_addresses(threadIdx.x % 32);
  constexpr int kQueryRest =  // of a warp
      Config::kRowTiles * (Config::kHeadSize / 16 - Config::kHeldSteps) * 32 * 16;
  rows.tile.query_rest =
      opaque(shared_address(memory) + shape.stages * 2 * Config::kTileBytes + Config::kRawBytes +
             threadIdx.x / 32 * kQueryRest + threadIdx.x % 32 * 16);
  const auto last_tile = [](const PrefillTile& work_tile) {
    return work_tile.first_tile + work_tile.tiles - 1;
  };
  const auto after = [](int i, int count) { return i == count - 1 ? 0 : i + 1; };
  // Into a stage as soon as it is empty. `phase`: of the barriers of its turn.
  const auto start_copies = [&](const Sm80Tile& work_tile, int tile, bool begins, int stage,
                                int phase) {
    barrier_wait(shared_address(&shared.empty[stage]), phase ^ 1);
    each_share([&](uint32_t share) {
      copies(share).start(work_tile, tile, begins, stage, shared.present[stage]);
    });
    if constexpr (!Config::kCacheIs8Bit) {
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
  start_copies(shared.work_tiles[0], last_tile(shared.work_tiles[0]), true, 0, 0);
  int stage = 0, phase = 0, slot = 0;
#pragma unroll 1
  for (;; slot = after(slot, 3)) {
    const Sm80Tile& work_tile = shared.work_tiles[slot];
    const auto next_slot = [&] { return after(opaque(slot), 3); };
    rows.start(work_tile);
    int tile = last_tile(work_tile);
#pragma unroll 1
    for (bool ends = false; !ends; --tile) {
      const uint32_t full = shared_address(&shared.full[stage]);
      if constexpr (Config::kCacheIs8Bit) {
        wait_all_copies();
        each_share(
            [&](uint32_t share) { copies(share).warpgroup_fence_operand(work_tile, tile, stage); });
        barrier_arrive_warp(full, opaque(threadIdx.x) % 32);
      }
      const int first_tile = work_tile.first_tile, asks_at = work_tile.asks_at;
      barrier_wait(full, phase);
      ends = tile == first_tile;
      // Late, so that no block holds items back that others could start. The last of all calls
      // brings the counter back to 0. (That the item is there is seen by the next tile's barrier.)
      if (tile == asks_at && threadIdx.x < 32) {
        typename Shared::Scheduler scheduler = shared.scheduler(threadIdx.x);
        const uint32_t count = scheduler.num_tiles();
        uint32_t index = count;
        if (threadIdx.x == 0 && count > gridDim.x) index = gridDim.x + atomicInc(next, count - 1);
        put_tile(scheduler, __shfl_sync(0xffffffffu, index, 0), next_slot());
        shared.scheduler(threadIdx.x) = scheduler;
      }
      if (ends && tile == asks_at) __syncthreads();  // the item that follows is there
      const int next_stage = after(stage, shape.stages);
      const int next_phase = next_stage == 0 ? phase ^ 1 : phase;
      const Sm80Tile& copied = shared.work_tiles[ends ? next_slot() : slot];
      if (!ends || copied.seq >= 0) {
        start_copies(copied, ends ? last_tile(copied) : tile - 1, ends, next_stage, next_phase);
      }
      rows.attend(work_tile, tile, copies(0).key_at(stage), copies(0).value_at(stage),
                  shared.present[stage]);
      barrier_arrive_warp(shared_address(&shared.empty[stage]), opaque(threadIdx.x) % 32);
      stage = next_stage;
      phase = next_phase;
    }
    rows.finish(work_tile);
    if (shared.work_tiles[next_slot()].seq < 0) return;
  }
}

template <typename T, int kHeadSize, KvForm kForm, bool kCacheIs8Bit>
void launch_prefill_sm80(const PagedAttentionParams& p, const KernelChoice& choice,
                         const PrefillLaunch& launch, void* stream) {
  using Config = Sm80Config<T, kHeadSize, kForm, kCacheIs8Bit>;
  constexpr auto kKernel = paged_attention_prefill_sm80_kernel<Config>;
  const PagedKv& kv = p.kv;
  const int group = p.num_heads / kv.num_kv_heads;
  const bool rows = kv.layout != KvLayout::kVllm;
  const auto in_16_bytes = [&](int64_t stride) {
    return static_cast<uint32_t>(stride * size_of(kv.dtype) / 16);
  };
  const Sm80Shape shape = {
      .scheduler = {.group = group,
                    .page_shift = 0,
                    .min_rows = launch.min_query_len * group,
                    .softmax_scale_log2 = p.scale * kLog2E,
                    .window_right = std::min(p.window_right, kMaxWindowRight),
                    .rows = Config::kWarpRows * choice.warps,
                    .query_by_tma = false,
                    .has_concurrent_launch = false,
                    .group_divisor = FastDivisor(group),
                    .section_bytes = section_bytes(current_device_info()),
                    .concurrent_ratio = 0.0f},
      .cap = score_cap(p.softcap),
      .has_concurrent_launch = launch.has_concurrent_launch,
      .stages = choice.stages,
      .key_block = in_16_bytes(kv.key_block_stride),
      .key_head = in_16_bytes(kv.key_head_stride),
      .key_token = rows ? in_16_bytes(kv.key_token_stride) : 1,
      .key_chunk = in_16_bytes(kv.key_chunk_stride),
      .value_block = in_16_bytes(kv.value_block_stride),
      .value_head = in_16_bytes(kv.value_head_stride),
      .value_row = rows ? in_16_bytes(kv.value_token_stride)
                        : static_cast<uint32_t>(kv.value_dim_stride * size_of(kv.dtype)),
      .page_tokens = static_cast<uint32_t>(kv.block_size),
      .page_divisor = FastDivisor(kv.block_size)};
  check_shared_memory<kKernel>("paged_attention", choice);
  launch_kernel("paged_attention", kKernel, dim3(current_device_info().num_sms),
                dim3(32 * choice.warps), choice.shared_bytes, stream, p, shape, launch.next);
}

// The padded head size that `choice` names.
template <typename T, KvForm kForm, bool kCacheIs8Bit>
void launch_prefill_sm80(const PagedAttentionParams& p, const KernelChoice& choice,
                         const PrefillLaunch& launch, void* stream) {
  const auto with_head_size = [&](auto head_size) {
    launch_prefill_sm80<T, decltype(head_size)::value, kForm, kCacheIs8Bit>(p, choice, launch,
                                                                            stream);
  };
  switch (choice.padded_head_size) {
    case 64:
      return with_head_size(Constant<64>{});
    case 96:
      return with_head_size(Constant<96>{});
    case 128:
      return with_head_size(Constant<128>{});
    case 192:
      return with_head_size(Constant<192>{});
    default:
      return with_head_size(Constant<256>{});
  }
}

}  // namespace vllm_kernels::cuda
