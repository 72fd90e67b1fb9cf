// Epilogue of decode_wgmma_kernel.cuh: the end of a work tile, by the warps of all consumers.
//
// The consumers store their partials in shared memory, half a head at a time. Each warp then
// combines some fragments of 16 dimensions x 8 rows. An unsplit tile is written as output. A
// split's partial goes to the workspace, and one CTA combines all splits in order: the last CTA to
// finish (semaphore), or the CTA of the last split (flag-in-data, split_exchange.cuh). end_tile()
// at the end of this file has the sequence of steps.
#pragma once
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/split_exchange.cuh"
#include "cuda/attention/common/workspace.h"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/attention/decode/warpgroup_mma.cuh"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Barrier of all consumer warps: an mbarrier with kWarpArrivals arrivals per warp. With a named
// barrier, compute-sanitizer's racecheck reports hazards on what the barrier orders. A work tile
// syncs an even number of times, twice at its start. So the parity of each sync is a constant.
struct ConsumersBarrier {
  uint32_t barrier;
  int lane;

  __device__ __forceinline__ void arrive() const { barrier_arrive_warp(barrier, lane); }
  template <uint32_t kParity>
  __device__ __forceinline__ void wait() const {
    barrier_wait(barrier, kParity);
  }
  template <uint32_t kParity>
  __device__ __forceinline__ void sync() const {
    arrive();
    wait<kParity>();
  }
};

// Row statistics of a work tile, from all consumers.
template <int kConsumers, int kMaxRows>
struct ConsumerStats {
  float row_maxima[kConsumers][kMaxRows];  // log2 units; later the consumers' combine weights
  float sums[kConsumers][kMaxRows];
  int64_t out[kMaxRows];  // offset of the row in out, in elements; -1: no such row
};

// A warp combines fragments in the mma's own layout. A lane has rows 2 (lane % 4) + j of tile t;
// its values j and j + 2 are of dimensions dimension_of(lane, k, 0) and dimension_of(lane, k, 1).
template <typename Mma>
struct DecodeWgmmaEpilogue {
  static constexpr int kConsumers = Mma::kConsumers;
  const PagedAttentionParams& p;
  const WorkShape& shape;
  const DecodeWorkspace& workspace;
  const WorkTile& work_tile;
  const TileRows& rows;
  ConsumerStats<kConsumers, Mma::kTiles * 8>& stats;
  bool& is_last;
  uint32_t scratch;  // shared memory: [kConsumers][tiles][128 threads] of 16 bytes
  int tiles;
  int warp, lane;

  // Combines the consumers' row_max and row_sum, one thread per row, and stores the combine
  // weights.
  __device__ __forceinline__ void merge_stats() const {
    const int row = warp * 32 + lane;
    if (row >= tiles * 8) return;
    float row_max = stats.row_maxima[0][row], sum = 0.0f;
#pragma unroll
    for (int consumer = 1; consumer < kConsumers; ++consumer)
      row_max = fmaxf(row_max, stats.row_maxima[consumer][row]);
    float weights[kConsumers];
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      weights[consumer] = exp2_approx(stats.row_maxima[consumer][row] - row_max);
      sum = __fmaf_rn(weights[consumer], stats.sums[consumer][row], sum);
    }
    float scale = 1.0f;
    if (work_tile.num_splits == 1) {
      scale = finish_row(row, row_max, sum, true);
    } else if (work_tile.flag_in_data) {
      publish(stats_of(work_tile.split, row), {row_max, sum});
    } else {
      *stats_of(work_tile.split, row) = {row_max, sum};
    }
    const QueryRow query_row = query_row_of(shape, work_tile, rows, row);
    stats.out[row] = row >= rows.count
                         ? -1
                         : (work_tile.sequence.first_query + query_row.token) * p.out_stride +
                               static_cast<int64_t>(query_row.head) * p.kv.head_size;
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer)
      stats.row_maxima[consumer][row] = weights[consumer] * scale;
  }

  // Combines one half of the head, which the consumers have stored in `scratch`.
  __device__ __forceinline__ void combine_consumers(int half) const {
#pragma unroll 1
    for (int i = warp; i < tiles * 4; i += 4 * kConsumers) {
      float values[4] = {};
#pragma unroll
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        const float4 out =
            load_shared<float4>(scratch + ((consumer * tiles * 4 + i) * 32 + lane) * 16);
        add(values, row_pair(stats.row_maxima[consumer], i / 4), out);
      }
      if (work_tile.num_splits == 1) {
        write(half, i, values);
      } else if (work_tile.flag_in_data) {
        publish(outs_of(work_tile.split, half, i), {values[0], values[1], values[2], values[3]});
      } else {
        *outs_of(work_tile.split, half, i) = {values[0], values[1], values[2], values[3]};
      }
    }
  }

  // Combines all splits of the query tile, from the workspace.
  __device__ __forceinline__ void combine_splits() const {
#pragma unroll 1
    for (int i = warp; i < Mma::kHalves * tiles * 4; i += 4 * kConsumers) {
      const int half = i / (tiles * 4), in_half = i % (tiles * 4);
      const int row = Mma::row_of(lane, in_half / 4, 0);
      float row_max[2] = {kRowMaxInit, kRowMaxInit}, sum[2] = {}, values[4] = {};
      constexpr int kBatch = Mma::kTiles == 8 ? 4 : 8;  // partials in flight, as registers allow
#pragma unroll 1
      for (int first = 0; first < work_tile.num_splits; first += kBatch) {
        float4 pairs[kBatch], outs[kBatch];
        bool all_present;
#pragma unroll 1
        do {
          all_present = true;
          const int begin = opaque(first);  // keeps no addresses in registers
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            const int split = min(begin + b, work_tile.num_splits - 1);
            // Each load has the width of the store that published it.
            const float2 first_row = load_relaxed(stats_of(split, row));
            const float2 second_row = load_relaxed(stats_of(split, row + 1));
            pairs[b] = {first_row.x, first_row.y, second_row.x, second_row.y};
            outs[b] = load_relaxed(outs_of(split, half, in_half));
          }
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            all_present &=
                is_published(pairs[b].x) & is_published(pairs[b].z) & is_published(outs[b].x);
          }
          // Warp-wide vote: diverged lanes would not reconverge for write() and the next barrier.
        } while (work_tile.flag_in_data && !__all_sync(0xffffffffu, all_present));
        float updated[2] = {row_max[0], row_max[1]};
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          updated[0] = fmaxf(updated[0], pairs[b].x);
          updated[1] = fmaxf(updated[1], pairs[b].z);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float factor = exp2_approx(row_max[j] - updated[j]);
          row_max[j] = updated[j];
          sum[j] = __fmul_rn(sum[j], factor);
          values[j] = __fmul_rn(values[j], factor);
          values[j + 2] = __fmul_rn(values[j + 2], factor);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          // Absent splits weigh 0; a branch would serialise the loads.
          const bool present = first + b < work_tile.num_splits;
          const float2 weight = {present ? exp2_approx(pairs[b].x - row_max[0]) : 0.0f,
                                 present ? exp2_approx(pairs[b].z - row_max[1]) : 0.0f};
          sum[0] = __fmaf_rn(weight.x, pairs[b].y, sum[0]);
          sum[1] = __fmaf_rn(weight.y, pairs[b].w, sum[1]);
          const float4 out = outs[b];  // 0 * out may be NaN, so absent ones are zeroed too
          add(values, weight,
              {present ? out.x : 0.0f, present ? out.y : 0.0f, present ? out.z : 0.0f,
               present ? out.w : 0.0f});
        }
        if (work_tile.flag_in_data) {
          const int begin = opaque(first);
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            clear_flag(outs_of(min(begin + b, work_tile.num_splits - 1), half, in_half));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scale = finish_row(row + j, row_max[j], sum[j], i % 4 == 0 && lane < 4);
        values[j] *= scale;
        values[j + 2] *= scale;
      }
      write(half, in_half, values);
    }
  }

  // Clears the flags of the published stats, once all warps have read them.
  __device__ __forceinline__ void clear_stats_flags() const {
    for (int i = warp * 32 + lane; i < work_tile.num_splits << shape.row_shift;
         i += 128 * kConsumers) {
      clear_flag(stats_of(0, i));
    }
  }

 private:
  // Returns the final scale of a row's output. If `writes`, it also writes the row's log-sum-exp.
  __device__ __forceinline__ float finish_row(int row, float row_max, float sum,
                                              bool writes) const {
    if (row >= rows.count) return 0.0f;
    const QueryRow query_row = query_row_of(shape, work_tile, rows, row);
    const RowResult result = row_result(p, work_tile.kv_head, query_row.head, row_max, sum);
    if (p.lse != nullptr && writes) {
      p.lse[(work_tile.sequence.first_query + query_row.token) * int64_t{p.num_heads} +
            query_row.head] = result.lse;
    }
    return result.scale;
  }
  __device__ __forceinline__ float2 row_pair(const float* of_rows, int t) const {
    return *reinterpret_cast<const float2*>(&of_rows[Mma::row_of(lane, t, 0)]);
  }
  // Explicit roundings, for the same reason as in RowState.
  static __device__ __forceinline__ void add(float (&values)[4], float2 weight, float4 out) {
    values[0] = __fmaf_rn(weight.x, out.x, values[0]);
    values[1] = __fmaf_rn(weight.y, out.y, values[1]);
    values[2] = __fmaf_rn(weight.x, out.z, values[2]);
    values[3] = __fmaf_rn(weight.y, out.w, values[3]);
  }
  // Addresses in the workspace.
  __device__ __forceinline__ const SplitPartials& results() const {
    return work_tile.flag_in_data ? workspace.flagged : workspace.by_semaphore;
  }
  __device__ __forceinline__ float4* outs_of(int split, int half, int i) const {
    const int64_t slot = static_cast<int64_t>(work_tile.slot + split) << shape.row_shift;
    const int index = (half * tiles * 4 + i) * 32 + lane;
    return reinterpret_cast<float4*>(&results().out[slot * (Mma::kHalves * 64) + index * 4]);
  }
  __device__ __forceinline__ float2* stats_of(int split, int row) const {
    const int64_t slot = static_cast<int64_t>(work_tile.slot + split) << shape.row_shift;
    return &results().stats[slot + row];
  }

  // Writes fragment i = 4 t + (16-dimension group) of half a head, final values.
  __device__ __forceinline__ void write(int half, int i, const float (&values)[4]) const {
    if (p.dtype == DType::kFloat16) {
      write<__half>(half, i, values);
    } else {
      write<__nv_bfloat16>(half, i, values);
    }
  }
  template <typename T>
  __device__ __forceinline__ void write(int half, int i, const float (&values)[4]) const {
    // [dimensions][rows] -> [rows][dimensions].
    const uint32_t low = transpose_matrix(pack2<T>(values[0], values[1]));
    const uint32_t high = transpose_matrix(pack2<T>(values[2], values[3]));
    const int64_t row_start = stats.out[i / 4 * 8 + lane / 4];
    const int d = (half * 4 + i % 4) * 16;
    if (row_start < 0 || d >= p.kv.head_size) return;
    char* to = static_cast<char*>(p.out) + 2 * (row_start + d);
    if constexpr (Mma::kRows && !Mma::kCacheIs16Bit) {  // even dimensions, then odd ones
      const uint2 four = {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
      *reinterpret_cast<uint2*>(to + lane % 4 * 8) = four;
    } else {
      *reinterpret_cast<uint32_t*>(to + lane % 4 * 4) = low;
      if (d + 8 < p.kv.head_size) *reinterpret_cast<uint32_t*>(to + 16 + lane % 4 * 4) = high;
    }
  }
};

template <typename Mma>
__device__ __forceinline__ void end_tile(const DecodeWgmmaEpilogue<Mma>& end, Mma& mma,
                                         const ConsumersBarrier& barrier, int thread) {
  const WorkTile& work_tile = end.work_tile;
  mma.store_stats(end.stats.row_maxima[mma.consumer], end.stats.sums[mma.consumer], thread,
                  end.lane);
  const uint32_t mine = end.scratch + mma.consumer * mma.tiles * 128 * 16;
  barrier.sync<0>();  // all warps have read the query and P operands
  end.merge_stats();
  mma.template store_half<0>(mine, thread);
  barrier.sync<1>();
  end.combine_consumers(0);
  if constexpr (Mma::kHalves == 2) {
    barrier.sync<0>();
    mma.template store_half<1>(mine, thread);
    barrier.sync<1>();
    end.combine_consumers(1);
  }
  if (work_tile.num_splits == 1) return;
  if (work_tile.flag_in_data) {
    if (work_tile.split + 1 != work_tile.num_splits) return;
    end.combine_splits();
    barrier.sync<0>();
    end.clear_stats_flags();
    barrier.sync<1>();
    return;
  }
  barrier.sync<0>();
  if (end.warp == 0 && end.lane == 0) {
    end.is_last = atomic_inc_acquire_release(&end.workspace.semaphores[work_tile.slot],
                                             work_tile.num_splits - 1) ==
                  static_cast<uint32_t>(work_tile.num_splits - 1);
  }
  barrier.sync<1>();
  if (end.is_last) end.combine_splits();
}

#endif

}  // namespace vllm_kernels::cuda
