// paged_attention's decode kernel on Hopper's wgmma, for more than 8 query rows per KV head: one
// launch for any batch. decode_kernel.cuh has the tensors. Heads have up to kWgmmaMaxHeadSize
// dimensions.
//
// Grid: one persistent CTA per SM. Roles of warps:
//
// 2 or 3 consumer warpgroups run attend() (warpgroup_mma.cuh). Of a work tile's stages, consumer c
// takes c, c + kConsumers, ... through its own pipeline (kv_pipeline.cuh).
//
// In one more warpgroup, a producer warp per consumer runs produce_stages(). Each pipeline has its
// own warp, since a warp needs about 100 cycles to issue a bulk copy. Producers run ahead: while a
// work tile ends, the next one's pages are in flight. Another warp is the scheduler warp and runs
// schedule_tiles() (tile_scheduler.cuh). It passes work tiles through a queue of two.
//
// Early reads, before the PDL wait: in batches of up to 32 sequences the scheduler warp reads
// lengths and block tables. It makes a speculative schedule and prefetches the first pages into L2.
// With kv_ready, the scheduler and producer warps read lengths, tables and pages early.
//
// Next: decode_wgmma_epilogue.cuh for the end of a work tile.
#pragma once
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/kv_pipeline.cuh"
#include "cuda/attention/common/tensor_maps.cuh"
#include "cuda/attention/common/unowned_rows.cuh"
#include "cuda/attention/decode/decode_wgmma_epilogue.cuh"
#include "cuda/attention/decode/query_rows.cuh"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/attention/decode/warpgroup_mma.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

constexpr int kTileQueue = 2;

// Threads of a CTA: the consumer warpgroups and the producer warpgroup.
__host__ __device__ constexpr int cta_threads(int max_tiles) {
  return 128 * (wgmma_consumers(max_tiles) + 1);
}
// Registers of a thread. A launch divides the SM's 65536 registers evenly over its threads.
// Consumers need more, so setmaxnreg gives them registers of the producer warpgroup.
__host__ __device__ constexpr int launch_registers(int max_tiles) {
  return 65536 / cta_threads(max_tiles) / 8 * 8;
}
__host__ __device__ constexpr int consumer_registers(int max_tiles) {
  return max_tiles <= 4 ? 152 : 216;
}
__host__ __device__ constexpr int producer_registers(int max_tiles) {
  const int consumers = wgmma_consumers(max_tiles);
  return launch_registers(max_tiles) * (consumers + 1) - consumer_registers(max_tiles) * consumers;
}

struct DecodeWgmmaShape {
  WorkShape work;
  PipelineLayout pipeline;
  KvStageLayout stage_layout;
  ScoreCap cap;
};

#if defined(VLLM_KERNELS_HAS_WGMMA)

using WgmmaTileScheduler = TileScheduler<1, false>;
template <typename Cache, int kMaxHeadSize, KvForm kForm>
using WgmmaKvPipeline = KvPipeline<Cache, kMaxHeadSize, kStageTokens, kForm, true>;

struct TileQueue {
  WorkTile work_tiles[kTileQueue];
  TileRows rows[kTileQueue];
  bool ends[kTileQueue];  // there is no such work tile, and none after it
  uint64_t full[kTileQueue], empty[kTileQueue];
  uint64_t next_tile_wanted;  // producer 0 is at its tile's last stage
};

// Prefetches into L2 the pages that the pipelines load first, if the work tile is long. The pages
// are not read, so this may precede the end of the primary kernel.
template <typename Cache, KvForm kForm>
__device__ __forceinline__ void prefetch_pages(const PagedAttentionParams& p,
                                               const PipelineLayout& pipeline,
                                               const WorkTile& work_tile, int consumers, int lane) {
  if (!may_prefetch<kForm, kStageTokens>(pipeline)) return;
  if (work_tile.stages < kPrefetchLength * consumers * pipeline.stages) return;
  const int page =
      ((work_tile.sequence.first_stage + work_tile.stage) << pipeline.pages_shift) + lane;
  uint32_t block = ~0u;
  if (lane < consumers * pipeline.stages << pipeline.pages_shift &&
      page << pipeline.page_shift < work_tile.sequence.seq_len) {
    block = __ldcg(&p.block_tables[work_tile.seq * p.block_table_stride + page]);
  }
#pragma unroll 1
  for (uint32_t left = __ballot_sync(0xffffffffu, block < p.kv.num_blocks); left != 0;
       left &= left - 1) {
    const uint64_t of = __shfl_sync(0xffffffffu, block, __ffs(left) - 1);
    const uint64_t head = work_tile.kv_head;
    prefetch_page<Cache, kForm>(p.kv, pipeline,
                                static_cast<const char*>(p.kv.key) +
                                    (of * pipeline.key_block + head * pipeline.key_head) * 16,
                                static_cast<const char*>(p.kv.value) +
                                    (of * pipeline.value_block + head * pipeline.value_head) * 16,
                                lane);
  }
}

// The scheduler warp: finds the CTA's work tiles and queues them.
template <typename Cache, KvForm kForm, int kConsumers>
__device__ __forceinline__ void schedule_tiles(const PagedAttentionParams& p,
                                               const DecodeWgmmaShape& shape, TileQueue& queue,
                                               uint32_t* next, int lane) {
  // In small batches the first work tile is found speculatively, before the primary kernel has
  // ended. It is found again if memory holds other lengths afterwards.
  enum { kSpeculate, kPlan, kGoOn } now = WgmmaTileScheduler::may_speculate(p) ? kSpeculate : kPlan;
  if (now == kPlan && !p.kv_ready) wait_at_start(p);
  WgmmaTileScheduler scheduler;
  uint32_t index = blockIdx.x;
#pragma unroll 1
  for (uint32_t number = 0;;) {
    if (now != kGoOn) scheduler.build(p, shape.work, lane);
    const uint32_t slot = number % kTileQueue;
    WorkTile work_tile;
    if (index < scheduler.num_tiles()) work_tile = scheduler.get_tile(p, shape.work, index, lane);
    barrier_wait(shared_address(&queue.empty[slot]), number / kTileQueue & 1 ^ 1);
    if (lane == 0) {
      if (index < scheduler.num_tiles()) {
        queue.work_tiles[slot] = work_tile;
        store_rows(p, tile_rows(p, shape.work, work_tile), work_tile.sequence.seq_len,
                   queue.rows[slot]);
      }
      queue.ends[slot] = index >= scheduler.num_tiles();
    }
    if (now == kSpeculate) {
      if (index < scheduler.num_tiles()) {
        __syncwarp();
        prefetch_pages<Cache, kForm>(p, shape.pipeline, queue.work_tiles[slot], kConsumers, lane);
      }
      now = kPlan;
      wait_for_primary_kernel();
      WgmmaTileScheduler::Indices indices;
      indices.load(p, lane);
      __syncwarp();  // all lanes have read the queued tile
      if (!scheduler.validate(p, shape.work, indices, lane)) continue;
    }
    now = kGoOn;
    if (lane == 0) barrier_arrive(shared_address(&queue.full[slot]));
    __syncwarp();
    if (index >= scheduler.num_tiles()) return;
    // Late, so that no CTA holds back work tiles that others could start. The last of all requests
    // wraps the counter to 0.
    barrier_wait(shared_address(&queue.next_tile_wanted), number & 1);
    wait_at_start(p);
    const uint32_t count = scheduler.num_tiles();
    index = count;
    if (lane == 0 && count > gridDim.x) index = gridDim.x + atomicInc(next, count - 1);
    index = __shfl_sync(0xffffffffu, index, 0);
    ++number;
  }
}

// A producer warp: loads the pages of the queued work tiles for its consumer.
template <typename Pipeline>
__device__ __forceinline__ void produce_stages(const PagedAttentionParams& p, TileQueue& queue,
                                               Pipeline& pipeline, int consumer, int consumers,
                                               int lane) {
  if (!p.kv_ready) wait_at_start(p);
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const uint32_t slot = number % kTileQueue;
    barrier_wait(shared_address(&queue.full[slot]), number / kTileQueue & 1);
    if (queue.ends[slot]) return;
    const WorkTile& work_tile = queue.work_tiles[slot];
    const int stages = max(0, work_tile.stages - consumer + consumers - 1) / consumers;
    pipeline.set_source(
        p, kStageShift<kStageTokens>, work_tile.seq, work_tile.sequence.seq_len, work_tile.kv_head,
        work_tile.sequence.first_stage + work_tile.stage + consumer, consumers, stages);
    pipeline.look_up();
    barrier_arrive_warp(shared_address(&queue.empty[slot]), lane);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (consumer == 0 && i == stages - 1 && lane == 0)
        barrier_arrive(shared_address(&queue.next_tile_wanted));
      pipeline.produce(p);
    }
  }
}

template <typename Cache, int kMaxHeadSize, int kMaxTiles, KvForm kForm>
__device__ __forceinline__ void attend(
    const PagedAttentionParams& p, const DecodeWgmmaShape& shape, const DecodeWorkspace& workspace,
    WgmmaKvPipeline<Cache, kMaxHeadSize, kForm>& pipeline, TileQueue& queue,
    ConsumerStats<wgmma_consumers(kMaxTiles), kMaxTiles * 8>& stats, uint32_t row_scales,
    bool& is_last, const ConsumersBarrier& barrier, uint32_t scratch, int consumer, int thread) {
  using Mma = WarpgroupMma<Cache, kMaxHeadSize, kMaxTiles, kForm>;
  constexpr int kConsumers = Mma::kConsumers;
  constexpr int kShift = kStageShift<kStageTokens>;
  const int lane = thread % 32;
  Mma mma;
  mma.head_size = p.kv.head_size;
  mma.consumer = consumer;
  mma.warp_in_consumer = warp_uniform(thread / 32);
  mma.query = scratch;
  mma.probs = opaque(scratch + wgmma_query_bytes(shape.work.rows(), kMaxHeadSize) +
                     consumer * wgmma_prob_bytes(shape.work.rows()));
  mma.set_addresses(shape.stage_layout, lane);
  wait_at_start(p);
  barrier.arrive();
#pragma unroll 1
  for (int number = 0;; ++number) {
    const int slot = number % kTileQueue;
    barrier_wait(shared_address(&queue.full[slot]), number / kTileQueue & 1);
    if (queue.ends[slot]) {
      wait_at_end(p);
      return;
    }
    const WorkTile& work_tile = queue.work_tiles[slot];
    const TileRows& rows = queue.rows[slot];
    const int row_tiles = (rows.count + 7) / 8;
    mma.tiles = row_tiles <= 2 ? 2 : row_tiles <= 4 ? 4 : 8;
    const auto load_query = [&](auto tag) {
      using Query = decltype(tag);
      const auto start = [&](int row) -> const Query* {
        if (row >= rows.count) return nullptr;
        const QueryRow query_row = query_row_of(shape.work, work_tile, rows, row);
        return static_cast<const Query*>(p.query) +
               (work_tile.sequence.first_query + query_row.token) * p.query_stride +
               static_cast<int64_t>(query_row.head) * p.kv.head_size;
      };
      store_query_rows<Query>(start, mma, row_scales, consumer * 128 + thread, kConsumers * 128);
    };
    barrier.wait<0>();  // the previous tile's partials, in the same scratch, have been read
    if constexpr (Mma::kCacheIs16Bit) {
      load_query(Cache{});
    } else {
      p.dtype == DType::kFloat16 ? load_query(Half{}) : load_query(BFloat16{});
    }
    fence_async_proxy();
    barrier.sync<1>();
    const float k_scale = !Mma::kCacheIs16Bit && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[work_tile.kv_head * p.kv.scale_stride]
                              : 1.0f;
    mma.load_scales(row_scales, p.scale * k_scale * kLog2E, lane);
    mma.clear();

    const bool plain_scores = !p.modifies_scores();
    const auto release = [&] { pipeline.consumer_release(); };
    const auto scales = [&] { return pipeline.scales(); };
    const auto attend_stages = [&](auto used) {
      constexpr int kUsed = decltype(used)::value;
      int stage = work_tile.sequence.first_stage + work_tile.stage + consumer;
      const int last = stage - consumer + work_tile.stages;
#pragma unroll 1
      for (; stage < last; stage += kConsumers) {
        const int first = stage << kShift;  // the stage's first token
        // Bitwise operators instead of branches: fewer registers and cycles on the path of nearly
        // all stages.
        const bool is_fully_visible =
            plain_scores & (first + kStageTokens <= rows.every.end) & (first >= rows.every.begin);
        pipeline.consumer_wait();
        typename Mma::Keys keys;
        mma.load_keys(keys, pipeline.key());
        uint64_t tokens = pipeline.present();
        if (is_fully_visible & (tokens == ~uint64_t{0})) {
          const auto nothing = [](float score, int, int, int) { return score; };
          mma.template step<kUsed, true>(keys, pipeline.value(), scales, tokens, nothing, release,
                                         shape.stage_layout, lane);
          continue;
        }
        const TileRows mine = rows;
        const int begin = mine.any.begin, end = mine.any.end;
        if (first < begin) tokens &= begin - first < 64 ? ~uint64_t{0} << (begin - first) : 0;
        if (end - first < 64) tokens &= end > first ? (uint64_t{1} << (end - first)) - 1 : 0;
        if (tokens == 0) {
          release();
          continue;
        }
        const auto adjust = [&](float score, int t, int j, int token) {
          const int row = min(Mma::row_of(lane, t, j), mine.count - 1);
          const QueryRow query_row = query_row_of(shape.work, work_tile, mine, row);
          const int other = p.stripe.position_of(first + token) - mine.position;
          score = adjusted_score(p, shape.cap, query_row.head, other - query_row.token, score);
          const int query = work_tile.sequence.first_query + query_row.token;
          return tree_hides(p, query, query_row.token, other) ? -INFINITY : score;
        };
        mma.template step<kUsed, false>(keys, pipeline.value(), scales, tokens, adjust, release,
                                        shape.stage_layout, lane);
      }
    };
    if (kMaxTiles == 8 && mma.tiles == 8) {
      attend_stages(std::integral_constant<int, kMaxTiles>());
    } else if (mma.tiles == 4) {
      attend_stages(std::integral_constant<int, 4>());
    } else {
      attend_stages(std::integral_constant<int, 2>());
    }
    const DecodeWgmmaEpilogue<Mma> finish = {.p = p,
                                             .shape = shape.work,
                                             .workspace = workspace,
                                             .work_tile = work_tile,
                                             .rows = rows,
                                             .stats = stats,
                                             .is_last = is_last,
                                             .scratch = scratch,
                                             .tiles = mma.tiles,
                                             .warp = consumer * 4 + mma.warp_in_consumer,
                                             .lane = lane};
    end_tile(finish, mma, barrier, thread);
    barrier.arrive();
    barrier_arrive_warp(shared_address(&queue.empty[slot]), lane);
  }
}

#endif

template <typename Cache, int kMaxHeadSize, int kMaxTiles, KvForm kForm>
__global__ void __launch_bounds__(cta_threads(kMaxTiles), 1)
    paged_attention_decode_wgmma_kernel(const __grid_constant__ PagedAttentionParams p,
                                        const __grid_constant__ DecodeWgmmaShape shape,
                                        const __grid_constant__ KvTensorMaps maps,
                                        const __grid_constant__ DecodeWorkspace workspace) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  constexpr int kConsumers = wgmma_consumers(kMaxTiles);
  using Pipeline = WgmmaKvPipeline<Cache, kMaxHeadSize, kForm>;
  extern __shared__ __align__(1024) char shared[];  // the pipelines, then the scratch
  __shared__ uint64_t pipeline_words[kConsumers][Pipeline::kWords];
  __shared__ __align__(16) ConsumerStats<kConsumers, kMaxTiles * 8> stats;
  __shared__ float row_scales[sizeof(Cache) == 1 ? kMaxTiles * 8 : 1];
  __shared__ TileQueue queue;
  __shared__ uint64_t consumers_barrier;
  __shared__ bool is_last;
  // Above 3 KiB the 64-row kernel would lose a pipeline stage; with a 16-bit cache, the third of
  // three.
  static_assert(sizeof(pipeline_words) + sizeof(stats) + sizeof(row_scales) + sizeof(queue) + 16 <=
                3072);
  launch_dependents();
  const int lane = threadIdx.x % 32;
  const int pipeline_bytes = Pipeline::bytes(shape.pipeline);
  if (threadIdx.x < kConsumers) {
    Pipeline::init(shape.pipeline, maps, shared_address(pipeline_words[threadIdx.x]), 4);
  }
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kTileQueue; ++slot) {
      barrier_init(shared_address(&queue.full[slot]), 1);
      barrier_init(shared_address(&queue.empty[slot]),
                   (4 * kConsumers + kConsumers) * kWarpArrivals);
    }
    barrier_init(shared_address(&queue.next_tile_wanted), 1);
    barrier_init(shared_address(&consumers_barrier), 4 * kConsumers * kWarpArrivals);
    fence_barrier_init();
  }
  if (p.kv.head_size < kMaxHeadSize) {  // K past the head size is read, but never copied: zero it
    for (int i = threadIdx.x * 16; i < kConsumers * pipeline_bytes;
         i += cta_threads(kMaxTiles) * 16) {
      *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
  }
  __syncthreads();  // orders barrier init and zeros
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (warpgroup == kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers(kMaxTiles)));
    const int consumer = warp_uniform(threadIdx.x / 32) - 4 * kConsumers;
    if (consumer == kConsumers) {
      schedule_tiles<Cache, kForm, kConsumers>(p, shape, queue, workspace.next, lane);
    } else if (consumer < kConsumers) {
      Pipeline pipeline(shape.pipeline, maps, shared_address(shared) + consumer * pipeline_bytes,
                        shared_address(pipeline_words[consumer]), true, lane);
      produce_stages(p, queue, pipeline, consumer, kConsumers, lane);
      wait_at_start(p);
      clear_unowned_rows(p, 32 * consumer + lane, 32 * kConsumers);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers(kMaxTiles)));
    const int consumer = warpgroup;
    Pipeline pipeline(shape.pipeline, maps, shared_address(shared) + consumer * pipeline_bytes,
                      shared_address(pipeline_words[consumer]), false, lane);
    attend<Cache, kMaxHeadSize, kMaxTiles, kForm>(
        p, shape, workspace, pipeline, queue, stats, shared_address(row_scales), is_last,
        ConsumersBarrier{shared_address(&consumers_barrier), lane},
        shared_address(shared) + kConsumers * pipeline_bytes, consumer, threadIdx.x % 128);
  }
#endif
}

template <typename Cache, int kMaxHeadSize, int kMaxTiles, KvForm kForm>
void launch_decode_wgmma(const PagedAttentionParams& p, const KernelChoice& choice,
                         const DecodeWorkspace& workspace, void* stream) {
  constexpr auto kKernel =
      paged_attention_decode_wgmma_kernel<Cache, kMaxHeadSize, kMaxTiles, kForm>;
  DecodeWgmmaShape shape;
  shape.cap = score_cap(p.softcap);
  set_stage_layout<Cache, kMaxHeadSize, kStageTokens, kForm>(p.kv, shape.pipeline,
                                                             shape.stage_layout);
  shape.pipeline.stages = choice.stages;
  shape.work = work_shape(p, choice, kStageShift<kStageTokens>, kMaxHeadSize);
  check_shared_memory<kKernel>("paged_attention", choice);
  launch_kernel("paged_attention", kKernel, dim3(static_cast<unsigned>(choice.grid.x)),
                dim3(cta_threads(kMaxTiles)), choice.shared_bytes, stream, p, shape,
                kv_tensor_maps<Cache, kStageTokens, kForm>(p.kv, shape.pipeline.line_shift),
                workspace);
}

template <typename Cache, int kMaxHeadSize, KvForm kForm>
void launch_decode_wgmma(const PagedAttentionParams& p, const KernelChoice& choice,
                         const DecodeWorkspace& workspace, void* stream) {
  if (choice.row_shift() <= 5) {
    launch_decode_wgmma<Cache, kMaxHeadSize, 4, kForm>(p, choice, workspace, stream);
  } else {
    launch_decode_wgmma<Cache, kMaxHeadSize, 8, kForm>(p, choice, workspace, stream);
  }
}

}  // namespace vllm_kernels::cuda
