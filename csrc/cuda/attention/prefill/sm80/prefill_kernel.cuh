// The sm80 prefill kernel: paged_attention and varlen_attention of many query rows, by mma.sync and
// cp.async. On Hopper it runs what ../sm90/prefill_kernel.cuh does not support: other head sizes
// and pages, and 8-bit caches with heads above 192, softcap or ALiBi.
//
// Shapes: a work tile is 16 or 32 packed query rows per warp, with up to 8 warps. Its KV tiles of
// 64 tokens come from the last to the first.
//
// Grid: one persistent CTA an SM. It takes work tiles from ../tile_scheduler.cuh. Every warp is
// producer (producer.cuh, one KV tile ahead) and consumer (mainloop.cuh). Stages have mbarriers,
// and the CTA is not synchronised. So warps drift apart: of two that share a tensor core, one
// multiplies while the other takes exponentials.
//
// Early reads: none. All warps wait for the primary kernel first (PDL).
//
// The limit on Hopper is instruction issue. An mma holds its tensor core for 6 cycles, and any
// other instruction that reads registers costs one more (benchmarks/probes/mma_sync.cu).
#pragma once
#include "cuda/attention/common/unowned_rows.cuh"
#include "cuda/attention/prefill/prefill.h"
#include "cuda/attention/prefill/sm80/mainloop.cuh"
#include "cuda/attention/prefill/sm80/producer.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

// Tokens visible to any row of a warp, and tokens visible to every row.
struct alignas(16) WarpVisible {
  int begin, end;
  int whole_begin, whole_end;
};

template <typename Config>
struct Sm80Shared {
  using Scheduler = PrefillTileScheduler<Config::kHeadSize, 0, Config::kTokens, false, false>;
  // Three slots: one warp writes the next tile while others still end the previous one. seq < 0: no
  // more.
  Sm80Tile work_tiles[3];
  // Per stage. full: the copies have landed; empty: all warps have released the stage.
  uint64_t full[Config::kStages], empty[Config::kStages];
  uint32_t present[Config::kStages][2];  // bit t: token t of the stage has a valid page
  // 8-bit caches: undoes a query row's scaling, times k_scale.
  float factors[Config::kCacheIs8Bit ? Config::kWarps * Config::kWarpRows : 1];
  WarpVisible warp_visible[Config::kWarps];
  GroupAddress addresses[kCopySlices][kListedTiles];
  alignas(
      Scheduler) char scheduler_storage[32 * sizeof(Scheduler)];  // a scheduler per lane of warp 0

  __device__ __forceinline__ Scheduler& scheduler(int lane) {
    return reinterpret_cast<Scheduler*>(scheduler_storage)[lane];
  }
};

// The consumer side of a warp: a work tile, KV tile by KV tile.
template <typename Config>
struct Sm80Consumer {
  using T = typename Config::T;
  using Mma = Sm80Mma<Config>;
  static constexpr int kRowTiles = Config::kRowTiles, kWarpRows = Config::kWarpRows;
  static constexpr int kTokens = Config::kTokens;

  const PagedAttentionParams& p;
  const Sm80Shape& shape;
  float* factors;             // of the CTA's rows
  WarpVisible* warp_visible;  // of the CTA's warps
  Mma tile;

  // Recomputed at each use, to save registers.
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
  __device__ __forceinline__ bool has_row(const PrefillTile& work_tile, int row) const {
    return first_row() + row < work_tile.rows;
  }

  __device__ __forceinline__ uint64_t head_offset(int head) const {  // unsigned: one multiplication
    return uint64_t{static_cast<uint32_t>(head)} * static_cast<uint32_t>(p.kv.head_size);
  }

  template <typename Query>
  __device__ __forceinline__ void load_query(const PrefillTile& work_tile) {
    tile.template load_query<Query>(
        [&](int row) -> const Query* {
          int head;
          const int token = token_of_row(work_tile, row, head);
          if (!has_row(work_tile, row)) return nullptr;
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
      WarpVisible visible_range = {.begin = 0, .end = INT32_MIN, .whole_begin = 0, .whole_end = 0};
      if (has_row(work_tile, 0)) {
        int head;
        const int low = work_tile.position + token_of_row(work_tile, 0, head);
        const int high = work_tile.position + token_of_row(work_tile, kWarpRows - 1, head);
        const VisibleTokens to_any = visible_tokens(p, low, high, work_tile.length);
        const VisibleTokens to_every = visible_tokens(p, high, low, work_tile.length);
        visible_range = {.begin = to_any.begin,
                         .end = to_any.end,
                         .whole_begin = to_every.begin,
                         .whole_end = to_every.end};
      }
      warp_visible[threadIdx.x / 32] = visible_range;
    }
    __syncwarp();
  }

  // Processes a KV tile. `key` and `value` are shared addresses; `present` has a bit per token.
  __device__ __forceinline__ void consume_tile(const Sm80Tile& work_tile, int tile_index,
                                               uint32_t key, uint32_t value,
                                               const uint32_t* present) {
    const int first = tile_index * kTokens;
    const WarpVisible visible_range = warp_visible[threadIdx.x / 32];
    if (first >= visible_range.end || first + kTokens <= visible_range.begin) return;
    const bool adjusts = p.modifies_scores();
    const bool masks = (present[0] & present[1]) != ~0u || first < visible_range.whole_begin ||
                       first + kTokens > visible_range.whole_end;
    typename Mma::Scores scores;
    tile.compute_scores(scores, key);
    if (adjusts) adjust(work_tile, first, scores);
    if (masks) mask(work_tile, first, present[0] | uint64_t{present[1]} << 32, scores);
    tile.online_softmax(scores, [&](int t, int r) { return adjusts ? 1.0f : score_scale(t, r); });
    tile.accumulate_out(scores, value);
  }

  __device__ __forceinline__ void write_tile(const PrefillTile& work_tile) const {
    if (!Config::kCacheIs8Bit) return store<T>(work_tile);
    p.dtype == DType::kFloat16 ? store<Half>(work_tile) : store<BFloat16>(work_tile);
  }

 private:
  // The factor from a row's scores to log2 units.
  __device__ __forceinline__ float score_scale(int tile_index, int r) const {
    if constexpr (!Config::kCacheIs8Bit) return shape.scheduler.softmax_scale_log2;
    return shape.scheduler.softmax_scale_log2 *
           factors[first_row() + Mma::row_of(lane(), tile_index, r)];
  }

  // Calls action(score, column) for this lane's scores of row r in row tile t. Columns are relative
  // to its first.
  template <typename Action>
  static __device__ __forceinline__ void each_score(typename Mma::Scores& scores, int t, int r,
                                                    const Action& action) {
#pragma unroll
    for (int i = 0; i < Mma::kScoreTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) action(scores[t][i][2 * r + j], 8 * i + j);
    }
  }

  // Scores to log2 units, then the score modifications.
  __device__ __forceinline__ void adjust(const PrefillTile& work_tile, int first,
                                         typename Mma::Scores& scores) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = score_scale(t, r);
        each_score(scores, t, r, [&](float& score, int) { score *= scale; });
        modify_scores(
            p, shape.cap,
            [&] {
              int head;
              const int token = token_of_row(work_tile, t, r, head);
              return ScoreRow{head, first + lane() % 4 * 2 - work_tile.position - token};
            },
            [&](const auto& modified) {
              each_score(scores, t, r,
                         [&](float& score, int column) { score = modified(score, column); });
            });
      }
    }
  }

  // `tokens`: bits of the tokens with a valid page.
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
        const VisibleTokens range = visible_tokens(p, position, position, work_tile.length);
        const int lane_token = first + column;
        const uint64_t visible =
            tokens & tokens_until(range.end - lane_token) & ~tokens_until(range.begin - lane_token);
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
        const bool present = has_row(work_tile, Mma::row_of(lane(), t, r));
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
  static_assert(sizeof(Shared) <= PrefillSm80Sizes::kStaticSmem);
  extern __shared__ __align__(128) char memory[];
  __shared__ Shared shared;
  if (!shape.has_concurrent_launch) launch_dependents();
  wait_for_primary_kernel();
  // After the PDL wait: the concurrent launch reads the primary kernel's results without a wait of
  // its own.
  if (shape.has_concurrent_launch) launch_dependents();

  // Writes work tile `index`, or seq = -1, to work_tiles[slot]. Warp 0.
  const auto put_tile = [&](typename Shared::Scheduler& scheduler, uint32_t index, int slot) {
    const int lane = threadIdx.x % 32;
    Sm80Tile& work_tile = shared.work_tiles[slot];
    if (index >= scheduler.num_items()) {
      if (lane == 0) work_tile.seq = -1;
      return;
    }
    scheduler.get_tile(p, shape.scheduler, index, lane, work_tile);
    if (lane != 0) return;
    work_tile.length = key_range(p, work_tile.seq).count;
    work_tile.request_tile = work_tile.first_tile + (work_tile.tiles > 1 ? 1 : 0);
  };
  if (threadIdx.x < 32) {
    typename Shared::Scheduler scheduler;
    scheduler.build(p, shape.scheduler, threadIdx.x);
    put_tile(scheduler, blockIdx.x, 0);
    shared.scheduler(threadIdx.x) = scheduler;
  } else {
    clear_unowned_rows(p, threadIdx.x - 32, blockDim.x - 32);
  }
  if (threadIdx.x == 0) {
    const int arrivals = blockDim.x / 32 * kWarpArrivals;
    for (int stage = 0; stage < Config::kStages; ++stage) {
      // 16-bit: each lane's cp.async arrives, and each warp for its write of `present`.
      barrier_init(shared_address(&shared.full[stage]),
                   arrivals + (Config::kCacheIs8Bit ? 0 : blockDim.x));
      barrier_init(shared_address(&shared.empty[stage]), arrivals);
    }
  }
  __syncthreads();
  if (shared.work_tiles[0].seq < 0) return;

  // Built anew for each KV tile: what depends on the thread would hold registers in between.
  const auto producer = [&](uint32_t copy_slice) {
    return Sm80Producer<Config>{.p = p,
                                .shape = shape,
                                .addresses = shared.addresses[copy_slice],
                                .stages = shared_address(memory),
                                .copy_slice = copy_slice,
                                .lane = opaque(threadIdx.x) % 32u};
  };
  // Calls action(i) for this warp's slices of a KV tile's copies.
  const auto for_each_slice = [&](const auto& action) {
    uint32_t i = opaque(threadIdx.x) / 32u;
#pragma unroll 1
    do {
      action(i);
    } while ((i += blockDim.x / 32) < kCopySlices);
  };
  Sm80Consumer<Config> consumer = {
      .p = p, .shape = shape, .factors = shared.factors, .warp_visible = shared.warp_visible};
  constexpr int kSmemQueryBytes =  // bytes of a warp
      Config::kRowTiles * (Config::kHeadSize / 16 - Config::kRegisterSteps) * 32 * 16;
  consumer.tile.smem_query =
      opaque(shared_address(memory) + shape.stages * 2 * Config::kTileBytes + Config::kRawBytes +
             threadIdx.x / 32 * kSmemQueryBytes + threadIdx.x % 32 * 16);
  const auto last_tile = [](const PrefillTile& work_tile) {
    return work_tile.first_tile + work_tile.tiles - 1;
  };
  const auto next_of = [](int i, int count) { return i == count - 1 ? 0 : i + 1; };
  // Copies a KV tile to a stage once that is empty. `phase`: of the stage's full barrier.
  const auto start_copies = [&](const Sm80Tile& work_tile, int tile, bool is_first, int stage,
                                int phase) {
    barrier_wait(shared_address(&shared.empty[stage]), phase ^ 1);
    for_each_slice([&](uint32_t copy_slice) {
      producer(copy_slice).start(work_tile, tile, is_first, stage, shared.present[stage]);
    });
    if constexpr (!Config::kCacheIs8Bit) {
#pragma unroll
      for (int i = 0; i < Config::kStages;
           ++i) {  // unrolled: the instruction needs a warp-uniform address
        if (i == stage) barrier_arrive_copies(shared_address(&shared.full[i]));
      }
      // For what lanes write themselves: `present` and the next work tile.
      if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) {
        barrier_arrive(shared_address(&shared.full[stage]));
      }
    }
  };
  start_copies(shared.work_tiles[0], last_tile(shared.work_tiles[0]), true, 0, 0);
  int stage = 0, phase = 0, slot = 0;
#pragma unroll 1
  for (;; slot = next_of(slot, 3)) {
    const Sm80Tile& work_tile = shared.work_tiles[slot];
    const auto next_slot = [&] { return next_of(opaque(slot), 3); };
    consumer.start(work_tile);
    int tile = last_tile(work_tile);
#pragma unroll 1
    for (bool is_last = false; !is_last; --tile) {
      const uint32_t full = shared_address(&shared.full[stage]);
      if constexpr (Config::kCacheIs8Bit) {
        wait_all_copies();
        for_each_slice([&](uint32_t copy_slice) {
          // Heads of 128 spill unless each slice recomputes its addresses.
          const bool recomputes = Config::kSavesRegisters && Config::kHeadSize == 128;
          const int to_stage = recomputes ? opaque(stage) : stage;
          producer(copy_slice).dequantize(work_tile, tile, to_stage);
        });
        barrier_arrive_warp(full, opaque(threadIdx.x) % 32);
      }
      const int first_tile = work_tile.first_tile, request_tile = work_tile.request_tile;
      barrier_wait(full, phase);
      is_last = tile == first_tile;
      // Requested late, so that a CTA does not hold a work tile that another could start. The last
      // atomicInc of the launch wraps the counter to 0. The next KV tile's full barrier makes the
      // work tile visible to the other warps.
      if (tile == request_tile && threadIdx.x < 32) {
        typename Shared::Scheduler scheduler = shared.scheduler(threadIdx.x);
        const uint32_t count = scheduler.num_items();
        uint32_t index = count;
        if (threadIdx.x == 0 && count > gridDim.x) index = gridDim.x + atomicInc(next, count - 1);
        put_tile(scheduler, __shfl_sync(0xffffffffu, index, 0), next_slot());
        shared.scheduler(threadIdx.x) = scheduler;
      }
      if (is_last && tile == request_tile) __syncthreads();  // the next work tile is written
      const int next_stage = next_of(stage, shape.stages);
      const int next_phase = next_stage == 0 ? phase ^ 1 : phase;
      const Sm80Tile& producer_tile = shared.work_tiles[is_last ? next_slot() : slot];
      if (!is_last || producer_tile.seq >= 0) {
        start_copies(producer_tile, is_last ? last_tile(producer_tile) : tile - 1, is_last,
                     next_stage, next_phase);
      }
      consumer.consume_tile(work_tile, tile, producer(0).key_at(stage), producer(0).value_at(stage),
                            shared.present[stage]);
      barrier_arrive_warp(shared_address(&shared.empty[stage]), opaque(threadIdx.x) % 32);
      stage = next_stage;
      phase = next_phase;
    }
    consumer.write_tile(work_tile);
    if (shared.work_tiles[next_slot()].seq < 0) return;
  }
}

template <typename T, int kHeadSize, KvForm kForm, bool kCacheIs8Bit>
void launch_prefill_sm80(const PagedAttentionParams& p, const KernelChoice& choice,
                         const PrefillLaunch& launch, void* stream) {
  using Config = Sm80Config<T, kHeadSize, kForm, kCacheIs8Bit>;
  constexpr auto kKernel = paged_attention_prefill_sm80_kernel<Config>;
  const PagedKv& kv = p.kv;
  const bool rows = kv.layout != KvLayout::kVllm;
  const auto in_16_bytes = [&](int64_t stride) {
    return static_cast<uint32_t>(stride * size_of(kv.dtype) / 16);
  };
  PrefillShape scheduler = prefill_shape(p, launch.min_query_len);
  scheduler.rows = Config::kWarpRows * choice.warps;
  const Sm80Shape shape = {
      .scheduler = scheduler,
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
  launch_kernel("paged_attention", kKernel, dim3(current_device_model().num_sms),
                dim3(32 * choice.warps), choice.shared_bytes, stream, p, shape, launch.next);
}

// Launches the kernel of the padded head size in `choice`, for the form of the cache.
template <typename T, bool kCacheIs8Bit>
void PrefillSm80Kernels<T, kCacheIs8Bit>::launch(const PagedAttentionParams& p,
                                                 const KernelChoice& choice,
                                                 const PrefillLaunch& launch, void* stream) {
  dispatch_prefill_head_size(choice.padded_head_size, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    constexpr KvForm kPages = KvForm::kPackedPages, kRows = KvForm::kSwizzledRows;
    const auto kernel = p.kv.layout == KvLayout::kVllm
                            ? launch_prefill_sm80<T, kHeadSize, kPages, kCacheIs8Bit>
                            : launch_prefill_sm80<T, kHeadSize, kRows, kCacheIs8Bit>;
    kernel(p, choice, launch, stream);
  });
}

}  // namespace vllm_kernels::cuda
