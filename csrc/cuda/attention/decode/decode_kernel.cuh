// paged_attention's decode kernel on mma.sync: one launch for any batch.
//
//   query      [num_tokens, num_heads, head_size], 16-bit
//   cache      paged, 16-bit (the query's dtype), 8-bit, or int4
//   out, lse   [num_tokens, num_heads, head_size], [num_tokens, num_heads]
//   grid       one CTA per SM, or two, or fewer for small batches; blockDim is up to 8 or 12 warps
//   work       tile_scheduler.cuh cuts it into work tiles, on the device
//
// Roles of warps: there is no separate producer. For work tiles of up to 8 query rows a consumer is
// one warp, or two that have half of each stage (kHalves). With kMultiWarp it is 1, 2 or 4 warps
// that share the rows, 8 or 16 each. So a warp keeps its query and its output in registers. Of a
// tile's stages, consumer c takes c, c + consumers, ... through its own pipeline (kv_pipeline.cuh).
// Hopper uses decode_wgmma_kernel.cuh for tiles of more than 8 rows and heads of up to
// kWgmmaMaxHeadSize. In form kLines a work tile has 2, 4 or 8 KV heads with up to 8 rows each, and
// a consumer has a warp for each head.
//
// A tile's end: each consumer starts to load the next tile's stages. Then the consumers' partials
// are combined in shared memory. An unsplit tile is written as output. A split's partial goes to
// the workspace, and one CTA combines all splits in order: the last CTA to finish (semaphore), or
// the CTA of the last split (flag-in-data, split_exchange.cuh).
//
// Early reads, before the PDL wait: lengths and block tables, in small batches (may_speculate())
// where a pipeline has one warp. The first work tile is scheduled speculatively from them, and its
// first pages are prefetched into L2. With kv_ready, lengths, tables and pages are read early.
//
// Next: decode() below; warp_mma.cuh for the math of a stage; decode_launch.cuh for the host.
#pragma once
#include "cuda/attention/common/combine.cuh"
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/kv_pipeline.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/split_exchange.cuh"
#include "cuda/attention/common/tensor_maps.cuh"
#include "cuda/attention/common/unowned_rows.cuh"
#include "cuda/attention/decode/decode_shape.cuh"
#include "cuda/attention/decode/decode_wgmma_kernel.cuh"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/attention/decode/warp_mma.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

// paged_attention's stand-in for fused_decode_attention's FusedNewToken: query and KV are already
// in memory.
struct NoNewToken {
  static constexpr bool kAny = false;
};

// The kernel's body. kMaxHeadSize: in values. `new_token`: NoNewToken, or fused_decode_attention's
// FusedNewToken. kHalves: a stage has twice the tokens, and two warps have half of it each. Form
// kLines: a work tile has as many KV heads as a consumer has warps, and each warp has one of them,
// with at most 8 query rows.
template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm, bool kHalves,
          typename NewToken>
__device__ __forceinline__ void decode(const PagedAttentionParams& p, const DecodeShape& shape,
                                       const KvTensorMaps& maps, const DecodeWorkspace& workspace,
                                       NewToken new_token) {
  constexpr int kTiles = kRowTiles<kMaxHeadSize, kMultiWarp>, kBytes = sizeof(Cache);
  constexpr int kValues = kValuesOf<Cache>, kMaxStored = kMaxHeadSize / kValues;
  constexpr bool kHeadPerWarp = kForm == KvForm::kLines;
  constexpr bool kShared = kMultiWarp || kHeadPerWarp || kHalves;  // several warps a pipeline
  constexpr int kDepth = kTokenTiles<Cache, kMaxHeadSize, kMultiWarp>;
  constexpr int kStageTokens = kHalves ? 32 * kDepth : 16 * kDepth;
  using Mma = WarpMma<Cache, kMaxStored, kTiles, kDepth, kForm, kStageTokens>;
  constexpr int kTokens = Mma::kTokens, kShift = kStageShift<kStageTokens>;
  using Pipeline = KvPipeline<Cache, kMaxStored, kStageTokens, kForm, kShared>;
  extern __shared__ __align__(1024) char shared[];  // pipelines, then the warps' partials
  constexpr int kWarps = kDecodeThreads<Cache, kMaxHeadSize, kMultiWarp, kForm> / 32;
  __shared__ uint64_t pipeline_words[kWarps][Pipeline::kWords];
  __shared__ float2 warp_stats[kWarps * 8];
  // Three slots: when a work tile is stored, some threads may still write the output of the tile
  // two before it.
  __shared__ WorkTile work_tiles[3];
  __shared__ TileRows work_tile_rows[3];
  __shared__ uint32_t next_index;  // written by thread 0; others wait for next_index_ready
  __shared__ uint64_t next_index_ready;
  __shared__ bool is_last;
  launch_dependents();

  const int warps = blockDim.x / 32;
  const int warp = opaque(threadIdx.x / 32), lane = opaque(threadIdx.x % 32);
  const int consumer_shift = kHalves   ? 1
                             : kShared ? shape.consumer_shift
                                       : 0,
            consumer_warps = 1 << consumer_shift;
  const int consumer = warp >> consumer_shift, warp_in_consumer = warp & consumer_warps - 1,
            consumers = warps >> consumer_shift;
  const int warp_rows = kTiles > 1 ? 1 << shape.warp_shift : 8;
  const int head_of_warp = kHeadPerWarp ? warp_in_consumer : 0;
  const int stage_half = kHalves ? warp_in_consumer : 0;  // this warp's half of a stage
  // log2 of a consumer's warps that have different rows. Halves have the same rows.
  const int partial_shift = kHalves ? 0 : consumer_shift;
  const int head_size = p.kv.head_size * kValues, fours = head_size / 4;
  const int pipeline_bytes = Pipeline::bytes(shape.pipeline);
  Pipeline pipeline(shape.pipeline, maps, shared_address(shared) + consumer * pipeline_bytes,
                    shared_address(pipeline_words[consumer]), warp_in_consumer == 0, lane);
  if (warp_in_consumer == 0 && lane == 0) {
    Pipeline::init(shape.pipeline, maps, shared_address(pipeline_words[consumer]), consumer_warps);
  }
  __syncwarp();
  float* results = reinterpret_cast<float*>(shared + consumers * pipeline_bytes);
  const int pitch = partial_row_bytes(head_size) / 4;  // floats
  if (threadIdx.x == 0) barrier_init(shared_address(&next_index_ready), 1);
  Mma mma;
  mma.head_size = head_size / kValues;
  mma.set_addresses(shape.stage_layout, lane, head_of_warp);
  mma.keep_addresses();
  if (head_size < kMaxHeadSize) {  // K past the head size is read, but never copied: zero it
    for (int i = threadIdx.x * 16; i < consumers * pipeline_bytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
  }
  if (kShared || head_size < kMaxHeadSize) __syncthreads();  // orders barrier init and zeros
  if (threadIdx.x == 0) {  // a dummy: next_index is written again before it is read
    store_shared(shared_address(&next_index), touch(p) ^ touch(shape) ^ touch(workspace));
  }
  // Rounds of sequences whose lengths a lane keeps, as registers allow.
  constexpr bool kFewRegisters =
      kMultiWarp || kHeadPerWarp && kMaxHeadSize >= 128 || NewToken::kAny && kBytes == 1;
  constexpr int kRounds = kFewRegisters      ? 1
                          : kHasZeros<Cache> ? sm90a_or(3, 1)
                          : kBytes == 1      ? 4
                                             : 8;
  using Scheduler = TileScheduler<kRounds, !kMultiWarp && !kHeadPerWarp>;
  Scheduler scheduler;
  uint32_t index = blockIdx.x;  // of the current work tile
  // This warp's first row of a work tile.
  const int first_row = kHeadPerWarp || kHalves ? 0 : warp_in_consumer * warp_rows;
  const void* query_rows[kTiles];  // this lane's rows of the tile that the pipeline has next
  const auto take_tile = [&](int now, bool speculative) {
    WorkTile work_tile = scheduler.get_tile(p, shape.work, index, lane);
    const int head_group = work_tile.kv_head;                // of p.kv.num_kv_heads
    if (kHeadPerWarp) work_tile.kv_head <<= consumer_shift;  // the first warp's
    const TileRows rows = tile_rows(p, shape.work, work_tile);
    if constexpr (NewToken::kAny) {
      new_token.aim(work_tile, shape.work.group, speculative);
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int row = t * 8 + lane / 4;
        query_rows[t] = nullptr;
        if (first_row + row >= rows.count || row >= warp_rows) continue;
        const QueryRow query_row =
            row_of_head(shape.work, work_tile, rows, head_of_warp, first_row + row);
        query_rows[t] = static_cast<const char*>(p.query) +
                        2 * ((work_tile.sequence.first_query + query_row.token) * p.query_stride +
                             static_cast<int64_t>(query_row.head) * head_size);
      }
    }
    if (threadIdx.x == 0) {
      work_tiles[now] = work_tile;
      store_rows(p, rows, work_tile.sequence.seq_len, work_tile_rows[now]);
    }
    pipeline.set_source(p, kShift, work_tile.seq, work_tile.sequence.seq_len, head_group,
                        work_tile.sequence.first_stage + work_tile.stage + consumer, consumers,
                        max(0, work_tile.stages - consumer + consumers - 1) / consumers);
  };
  const auto load_query = [&] {
    if constexpr (!NewToken::kAny) mma.load_query(query_rows, lane);
  };
  const auto load_new_token = [&] {
    if constexpr (NewToken::kAny) new_token.load(p);
  };
  const auto produce_stages = [&](int stages) {
    int produced = 0;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) produced += pipeline.produce(p);
    return produced;
  };

  bool has_tile = false;  // whether a previous work tile is still to be combined and written
  // Before Hopper, ScaledInt8 spills if rows are cleared after the query is loaded. Other caches
  // spill if they are cleared before.
  constexpr bool kClearsEarly = sm90a_or(0, std::is_same_v<Cache, ScaledInt8>);
  const auto clear_rows = [&] {
    if (!NewToken::kAny && !has_tile) clear_unowned_rows<kValues>(p, 32 * warp + lane, 32 * warps);
  };

  // Speculative prologue of small batches. It finds the first work tile and its pages before the
  // primary kernel has ended. That kernel may still write the lengths and tables. So both are read
  // again after the wait, with the first pages in flight. If they differ, the prologue is repeated.
  // One copy of the code serves first and later tiles: i-cache misses dominate a one-tile CTA.
  // (Pages of one token: the ids of the first stages are more than a warp has lanes.)
  bool speculative = !kShared && Scheduler::may_speculate(p);
  if (kForm == KvForm::kSwizzledRows) speculative &= p.kv.block_size > 1;
  if (!speculative && !p.kv_ready) wait_at_start(p);
  uint32_t count = UINT32_MAX;  // work tiles, once there is a schedule
#pragma unroll 1
  for (int iteration = 0;; iteration = iteration == 5 ? 0 : iteration + 1) {
    const int now = iteration < 3 ? iteration : iteration - 3,
              last = now == 0 ? 2 : now - 1;  // index into work_tiles
    if (index < count) {
      int produced = 0;  // stages
#pragma unroll 1
      for (;;) {
        if (!has_tile) {
          scheduler.build(p, shape.work, lane);
          count = scheduler.num_tiles();
        }
        const bool some = index < count;
        if (some) take_tile(now, speculative);
        if (!speculative) {
          if (some) {
            load_new_token();
            pipeline.look_up();
          }
          break;
        }
        const int32_t* looked_up = nullptr;
        typename Pipeline::Copies copies = {};
        if (some) {
          looked_up = pipeline.look_up_speculative();
          // With few work tiles, CTAs start while the primary kernel runs, and have time. With
          // many, starting all stages at once would delay the indices, which are requested after
          // them.
          const bool few = count <= shape.work.splits.few_ctas;
          pipeline.prefetch(p.kv, shape.pipeline.stages, few);
          copies = pipeline.prepare_copies(p.kv, few ? shape.pipeline.stages : 1);
        }
        wait_for_primary_kernel();
        if (some) load_new_token();
        typename Scheduler::Indices indices;
        indices.load(p, lane);
        const int32_t block = looked_up != nullptr ? __ldcg(looked_up) : -1;
        pipeline.start_copies(p, copies);
        produced = copies.stages;
        if (some && produced == 0) produced = produce_stages(shape.pipeline.stages);
        speculative = false;
        if (scheduler.validate(p, shape.work, indices, lane) && (!some || pipeline.validate(block)))
          break;
        pipeline.discard(produced);
        produced = 0;
      }
      if (index < count) produce_stages(shape.pipeline.stages - produced);
      // With kv_ready the wait comes only here, before the first access to query and workspace. The
      // query still arrives before the first pages.
      if (!has_tile && p.kv_ready) wait_at_start(p);
      if (kClearsEarly) clear_rows();
      if (index < count) load_query();
      if (!kClearsEarly) clear_rows();  // while the first pages arrive
    }
    if (has_tile) {
      const WorkTile& work_tile = work_tiles[last];
      const TileRows& rows = work_tile_rows[last];
      const bool whole = work_tile.num_splits == 1, flag_in_data = work_tile.flag_in_data;
      const int thread_row = shape.fours.divide(threadIdx.x),
                d = (threadIdx.x - thread_row * fours) * 4;
      const SplitPartials& partials = flag_in_data ? workspace.flagged : workspace.by_semaphore;
      const auto partial_row = [&](int split, int row) {
        return (static_cast<int64_t>(work_tile.slot + split) << shape.work.row_shift) + row;
      };
      const auto out_at = [&](int64_t at) {
        return reinterpret_cast<float4*>(&partials.out[at * head_size + d]);
      };
      // Calls combine(warp of the consumer, row, row of the consumer's `results`) for this thread's
      // rows. `first`: first row of the combine_rows that each warp combines at a time.
      const int combine_rows = shape.combine_rows;
      const auto each_row = [&](int first, const auto& combine) {
        if constexpr (kHeadPerWarp) {  // combine_rows: a power of two, all rows of a head
          const int shift = __ffs(combine_rows) - 1, step = shape.fours.divide(blockDim.x);
          if (thread_row >= step) return;
#pragma unroll 1
          for (int i = thread_row; i < combine_rows << consumer_shift; i += step) {
            const int of = i >> shift, row = i - (of << shift);
            if (row < rows.count) combine(of, of * 8 + row, i);
          }
        } else {
          if (thread_row >= combine_rows || first + thread_row >= warp_rows) return;
#pragma unroll 1
          for (int of = 0; of < 1 << partial_shift; ++of) {
            const int row = of * warp_rows + first + thread_row;
            if (row < rows.count) combine(of, row, of * combine_rows + thread_row);
          }
        }
      };
      const auto write = [&](int of, int row, const RowState& state) {
        const int head = kHeadPerWarp ? of : 0;
        write_row<Cache>(p, shape.work, work_tile, rows, head, row - head * 8, d, state);
      };
      const int max_rows = min(warp_rows, rows.count);
      mma.reduce_sums();
#pragma unroll 1
      for (int first = 0; first < max_rows; first += combine_rows) {
        __syncthreads();  // all threads have read the previous rows of `results`
        const int rows_left = max(0, rows.count - first_row - first);
        mma.store(first, min(combine_rows, rows_left), results + warp * combine_rows * pitch, pitch,
                  warp_stats + warp * combine_rows, lane);
        __syncthreads();
        each_row(first, [&](int of, int row, int at) {
          RowState state;
          const uint32_t stride = combine_rows << partial_shift;
          state.combine<1>(warps >> partial_shift, &warp_stats[at], stride,
                           reinterpret_cast<float4*>(results + at * pitch + d), stride * pitch / 4,
                           SharedPartials{});
          if constexpr (NewToken::kAny) {
            if (new_token.counts(last))
              state.add_token(new_token.score(last, row), new_token.value(last, d));
          }
          if (whole) {
            write(of, row, state);
            return;
          }
          const int64_t to = partial_row(work_tile.split, row);
          const float2 stats = {state.row_max, state.sum};
          if (flag_in_data) {
            publish(out_at(to), state.out);
            if (d == 0) publish(&partials.stats[to], stats);
          } else {
            *out_at(to) = state.out;
            if (d == 0) partials.stats[to] = stats;
          }
        });
      }
      const auto combine_splits = [&](auto groups, const auto& source) {
#pragma unroll 1
        for (int first = 0; first < max_rows; first += combine_rows) {
          each_row(first, [&](int of, int row, int) {
            RowState state;
            const int64_t at = partial_row(0, row);
            state.combine<decltype(groups)::value>(work_tile.num_splits, &partials.stats[at],
                                                   1u << shape.work.row_shift, out_at(at),
                                                   fours << shape.work.row_shift, source);
            write(of, row, state);
          });
        }
      };
      if (!whole && !flag_in_data) {
        __syncthreads();
        if (threadIdx.x == 0) {
          is_last = atomic_inc_acquire_release(&workspace.semaphores[work_tile.slot],
                                               work_tile.num_splits - 1) ==
                    static_cast<uint32_t>(work_tile.num_splits - 1);
        }
        __syncthreads();
        if (is_last) combine_splits(std::integral_constant<int, 1>{}, SemaphorePartials{});
      }
      if (index >= count) {
        // A CTA with flag-in-data partials has no further work tile, so its registers are free
        // here.
        if (!whole && flag_in_data && work_tile.split + 1 == work_tile.num_splits) {
          if (work_tile.num_splits <= 8) {
            combine_splits(std::integral_constant<int, 1>{}, FlaggedPartials{});
          } else {
            constexpr int kGroups = kBytes == 1 ? sm90a_or(2, 1) : 2;
            combine_splits(std::integral_constant<int, kGroups>{}, FlaggedPartials{});
          }
          __syncthreads();  // all have read the stats
          for (int i = threadIdx.x; i < work_tile.num_splits << shape.work.row_shift;
               i += blockDim.x) {
            clear_flag(&partials.stats[partial_row(0, i)]);
          }
        }
        break;
      }
    } else {
      __syncthreads();  // work_tiles[now] is written
      if (index >= count) break;
    }
    has_tile = true;

    const WorkTile& work_tile = work_tiles[now];
    const TileRows rows = work_tile_rows[now];
    if constexpr (NewToken::kAny) new_token.prepare(p, shape.cap, work_tile, rows.count, now);
    mma.tiles = min(warp_rows / 8, max(0, rows.count - first_row + 7) / 8);
    if constexpr (NewToken::kAny) {
      query_rows[0] = lane / 4 < rows.count ? new_token.query_row(lane / 4) : nullptr;
      mma.load_query(query_rows, lane);
    }
    const float k_scale = !Mma::kCacheIs16Bit && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[(work_tile.kv_head + head_of_warp) * p.kv.scale_stride]
                              : 1.0f;
    const float softmax_scale_log2 = p.scale * k_scale * kLog2E;
    if constexpr (Mma::kCacheIs16Bit) {
      mma.template prepare_query<Cache>(softmax_scale_log2, lane);
    } else {
      p.dtype == DType::kFloat16 ? mma.template prepare_query<Half>(softmax_scale_log2, lane)
                                 : mma.template prepare_query<BFloat16>(softmax_scale_log2, lane);
    }
    mma.clear();

    const bool plain_scores = !p.modifies_scores();
    int new_tokens = 0;  // tokens that are not read from pages
    if constexpr (NewToken::kAny) new_tokens = new_token.counts(now) ? 1 : 0;
    const int begin = rows.any.begin, end = rows.any.end - new_tokens;
    // Stages that begin in [plain_begin, plain_begin + plain_extent] need no mask and no score
    // modification.
    int plain_begin = rows.every.begin;
    int plain_extent = rows.every.end - new_tokens - kTokens - plain_begin;
    if (!plain_scores || plain_extent < 0) {
      plain_begin = INT32_MAX;
      plain_extent = 0;
    }
    plain_begin = opaque(plain_begin);
    plain_extent = opaque(plain_extent);
    int first = 0;  // first token of the current stage
    const auto adjusts = [&] {
      const TileRows& again = work_tile_rows[now];  // so that no register keeps them
      return p.modifies_scores() || again.any.begin != again.every.begin ||
             again.any.end != again.every.end;
    };
    const auto adjust = [&](float score, int t, int j, int token) {
      const int row = min(first_row + Mma::row_of(lane, t, j), rows.count - 1);
      const QueryRow query_row = row_of_head(shape.work, work_tile, rows, head_of_warp, row);
      const int other = p.stripe.position_of(first + token) - rows.position;
      if (tree_hides(p, work_tile.sequence.first_query + query_row.token, query_row.token, other)) {
        return -INFINITY;
      }
      return adjusted_score(p, shape.cap, query_row.head, other - query_row.token, score);
    };

    const int stages = opaque(work_tile.stages);
    first = ((work_tile.sequence.first_stage + work_tile.stage + consumer) << kShift) +
            stage_half * kTokens;
    // Warp 0 requests the next work tile one stage before its last. That is late, so that no CTA
    // holds back tiles that others could start. The last of `count` requests wraps the counter to
    // 0.
    const int asks_at =
        opaque(warp == 0 ? max(0, ((stages - 1) / consumers - 1) * consumers) : INT32_MAX);
    uint32_t following = count;
#pragma unroll 1
    for (int i = consumer; i < stages; i += consumers) {
      if (i == asks_at && lane == 0 && count > gridDim.x) {
        following = gridDim.x + atomicInc(workspace.next, count - 1);
      }
      pipeline.consumer_wait();
      uint32_t tokens = pipeline.present();
      if (kHalves) tokens = tokens >> stage_half * kTokens & kAllTokens<kTokens>;
      // Refills the stage before this one: almost surely all of the consumer's warps have released
      // it.
      if (kShared && i != consumer) pipeline.produce(p);
      const bool plain =
          tokens == kAllTokens<kTokens> &&
          static_cast<uint32_t>(first - plain_begin) <= static_cast<uint32_t>(plain_extent);
      if (!plain) {
        if (first < begin) tokens &= begin - first < kTokens ? ~0u << (begin - first) : 0u;
        if (end - first < kTokens) tokens &= end > first ? (1u << (end - first)) - 1 : 0u;
      }
      if (tokens != 0 && (!kMultiWarp || mma.tiles > 0)) {
        mma.step(pipeline.key() + stage_half * shape.stage_layout.key_step,
                 pipeline.value() + stage_half * shape.stage_layout.value_step, pipeline.scales(),
                 tokens, plain, adjusts, adjust, shape.stage_layout, lane);
      }
      first += consumers << kShift;
      pipeline.consumer_release();
      if (!kShared) pipeline.produce(p);
      if (i == asks_at && lane == 0) {
        next_index = following;
        barrier_arrive(shared_address(&next_index_ready));
      }
    }
    barrier_wait(shared_address(&next_index_ready), iteration & 1);
    index = next_index;
  }
  wait_at_end(p);
}

template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm, bool kHalves>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, kMultiWarp, kForm>, 1)
    paged_attention_decode_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ KvTensorMaps maps,
                                  const __grid_constant__ DecodeWorkspace workspace) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  constexpr bool kUsed = !kMultiWarp || !kHasWgmmaDecode<Cache, kMaxHeadSize>;
#else
  constexpr bool kUsed = kForm != KvForm::kLines && !kHalves;
#endif
  if constexpr (kUsed)
    decode<Cache, kMaxHeadSize, kMultiWarp, kForm, kHalves>(p, shape, maps, workspace,
                                                            NoNewToken{});
}

}  // namespace vllm_kernels::cuda
