// The end of an item of decode_wgmma_kernel.cuh, where its teams meet.
//
// They put their results down, half a head at a time, and merge them, each warp some fragments of
// 16 dimensions x 8 rows. They are written as output where the item is a whole segment, else to the
// workspace, where the segment's last block to finish, or that of its last piece
// (split_exchange.cuh), merges all pieces in order.
#pragma once
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/split_exchange.cuh"
#include "cuda/attention/common/workspace.h"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/attention/decode/warpgroup_mma.cuh"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Where the warps of all teams wait for each other: an mbarrier of as many arrivals. (What a named
// barrier of these warps orders is a hazard to compute-sanitizer's racecheck.) An item has an even
// number of these meetings (two at its start), so that each has a parity of its own.
struct TeamsBarrier {
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

// What the teams know of an item's rows at its end.
template <int kTeams, int kMaxRows>
struct TeamStats {
  float maxima[kTeams][kMaxRows];  // then the weights of the teams' results
  float sums[kTeams][kMaxRows];
  int64_t out[kMaxRows];  // the row's place in out, in elements; -1: none
};

// The end of an item, by all teams. A warp merges fragments as the products leave them: a lane has
// rows 2 (lane % 4) + j of tile t, of dimensions dimension_of(lane, k, 0) and (.., 1), as values j
// and j + 2.
template <typename Tile>
struct TeamEnd {
  static constexpr int kTeams = Tile::kTeams;
  const PagedAttentionParams& p;
  const WorkShape& shape;
  const DecodeWorkspace& workspace;
  const WorkItem& item;
  const ItemRows& rows;
  TeamStats<kTeams, Tile::kTiles * 8>& stats;
  bool& is_last;
  uint32_t scratch;  // shared memory: [kTeams][tiles][128] of 16 bytes
  int tiles;
  int warp, lane;

  // Of the teams' maxima and sums, a thread each row.
  __device__ __forceinline__ void merge_stats() const {
    const int row = warp * 32 + lane;
    if (row >= tiles * 8) return;
    float maximum = stats.maxima[0][row], sum = 0.0f;
#pragma unroll
    for (int team = 1; team < kTeams; ++team) maximum = fmaxf(maximum, stats.maxima[team][row]);
    float weights[kTeams];
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      weights[team] = exp2_approx(stats.maxima[team][row] - maximum);
      sum = __fmaf_rn(weights[team], stats.sums[team][row], sum);
    }
    float scale = 1.0f;
    if (item.pieces == 1) {
      scale = finish_row(row, maximum, sum, true);
    } else if (item.posts) {
      post(stats_of(item.piece, row), {maximum, sum});
    } else {
      *stats_of(item.piece, row) = {maximum, sum};
    }
    const RowPlace place = place_of_row(shape, item, rows, row);
    stats.out[row] = row >= rows.count ? -1
                                       : (item.sequence.first_query + place.token) * p.out_stride +
                                             static_cast<int64_t>(place.head) * p.kv.head_size;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) stats.maxima[team][row] = weights[team] * scale;
  }

  // Half a head of the teams, which lies in `scratch`.
  __device__ __forceinline__ void merge_teams(int half) const {
#pragma unroll 1
    for (int i = warp; i < tiles * 4; i += 4 * kTeams) {
      float values[4] = {};
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        const float4 out = load_shared<float4>(scratch + ((team * tiles * 4 + i) * 32 + lane) * 16);
        add(values, row_pair(stats.maxima[team], i / 4), out);
      }
      if (item.pieces == 1) {
        write(half, i, values);
      } else if (item.posts) {
        post(outs_of(item.piece, half, i), {values[0], values[1], values[2], values[3]});
      } else {
        *outs_of(item.piece, half, i) = {values[0], values[1], values[2], values[3]};
      }
    }
  }

  // All pieces of the segment, from the workspace.
  __device__ __forceinline__ void merge_pieces() const {
#pragma unroll 1
    for (int i = warp; i < Tile::kHalves * tiles * 4; i += 4 * kTeams) {
      const int half = i / (tiles * 4), in_half = i % (tiles * 4);
      const int row = Tile::row_of(lane, in_half / 4, 0);
      float maximum[2] = {kNoMaximum, kNoMaximum}, sum[2] = {}, values[4] = {};
      constexpr int kBatch = Tile::kTiles == 8 ? 4 : 8;  // pieces under way, as registers allow
#pragma unroll 1
      for (int first = 0; first < item.pieces; first += kBatch) {
        float4 pairs[kBatch], outs[kBatch];
        bool all_there;
#pragma unroll 1
        do {
          all_there = true;
          const int begin = in_register(first);  // keeps no addresses
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            const int piece = min(begin + b, item.pieces - 1);
            // As they were posted.
            const float2 first_row = load_relaxed(stats_of(piece, row));
            const float2 second_row = load_relaxed(stats_of(piece, row + 1));
            pairs[b] = {first_row.x, first_row.y, second_row.x, second_row.y};
            outs[b] = load_relaxed(outs_of(piece, half, in_half));
          }
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            all_there &= is_posted(pairs[b].x) & is_posted(pairs[b].z) & is_posted(outs[b].x);
          }
          // All lanes at once: parted ones would meet neither in write() nor at the next barrier.
        } while (item.posts && !__all_sync(0xffffffffu, all_there));
        float updated[2] = {maximum[0], maximum[1]};
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          updated[0] = fmaxf(updated[0], pairs[b].x);
          updated[1] = fmaxf(updated[1], pairs[b].z);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float factor = exp2_approx(maximum[j] - updated[j]);
          maximum[j] = updated[j];
          sum[j] = __fmul_rn(sum[j], factor);
          values[j] = __fmul_rn(values[j], factor);
          values[j + 2] = __fmul_rn(values[j + 2], factor);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          // The weight of nothing is 0: a branch would make the loads wait for one another.
          const bool there = first + b < item.pieces;
          const float2 weight = {there ? exp2_approx(pairs[b].x - maximum[0]) : 0.0f,
                                 there ? exp2_approx(pairs[b].z - maximum[1]) : 0.0f};
          sum[0] = __fmaf_rn(weight.x, pairs[b].y, sum[0]);
          sum[1] = __fmaf_rn(weight.y, pairs[b].w, sum[1]);
          const float4 out = outs[b];  // times 0 it may be NaN
          add(values, weight,
              {there ? out.x : 0.0f, there ? out.y : 0.0f, there ? out.z : 0.0f,
               there ? out.w : 0.0f});
        }
        if (item.posts) {
          const int begin = in_register(first);
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            take_back(outs_of(min(begin + b, item.pieces - 1), half, in_half));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scale = finish_row(row + j, maximum[j], sum[j], i % 4 == 0 && lane < 4);
        values[j] *= scale;
        values[j + 2] *= scale;
      }
      write(half, in_half, values);
    }
  }

  // Where maxima were posted: zeros, once all have read them.
  __device__ __forceinline__ void take_stats_back() const {
    for (int i = warp * 32 + lane; i < item.pieces << shape.row_shift; i += 128 * kTeams) {
      take_back(stats_of(0, i));
    }
  }

 private:
  // The scale of a row's output, of all tokens; where asked to it writes its log-sum-exp.
  __device__ __forceinline__ float finish_row(int row, float maximum, float sum,
                                              bool writes) const {
    if (row >= rows.count) return 0.0f;
    const RowPlace place = place_of_row(shape, item, rows, row);
    const RowResult result = row_result(p, item.kv_head, place.head, maximum, sum);
    if (p.lse != nullptr && writes) {
      p.lse[(item.sequence.first_query + place.token) * int64_t{p.num_heads} + place.head] =
          result.lse;
    }
    return result.scale;
  }
  __device__ __forceinline__ float2 row_pair(const float* of_rows, int t) const {
    return *reinterpret_cast<const float2*>(&of_rows[Tile::row_of(lane, t, 0)]);
  }
  // Roundings are spelt out, as RowState's are, and for its reason.
  static __device__ __forceinline__ void add(float (&values)[4], float2 weight, float4 out) {
    values[0] = __fmaf_rn(weight.x, out.x, values[0]);
    values[1] = __fmaf_rn(weight.y, out.y, values[1]);
    values[2] = __fmaf_rn(weight.x, out.z, values[2]);
    values[3] = __fmaf_rn(weight.y, out.w, values[3]);
  }
  // In the workspace.
  __device__ __forceinline__ const PieceResults& results() const {
    return item.posts ? workspace.posted : workspace.counted;
  }
  __device__ __forceinline__ float4* outs_of(int piece, int half, int i) const {
    const int64_t slot = static_cast<int64_t>(item.slot + piece) << shape.row_shift;
    const int place = (half * tiles * 4 + i) * 32 + lane;
    return reinterpret_cast<float4*>(&results().out[slot * (Tile::kHalves * 64) + place * 4]);
  }
  __device__ __forceinline__ float2* stats_of(int piece, int row) const {
    const int64_t slot = static_cast<int64_t>(item.slot + piece) << shape.row_shift;
    return &results().stats[slot + row];
  }

  // Fragment i = 4 t + member of half a head, final.
  __device__ __forceinline__ void write(int half, int i, const float (&values)[4]) const {
    if (p.dtype == DType::kFloat16) {
      write<__half>(half, i, values);
    } else {
      write<__nv_bfloat16>(half, i, values);
    }
  }
  template <typename T>
  __device__ __forceinline__ void write(int half, int i, const float (&values)[4]) const {
    // Dimensions x rows -> rows x dimensions.
    const uint32_t low = transpose_matrix(pack2<T>(values[0], values[1]));
    const uint32_t high = transpose_matrix(pack2<T>(values[2], values[3]));
    const int64_t row_start = stats.out[i / 4 * 8 + lane / 4];
    const int d = (half * 4 + i % 4) * 16;
    if (row_start < 0 || d >= p.kv.head_size) return;
    char* to = static_cast<char*>(p.out) + 2 * (row_start + d);
    if constexpr (Tile::kRows && !Tile::kWide) {  // even dimensions, odd dimensions
      const uint2 four = {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
      *reinterpret_cast<uint2*>(to + lane % 4 * 8) = four;
    } else {
      *reinterpret_cast<uint32_t*>(to + lane % 4 * 4) = low;
      if (d + 8 < p.kv.head_size) *reinterpret_cast<uint32_t*>(to + 16 + lane % 4 * 4) = high;
    }
  }
};

template <typename Tile>
__device__ __forceinline__ void finish_item(const TeamEnd<Tile>& end, Tile& tile,
                                            const TeamsBarrier& barrier, int thread) {
  const WorkItem& item = end.item;
  tile.store_stats(end.stats.maxima[tile.team], end.stats.sums[tile.team], thread, end.lane);
  const uint32_t mine = end.scratch + tile.team * tile.tiles * 128 * 16;
  barrier.sync<0>();  // the operands have been read
  end.merge_stats();
  tile.template store_half<0>(mine, thread);
  barrier.sync<1>();
  end.merge_teams(0);
  if constexpr (Tile::kHalves == 2) {
    barrier.sync<0>();
    tile.template store_half<1>(mine, thread);
    barrier.sync<1>();
    end.merge_teams(1);
  }
  if (item.pieces == 1) return;
  if (item.posts) {
    if (item.piece + 1 != item.pieces) return;
    end.merge_pieces();
    barrier.sync<0>();
    end.take_stats_back();
    barrier.sync<1>();
    return;
  }
  barrier.sync<0>();
  if (end.warp == 0 && end.lane == 0) {
    end.is_last = atomic_inc_acquire_release(&end.workspace.finished[item.slot], item.pieces - 1) ==
                  static_cast<uint32_t>(item.pieces - 1);
  }
  barrier.sync<1>();
  if (end.is_last) end.merge_pieces();
}

#endif

}  // namespace vllm_kernels::cuda
