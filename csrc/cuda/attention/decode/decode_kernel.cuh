// paged_attention's decode kernel on mma.sync: one launch for any batch.
//
//   query      [num_tokens, num_heads, head_size], 16-bit
//   cache      paged, 16-bit (the query's dtype) or 8-bit
//   out, lse   [num_tokens, num_heads, head_size], [num_tokens, num_heads]
//   grid       one CTA per SM, or two; blockDim is up to 8 or 12 warps
//   work       tile_scheduler.cuh cuts it into work tiles, on the device
//
// Roles of warps: there is no separate producer. A "consumer" is one warp, for work tiles of up to
// 8 query rows, or 1, 2 or 4 warps (kMultiWarp) that share the rows, 8 or 16 each. So a warp keeps
// its query and its output in registers. The consumers take a tile's stages in turn, each through
// its own pipeline (kv_pipeline.cuh). Hopper uses decode_wgmma_kernel.cuh for tiles of more than 8
// rows and heads of up to kWgmmaMaxHeadSize.
//
// A tile's end: each consumer starts to load the next tile's stages. Then the consumers' partials
// are combined in shared memory. An unsplit tile is written as output. A split's partial goes to
// the workspace, and one CTA combines all splits in order: the last CTA to finish (semaphore), or
// the CTA of the last split (flag-in-data, split_exchange.cuh).
//
// Early reads, before the PDL wait: in small batches (and not kMultiWarp), lengths and block
// tables. The first work tile is scheduled speculatively from them, and its first pages are
// prefetched into L2. With kv_ready, lengths, tables and pages.
//
// Next: decode() below; warp_mma.cuh for the math of a stage; launch_decode_kernel() for the host's
// choices.
#pragma once
#include <algorithm>

#include "cuda/attention/common/kv_pipeline.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/split_exchange.cuh"
#include "cuda/attention/common/tensor_maps.cuh"
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

struct DecodeShape {
  WorkShape work;
  PipelineLayout pipeline;
  KvStageLayout stage_layout;
  int consumer_shift;  // log2 of the warps of a consumer
  int warp_shift;      // log2 of the max query rows of a warp
  int merge_rows;      // rows of a warp combined at a time; a thread has 4 dimensions of one row
  FastDivisor fours;   // divides by head_size / 4
  ScoreCap cap;
};

// The online-softmax state of a row over some of its tokens. Logits are in log2 units.
struct RowState {
  float row_max = kRowMaxInit;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};  // unnormalised, 4 dimensions

  // Explicit roundings: otherwise the compiler chooses which product of a sum is fused. It might
  // choose differently for flag-in-data partials than for those with a semaphore.
  __device__ __forceinline__ void add(float weight, float other_sum, float4 other) {
    sum = __fmaf_rn(weight, other_sum, sum);
    out.x = __fmaf_rn(weight, other.x, out.x);
    out.y = __fmaf_rn(weight, other.y, out.y);
    out.z = __fmaf_rn(weight, other.z, out.z);
    out.w = __fmaf_rn(weight, other.w, out.w);
  }
  // Rescales to the row_max `updated`.
  __device__ __forceinline__ void raise(float updated) {
    const float factor = exp2_approx(row_max - updated);
    row_max = updated;
    sum = __fmul_rn(sum, factor);
    out = {__fmul_rn(out.x, factor), __fmul_rn(out.y, factor), __fmul_rn(out.z, factor),
           __fmul_rn(out.w, factor)};
  }
  // Adds one token.
  __device__ __forceinline__ void add_token(float score, float4 value) {
    raise(fmaxf(row_max, score));
    add(exp2_approx(score - row_max), 1.0f, value);
  }
  // Combines `parts` partials. Partial i is at stats[i * stats_step] and outs[i * out_step].
  // kGroups groups of 8 are loaded at a time and added group by group, so the result does not
  // depend on kGroups.
  template <int kGroups, typename Source>
  __device__ __forceinline__ void merge(int parts, float2* stats, uint32_t stats_step, float4* outs,
                                        uint32_t out_step, const Source& source) {
    constexpr int kBatch = 8 * kGroups;
#pragma unroll 1
    for (int first = 0; first < parts; first += kBatch) {
      float2 s[kBatch];
      float4 o[kBatch];
      bool all_present;
      // Lanes may diverge here. After the combine of flag-in-data partials the kernel has no
      // warp-level operation and no mbarrier, only __syncthreads().
      // (DecodeWgmmaEpilogue::combine_splits must keep its warps converged.)
#pragma unroll 1
      do {
        all_present = true;
        const int begin = opaque(first);  // keeps no addresses in registers
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t part = min(begin + i, parts - 1);
          s[i] = source.load(stats + part * stats_step);
          o[i] = source.load(outs + part * out_step);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          all_present &= source.present(s[i].x) & source.present(o[i].x);
        }
      } while (!all_present);
#pragma unroll
      for (int group = 0; group < kBatch; group += 8) {
        float updated = row_max;
#pragma unroll
        for (int i = group; i < group + 8; ++i) updated = fmaxf(updated, s[i].x);
        raise(updated);
#pragma unroll
        for (int i = group; i < group + 8; ++i) {
          // Absent partials weigh 0; branches would serialise independent work.
          const bool present = first + i < parts;
          const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
          add(present ? exp2_approx(s[i].x - row_max) : 0.0f, s[i].y, present ? o[i] : zero);
        }
      }
      const int begin = opaque(first);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        source.take(outs + static_cast<uint32_t>(min(begin + i, parts - 1)) * out_step);
      }
    }
  }
};

// Sources of RowState::merge(): partials in shared memory,
struct SharedPartials {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return *from;
  }
  __device__ __forceinline__ bool present(float) const { return true; }
  __device__ __forceinline__ void take(float4*) const {}
};
// in the workspace behind a semaphore, or in the workspace with flag-in-data.
struct CountedPartials : SharedPartials {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return __ldcg(from);
  }
};
struct FlaggedPartials {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return load_relaxed(from);
  }
  __device__ __forceinline__ bool present(float x) const { return is_published(x); }
  __device__ __forceinline__ void take(float4* from) const { clear_flag(from); }
};

template <typename T>
__device__ __forceinline__ void store4(void* out, int64_t at, const float (&values)[4]) {
  struct alignas(4 * sizeof(T)) Four {
    T data[4];
  } four;
#pragma unroll
  for (int j = 0; j < 4; ++j) four.data[j] = from_float<T>(values[j]);
  *reinterpret_cast<Four*>(static_cast<T*>(out) + at) = four;
}

// Writes 4 dimensions of a row from `d` on, and its log-sum-exp.
__device__ __forceinline__ void write_row(const PagedAttentionParams& p, const WorkShape& shape,
                                          const WorkTile& work_tile, const TileRows& rows, int row,
                                          int d, const RowState& state) {
  const QueryRow query_row = query_row_of(shape, work_tile, rows, row);
  const RowResult result =
      row_result(p, work_tile.kv_head, query_row.head, state.row_max, state.sum);
  const float scale = result.scale;
  const float values[4] = {state.out.x * scale, state.out.y * scale, state.out.z * scale,
                           state.out.w * scale};
  const int64_t token = work_tile.sequence.first_query + query_row.token;
  const int64_t at =
      token * p.out_stride + static_cast<int64_t>(query_row.head) * p.kv.head_size + d;
  if (p.dtype == DType::kFloat16) {
    store4<Half>(p.out, at, values);
  } else {
    store4<BFloat16>(p.out, at, values);
  }
  if (p.lse != nullptr && d == 0) p.lse[token * p.num_heads + query_row.head] = result.lse;
}

// Tiles of 8 query rows per warp. kMultiWarp: as many as its registers hold.
template <int kMaxHeadSize, bool kMultiWarp>
constexpr int kRowTiles = kMultiWarp && kMaxHeadSize <= 128 ? 2 : 1;

// Tiles of 16 tokens per stage: two where a stage is then at most 8 KiB of K and V, or is shared by
// several warps.
template <typename Cache, int kMaxHeadSize, bool kMultiWarp>
constexpr int kTokenTiles =
    kMaxHeadSize <= 128 && (kMultiWarp || sizeof(Cache) * kMaxHeadSize <= 128) ? 2 : 1;

// Max threads. 16-bit: 8 warps with pipelines of 3 pages each. 8-bit: 12 warps, since pages are
// half as many bytes and take more work.
template <typename Cache, int kMaxHeadSize, bool kMultiWarp>
constexpr int kDecodeThreads = sizeof(Cache) == 1 && !kMultiWarp && kMaxHeadSize <= 128 ? 384 : 256;

// The kernel's body. `new_token`: NoNewToken, or fused_decode_attention's FusedNewToken.
template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm, typename NewToken>
__device__ __forceinline__ void decode(const PagedAttentionParams& p, const DecodeShape& shape,
                                       const KvTensorMaps& maps, const DecodeWorkspace& workspace,
                                       NewToken new_token) {
  constexpr int kTiles = kRowTiles<kMaxHeadSize, kMultiWarp>, kBytes = sizeof(Cache);
  using Mma =
      WarpMma<Cache, kMaxHeadSize, kTiles, kTokenTiles<Cache, kMaxHeadSize, kMultiWarp>, kForm>;
  constexpr int kTokens = Mma::kTokens, kShift = kStageShift<kTokens>;
  using Pipeline = KvPipeline<Cache, kMaxHeadSize, kTokens, kForm, kMultiWarp>;
  extern __shared__ __align__(1024) char shared[];  // pipelines, then the warps' partials
  constexpr int kWarps = kDecodeThreads<Cache, kMaxHeadSize, kMultiWarp> / 32;
  __shared__ uint64_t pipeline_words[kWarps][Pipeline::kWords];
  __shared__ float2 warp_stats[kWarps * 8];
  // Three work tiles: some threads may still write the output of one when the next but one is
  // stored.
  __shared__ WorkTile work_tiles[3];
  __shared__ TileRows work_tile_rows[3];
  __shared__ uint32_t next_index;  // written by thread 0; others wait for next_index_ready
  __shared__ uint64_t next_index_ready;
  __shared__ bool is_last;
  launch_dependents();

  const int warps = blockDim.x / 32;
  const int warp = opaque(threadIdx.x / 32), lane = opaque(threadIdx.x % 32);
  const int consumer_shift = kMultiWarp ? shape.consumer_shift : 0,
            consumer_warps = 1 << consumer_shift;
  const int consumer = warp >> consumer_shift, warp_in_consumer = warp & consumer_warps - 1,
            consumers = warps >> consumer_shift;
  const int warp_rows = kTiles > 1 ? 1 << shape.warp_shift : 8;
  const int head_size = p.kv.head_size, fours = head_size / 4;
  const int pipeline_bytes = shape.pipeline.stages * shape.pipeline.stage_bytes;
  Pipeline pipeline(shape.pipeline, maps, shared_address(shared) + consumer * pipeline_bytes,
                    shared_address(pipeline_words[consumer]), warp_in_consumer == 0, lane);
  if (warp_in_consumer == 0 && lane == 0) {
    Pipeline::init(shape.pipeline, maps, shared_address(pipeline_words[consumer]), consumer_warps);
  }
  __syncwarp();
  float* results = reinterpret_cast<float*>(shared + consumers * pipeline_bytes);
  const int pitch = (head_size + 15) / 16 * 16 + 4;  // floats; stores have no bank conflicts
  if (threadIdx.x == 0) barrier_init(shared_address(&next_index_ready), 1);
  Mma mma;
  mma.head_size = head_size;
  mma.set_addresses(shape.stage_layout, lane);
  mma.keep_addresses();
  if (head_size < kMaxHeadSize) {  // K past the head size is read, but never copied: zero it
    for (int i = threadIdx.x * 16; i < consumers * pipeline_bytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
  }
  if (kMultiWarp || head_size < kMaxHeadSize) __syncthreads();  // orders barrier init and zeros
  if (threadIdx.x == 0) {  // a dummy: next_index is written again before it is read
    store_shared(shared_address(&next_index), touch(p) ^ touch(shape) ^ touch(workspace));
  }
  // Kept rounds, as registers allow.
  using Scheduler = TileScheduler<kMultiWarp || (NewToken::kAny && kBytes == 1) ? 1
                                  : kBytes == 1                                 ? 4
                                                                                : 8>;
  Scheduler scheduler;
  uint32_t index = blockIdx.x;                         // of the current work tile
  const int first_row = warp_in_consumer * warp_rows;  // this warp's first row of a work tile
  const void* query_rows[kTiles];  // this lane's rows of the tile that the pipeline has next
  const auto take_tile = [&](int now, bool speculative) {
    const WorkTile work_tile = scheduler.get_tile(p, shape.work, index, lane);
    const TileRows rows = tile_rows(shape.work, work_tile);
    if constexpr (NewToken::kAny) {
      new_token.aim(work_tile, shape.work.group, speculative);
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int row = t * 8 + lane / 4;
        query_rows[t] = nullptr;
        if (first_row + row >= rows.count || row >= warp_rows) continue;
        const QueryRow query_row = query_row_of(shape.work, work_tile, rows, first_row + row);
        query_rows[t] = static_cast<const char*>(p.query) +
                        2 * ((work_tile.sequence.first_query + query_row.token) * p.query_stride +
                             static_cast<int64_t>(query_row.head) * head_size);
      }
    }
    if (threadIdx.x == 0) {
      work_tiles[now] = work_tile;
      work_tile_rows[now] = rows;
    }
    pipeline.set_source(p, kShift, work_tile.seq, work_tile.sequence.seq_len, work_tile.kv_head,
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
    for (int i = 0; i < stages; ++i) produced += pipeline.produce(p.kv);
    return produced;
  };

  // Speculative prologue of small batches. The first work tile and its pages are found before the
  // primary kernel has ended, from lengths and tables that it may still be writing. After the wait
  // both are read again, with the first pages in flight. If they differ, all is done again.
  // One copy of the code serves first and later tiles: i-cache misses dominate a one-tile CTA.
  bool speculative = !kMultiWarp && Scheduler::may_speculate(p);
  if (!speculative && !p.kv_ready) wait_at_start(p);
  uint32_t count = UINT32_MAX;  // work tiles, once there is a schedule
  bool merges = false;          // whether a previous work tile is still to be combined and written
#pragma unroll 1
  for (int iteration = 0;; iteration = iteration == 5 ? 0 : iteration + 1) {
    const int now = iteration < 3 ? iteration : iteration - 3,
              last = now == 0 ? 2 : now - 1;  // index into work_tiles
    if (index < count) {
      int produced = 0;  // stages
#pragma unroll 1
      for (;;) {
        if (!merges) {
          scheduler.make(p, shape.work, lane);
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
          const bool few = count <= gridDim.x / 2;
          pipeline.prefetch(p.kv, shape.pipeline.stages, few);
          copies = pipeline.prepare_copies(p.kv, few ? shape.pipeline.stages : 1);
        }
        wait_for_primary_kernel();
        if (some) load_new_token();
        typename Scheduler::Indices indices;
        indices.load(p, lane);
        const int32_t block = looked_up != nullptr ? __ldcg(looked_up) : -1;
        pipeline.start_copies(copies);
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
      if (!merges && p.kv_ready) wait_at_start(p);
      if (index < count) load_query();
    }
    if (merges) {
      const WorkTile& work_tile = work_tiles[last];
      const TileRows& rows = work_tile_rows[last];
      const bool whole = work_tile.num_splits == 1, flag_in_data = work_tile.flag_in_data;
      const int own = shape.fours.divide(threadIdx.x), d = (threadIdx.x - own * fours) * 4;
      const SplitPartials& num_splits = flag_in_data ? workspace.flagged : workspace.counted;
      const auto partial_row = [&](int split, int row) {
        return (static_cast<int64_t>(work_tile.slot + split) << shape.work.row_shift) + row;
      };
      const auto out_at = [&](int64_t at) {
        return reinterpret_cast<float4*>(&num_splits.out[at * head_size + d]);
      };
      // Calls merge(warp_in_consumer, row) for this thread's rows. A pass covers merge_rows rows of
      // each warp of a consumer, from the warp's row `first` on.
      const int merge_rows = shape.merge_rows;
      const auto each_row = [&](int first, const auto& merge) {
        if (own >= merge_rows || first + own >= warp_rows) return;
#pragma unroll 1
        for (int of = 0; of < consumer_warps; ++of) {
          const int row = of * warp_rows + first + own;
          if (row < rows.count) merge(of, row);
        }
      };
      const int most = min(warp_rows, rows.count);
      mma.reduce_sums();
#pragma unroll 1
      for (int first = 0; first < most; first += merge_rows) {
        __syncthreads();  // all have read the previous results
        const int own_rows = max(0, rows.count - warp_in_consumer * warp_rows - first);
        mma.store(first, min(merge_rows, own_rows), results + warp * merge_rows * pitch, pitch,
                  warp_stats + warp * merge_rows, lane);
        __syncthreads();
        each_row(first, [&](int of, int row) {
          RowState state;
          const int at = of * merge_rows + own;
          const uint32_t part_rows = merge_rows << consumer_shift;
          state.merge<1>(consumers, &warp_stats[at], part_rows,
                         reinterpret_cast<float4*>(results + at * pitch + d), part_rows * pitch / 4,
                         SharedPartials{});
          if constexpr (NewToken::kAny) {
            if (new_token.counts(last))
              state.add_token(new_token.score(last, row), new_token.value(last, d));
          }
          if (whole) {
            write_row(p, shape.work, work_tile, rows, row, d, state);
            return;
          }
          const int64_t to = partial_row(work_tile.split, row);
          const float2 stats = {state.row_max, state.sum};
          if (flag_in_data) {
            publish(out_at(to), state.out);
            if (d == 0) publish(&num_splits.stats[to], stats);
          } else {
            *out_at(to) = state.out;
            if (d == 0) num_splits.stats[to] = stats;
          }
        });
      }
      const auto combine_splits = [&](auto groups, const auto& source) {
#pragma unroll 1
        for (int first = 0; first < most; first += merge_rows) {
          each_row(first, [&](int, int row) {
            RowState state;
            const int64_t at = partial_row(0, row);
            state.merge<decltype(groups)::value>(work_tile.num_splits, &num_splits.stats[at],
                                                 1u << shape.work.row_shift, out_at(at),
                                                 fours << shape.work.row_shift, source);
            write_row(p, shape.work, work_tile, rows, row, d, state);
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
        if (is_last) combine_splits(std::integral_constant<int, 1>{}, CountedPartials{});
      }
      if (index >= count) {
        // CTAs with flag-in-data partials have no other work tile: nothing else is in registers
        // here.
        if (!whole && flag_in_data && work_tile.split + 1 == work_tile.num_splits) {
          if (work_tile.num_splits <= 8) {
            combine_splits(std::integral_constant<int, 1>{}, FlaggedPartials{});
          } else {
            combine_splits(std::integral_constant<int, 2>{}, FlaggedPartials{});
          }
          __syncthreads();  // all have read the stats
          for (int i = threadIdx.x; i < work_tile.num_splits << shape.work.row_shift;
               i += blockDim.x) {
            clear_flag(&num_splits.stats[partial_row(0, i)]);
          }
        }
        break;
      }
    } else {
      __syncthreads();  // work_tiles[now] is written
      if (index >= count) break;
    }
    merges = true;

    const WorkTile& work_tile = work_tiles[now];
    const TileRows rows = work_tile_rows[now];
    if constexpr (NewToken::kAny) new_token.prepare(p, shape.cap, work_tile, rows.count, now);
    mma.tiles = min(warp_rows / 8, max(0, rows.count - first_row + 7) / 8);
    if constexpr (NewToken::kAny) {
      query_rows[0] = lane / 4 < rows.count ? new_token.query_row(lane / 4) : nullptr;
      mma.load_query(query_rows, lane);
    }
    const float k_scale = !Mma::kCacheIs16Bit && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[work_tile.kv_head * p.kv.scale_stride]
                              : 1.0f;
    const float softmax_scale_log2 = p.scale * k_scale * kLog2E;
    if constexpr (Mma::kCacheIs16Bit) {
      mma.template prepare_query<Cache>(softmax_scale_log2, lane);
    } else {
      p.dtype == DType::kFloat16 ? mma.template prepare_query<Half>(softmax_scale_log2, lane)
                                 : mma.template prepare_query<BFloat16>(softmax_scale_log2, lane);
    }
    mma.clear();

    const bool plain_scores = p.alibi_slopes == nullptr && p.softcap == 0.0f;
    const int window = p.sliding_window;
    const int begin = window > 0 ? max(0, rows.low - window + 1) : 0;  // first visible token
    int new_tokens = 0;  // tokens that are not read from pages
    if constexpr (NewToken::kAny) new_tokens = new_token.counts(now) ? 1 : 0;
    const int end = rows.high + 1 - new_tokens;
    // Stages that begin in [plain_begin, plain_begin + plain_extent] need no mask and no score
    // modification.
    int plain_begin = window > 0 ? rows.high - window + 1 : 0;
    int plain_extent = rows.low + 1 - new_tokens - kTokens - plain_begin;
    if (!plain_scores || plain_extent < 0) {
      plain_begin = INT32_MAX;
      plain_extent = 0;
    }
    plain_begin = opaque(plain_begin);
    plain_extent = opaque(plain_extent);
    int first = 0;  // first token of the current stage
    const auto adjust = [&](float score, int t, int j, int token) {
      const int row = min(first_row + Mma::row_of(lane, t, j), rows.count - 1);
      const QueryRow query_row = query_row_of(shape.work, work_tile, rows, row);
      return adjusted_score(p, shape.cap, query_row.head,
                            first + token - rows.position - query_row.token, score);
    };

    const int stages = opaque(work_tile.stages);
    first = (work_tile.sequence.first_stage + work_tile.stage + consumer) << kShift;
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
      // Refills the stage before this one: almost surely all of the consumer's warps have released
      // it.
      if (kMultiWarp && i != consumer) pipeline.produce(p.kv);
      const bool plain =
          tokens == kAllTokens<kTokens> &&
          static_cast<uint32_t>(first - plain_begin) <= static_cast<uint32_t>(plain_extent);
      if (!plain) {
        if (first < begin) tokens &= begin - first < kTokens ? ~0u << (begin - first) : 0u;
        if (end - first < kTokens) tokens &= end > first ? (1u << (end - first)) - 1 : 0u;
      }
      if (tokens != 0 && (!kMultiWarp || mma.tiles > 0)) {
        mma.step(pipeline.key(), pipeline.value(), tokens, plain, adjust, shape.stage_layout, lane);
      }
      first += consumers << kShift;
      pipeline.consumer_release();
      if (!kMultiWarp) pipeline.produce(p.kv);
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

template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, kMultiWarp>, 1)
    paged_attention_decode_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ KvTensorMaps maps,
                                  const __grid_constant__ DecodeWorkspace workspace) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  constexpr bool kUsed = !kMultiWarp || kMaxHeadSize > kWgmmaMaxHeadSize;
#else
  constexpr bool kUsed = true;
#endif
  if constexpr (kUsed)
    decode<Cache, kMaxHeadSize, kMultiWarp, kForm>(p, shape, maps, workspace, NoNewToken{});
}

// kKernel takes p, DecodeShape, KvTensorMaps, workspace and `more`. Returns false, without a
// launch, if shared memory cannot hold the pipelines of `min_threads`.
template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm, auto kKernel,
          typename... More>
bool launch_decode_kernel(const PagedAttentionParams& p, const DecodeWorkspace& workspace,
                          void* stream, int min_threads, const More&... more) {
  const DeviceInfo& device = current_device_info();
  const PagedKv& kv = p.kv;
  constexpr int kBytes = sizeof(Cache);
  constexpr int kTokens = 16 * kTokenTiles<Cache, kMaxHeadSize, kMultiWarp>;
  constexpr int kShift = kStageShift<kTokens>;
  DecodeShape shape;
  shape.fours = FastDivisor(kv.head_size / 4);
  shape.cap = score_cap(p.softcap);

  set_stage_layout<Cache, kMaxHeadSize, kTokens, kForm>(kv, shape.pipeline, shape.stage_layout);
  PipelineLayout& pipeline = shape.pipeline;
  int memory = dynamic_shared_memory<kKernel>("paged_attention");
  const int row_bytes = ((kv.head_size + 15) / 16 * 16 + 4) * 4;
  const int group = p.num_heads / kv.num_kv_heads;
  const int64_t rows = int64_t{p.max_query_len} * group;
  // Stages of 16-bit caches are twice as large, so there are half as many consumers of 2 warps.
  shape.consumer_shift = kMultiWarp && (kBytes == 2 || kMaxHeadSize > 128) ? 1 : 0;
  shape.warp_shift = 3;
  if (kRowTiles<kMaxHeadSize, kMultiWarp> > 1 && rows > 8 << shape.consumer_shift)
    shape.warp_shift = 4;
  while (kMultiWarp && shape.consumer_shift < 2 &&
         rows > 1 << (shape.warp_shift + shape.consumer_shift)) {
    ++shape.consumer_shift;
  }
  const int row_shift = shape.warp_shift + shape.consumer_shift;
  const int max_rows = static_cast<int>(std::min<int64_t>(rows, 8));  // combined at a time
  int warps = kDecodeThreads<Cache, kMaxHeadSize, kMultiWarp> / 32;
  const auto memory_for = [&](int count) {  // bytes for the pipelines of `count` warps
    return memory - count * (kMultiWarp ? max_rows : std::min(max_rows, 4)) * row_bytes;
  };
  const auto stages_for = [&](int count) {
    return memory_for(count) / (count >> shape.consumer_shift) / pipeline.stage_bytes;
  };
  // Two CTAs per SM, each with half of the warps and at least 2 stages, for large 8-bit batches.
  // There, query tiles end often for the bytes that they read, and one CTA's copies go on while the
  // other combines. Not with fixed_split_size, whose results must not depend on the batch.
  int blocks = 1, min_stages = 3;
  if (kBytes == 1 && !kMultiWarp && min_threads == 0 && p.fixed_split_size == 0 &&
      int64_t{p.num_seqs} * kv.num_kv_heads > device.num_sms) {
    const int all = memory, fixed = device.shared_memory_per_block - all + 1024;
    memory = (all - fixed) / 2;
    if (stages_for(warps / 2) >= 2) {
      blocks = 2;
      min_stages = 2;
      warps /= 2;
    } else {
      memory = all;
    }
  }
  // As many warps as fit with min_stages stages each and a few rows to combine.
  const int step = std::max(2, 1 << shape.consumer_shift);
  while (warps > step && stages_for(warps) < min_stages) warps -= step;
  if (warps * 32 < min_threads) return false;
  pipeline.stages =
      pipeline_stages(memory_for(warps), warps >> shape.consumer_shift, pipeline.stage_bytes);
  const int pipelines = (warps >> shape.consumer_shift) * pipeline.stages * pipeline.stage_bytes;
  shape.merge_rows = std::min(
      {max_rows, (memory - pipelines) / (warps * row_bytes), warps * 32 * 4 / kv.head_size});
  const int bytes = pipelines + warps * shape.merge_rows * row_bytes;

  shape.work = {
      .group = group,
      .row_shift = row_shift,
      .stage_shift = kShift,
      .min_split_stages = std::max(1, (warps >> shape.consumer_shift) >> (kShift - 4)),
      .combine_share = warps >> shape.consumer_shift,
      .slots = workspace_slots(row_shift, kv.head_size),
      .may_flag_in_data = may_flag_in_data(device.num_sms * blocks, row_shift, kv.head_size),
      .max_split_share = 0.25f * blocks,
      .group_divisor = FastDivisor(group)};
  check_fixed_split(p, shape.work);
  const KvTensorMaps maps = kv_tensor_maps<Cache, kTokens, kForm>(kv, pipeline.line_shift);
  launch_kernel("paged_attention", kKernel, dim3(device.num_sms * blocks), dim3(warps * 32), bytes,
                stream, p, shape, maps, workspace, more...);
  return true;
}

template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  launch_decode_kernel<Cache, kMaxHeadSize, kMultiWarp, kForm,
                       paged_attention_decode_kernel<Cache, kMaxHeadSize, kMultiWarp, kForm>>(
      p, workspace, stream, 0);
}

// Layouts NHD and HND: whether kPlainRows has a kernel for this head size and is faster than
// kSwizzledRows (benchmarks/RESULTS.md, "Along the axes").
template <typename Cache>
bool uses_plain_rows(const PagedKv& kv) {
  if (kv.layout == KvLayout::kVllm || kv.block_size < 8) return false;
  constexpr bool kCacheIs16Bit = sizeof(Cache) == 2;
  const bool dense = rows_are_contiguous(kv);
  if (!dense && current_device_info().architecture < 90) return false;
  switch (kv.head_size) {
    case 80:
    case 112:
      return kCacheIs16Bit || dense;
    case 96:
      return kCacheIs16Bit != dense;
    case 192:
      return !kCacheIs16Bit;
    default:
      return false;
  }
}

// Picks the kernel for one cache type: form, padded head size, and one or several warps per
// consumer.
template <typename Cache>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  const auto with_head_size = [&](auto form, auto head_size) {
    constexpr KvForm kForm = decltype(form)::value;
    constexpr int kMaxHeadSize = decltype(head_size)::value;
    if (rows <= 8) return launch_decode<Cache, kMaxHeadSize, false, kForm>(p, workspace, stream);
    if constexpr (kMaxHeadSize <= kWgmmaMaxHeadSize) {
      if (current_device_info().has_wgmma) {
        return launch_decode_wgmma<Cache, kMaxHeadSize, kForm>(p, workspace, stream);
      }
    }
    launch_decode<Cache, kMaxHeadSize, true, kForm>(p, workspace, stream);
  };
  const auto with_form = [&](auto form) {
    if (p.kv.head_size <= 64) return with_head_size(form, std::integral_constant<int, 64>{});
    if (p.kv.head_size <= 128) return with_head_size(form, std::integral_constant<int, 128>{});
    with_head_size(form, std::integral_constant<int, 256>{});
  };
  if (rows <= 8 && uses_plain_rows<Cache>(p.kv)) {
    const auto of = [&](auto head_size) {
      launch_decode<Cache, decltype(head_size)::value, false, KvForm::kPlainRows>(p, workspace,
                                                                                  stream);
    };
    if (p.kv.head_size == 80) return of(std::integral_constant<int, 80>{});
    if (p.kv.head_size == 96) return of(std::integral_constant<int, 96>{});
    if (p.kv.head_size == 112) return of(std::integral_constant<int, 112>{});
    if constexpr (sizeof(Cache) == 1) return of(std::integral_constant<int, 192>{});
  }
  if (p.kv.layout != KvLayout::kVllm) {
    with_form(std::integral_constant<KvForm, KvForm::kSwizzledRows>{});
  } else if (p.kv.block_size <= 16) {
    with_form(std::integral_constant<KvForm, KvForm::kPackedPages>{});
  } else {
    with_form(std::integral_constant<KvForm, KvForm::kPackedBoxes>{});
  }
}

}  // namespace vllm_kernels::cuda
