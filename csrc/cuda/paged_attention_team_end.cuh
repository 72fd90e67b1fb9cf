// The end of an item of paged_attention_team.cuh: what its teams have becomes one result.
//
// It goes from team to team, in the order in which they take their last stages, so that none waits
// for more than a part of another's step: each adds what the one before it hands over, thread by
// thread, and goes on to the next item; the last writes the sum. That is the output where the item
// is a whole segment, else it goes to the workspace, and all teams of the segment's last block to
// finish merge its pieces in order.
#pragma once
#include "cuda/attention_team.cuh"
#include "cuda/paged_attention_items.cuh"
#include "cuda/paged_attention_workspace.h"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Where teams wait for each other, in shared memory.
template <int kTeams>
struct TeamBarriers {
  uint64_t given[kTeams - 1], taken[kTeams - 1];  // [place of the giver]
  uint64_t counted;                               // is_last is known, of a segment of pieces

  // One thread.
  __device__ __forceinline__ void init() {
    for (int place = 0; place < kTeams - 1; ++place) {
      barrier_init(shared_address(&given[place]), 4 * kWarpArrivals);
      barrier_init(shared_address(&taken[place]), 4 * kWarpArrivals);
    }
    barrier_init(shared_address(&counted), 1);
  }
};

// What an item's last team knows of its rows.
template <int kMaxRows>
struct TeamRows {
  float scales[kMaxRows];  // of the results
  int64_t out[kMaxRows];   // the row's place in out, in elements; -1: none
};

// The end of an item. A lane has rows 2 (lane % 4) + j of tile t, of dimensions
// dimension_of(lane, k, 0) and (.., 1), as values j and j + 2, as the products leave them.
template <typename Tile>
struct TeamEnd {
  static constexpr int kTeams = Tile::kTeams;
  const PagedAttentionParams& p;
  const WorkShape& shape;
  const DecodeWorkspace& workspace;
  const WorkItem& item;
  const ItemRows& rows;
  TeamRows<Tile::kTiles * 8>& of_rows;
  bool& is_last;
  int tiles;
  int warp, lane;  // of all teams

  // The sum of all teams, which `tile` has, to the output or the workspace. All of its team.
  __device__ __forceinline__ void write_sum(Tile& tile, int thread) const {
    const float2 stats = tile.row_stats(thread, lane);
    if (thread < tiles * 8) {
      const int row = thread;
      const RowPlace place = place_of_row(shape, item, rows, row);
      of_rows.out[row] = row >= rows.count
                             ? -1
                             : (item.sequence.first_query + place.token) * p.out_stride +
                                   static_cast<int64_t>(place.head) * p.kv.head_size;
      if (item.pieces == 1) {
        of_rows.scales[row] = finish_row(row, stats.x, stats.y, true);
      } else {
        *stats_of(item.piece, row) = stats;
      }
    }
    tile.team_barrier();
#pragma unroll
    for (int t = 0; t < Tile::kTiles; ++t) {
      if (t >= tiles) continue;
      const int i = 4 * t + tile.member;
      if (item.pieces > 1) {
#pragma unroll
        for (int half = 0; half < Tile::kHalves; ++half) {
          const float (&out)[4] = tile.out[half][t];
          *outs_of(item.piece, half, i) = {out[0], out[1], out[2], out[3]};
        }
        continue;
      }
      const float2 scale =
          *reinterpret_cast<const float2*>(&of_rows.scales[Tile::row_of(lane, t, 0)]);
#pragma unroll
      for (int half = 0; half < Tile::kHalves; ++half) {
        const float (&out)[4] = tile.out[half][t];
        write(half, i, {out[0] * scale.x, out[1] * scale.y, out[2] * scale.x, out[3] * scale.y});
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
      constexpr int kBatch = 8;  // pieces under way
#pragma unroll 1
      for (int first = 0; first < item.pieces; first += kBatch) {
        float4 pairs[kBatch], outs[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int piece = min(first + b, item.pieces - 1);
          pairs[b] = __ldcg(reinterpret_cast<const float4*>(stats_of(piece, row)));
          outs[b] = __ldcg(outs_of(piece, half, in_half));
        }
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
          sum[j] *= factor;
          values[j] *= factor;
          values[j + 2] *= factor;
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          // The weight of nothing is 0: a branch would make the loads wait for one another.
          const bool there = first + b < item.pieces;
          const float2 weight = {there ? exp2_approx(pairs[b].x - maximum[0]) : 0.0f,
                                 there ? exp2_approx(pairs[b].z - maximum[1]) : 0.0f};
          sum[0] += weight.x * pairs[b].y;
          sum[1] += weight.y * pairs[b].w;
          const float4 out = outs[b];  // times 0 it may be NaN
          add(values, weight,
              {there ? out.x : 0.0f, there ? out.y : 0.0f, there ? out.z : 0.0f,
               there ? out.w : 0.0f});
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
  static __device__ __forceinline__ void add(float (&values)[4], float2 weight, float4 out) {
    values[0] += weight.x * out.x;
    values[1] += weight.y * out.y;
    values[2] += weight.x * out.z;
    values[3] += weight.y * out.w;
  }
  // In the workspace.
  __device__ __forceinline__ float4* outs_of(int piece, int half, int i) const {
    const int64_t slot = static_cast<int64_t>(item.slot + piece) << shape.row_shift;
    const int place = (half * tiles * 4 + i) * 32 + lane;
    return reinterpret_cast<float4*>(&workspace.out[slot * (Tile::kHalves * 64) + place * 4]);
  }
  __device__ __forceinline__ float2* stats_of(int piece, int row) const {
    const int64_t slot = static_cast<int64_t>(item.slot + piece) << shape.row_shift;
    return &workspace.stats[slot + row];
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
    const int64_t row_start = of_rows.out[i / 4 * 8 + lane / 4];
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

// The end of the block's item `number`, by all teams; `splits`: items before it that were pieces.
template <typename Tile>
__device__ __forceinline__ void finish_item(const TeamEnd<Tile>& end, Tile& tile,
                                            TeamBarriers<Tile::kTeams>& barriers, uint32_t number,
                                            uint32_t& splits, int thread) {
  constexpr int kTeams = Tile::kTeams;
  const WorkItem& item = end.item;
  // In the order of their last stages.
  const int place = (tile.team - item.stages % kTeams + kTeams) % kTeams;
  const uint32_t round = number * Tile::kRounds;
  if (place > 0) {
    tile.take(tile.weights_of((tile.team + kTeams - 1) % kTeams),
              shared_address(&barriers.given[place - 1]),
              shared_address(&barriers.taken[place - 1]), round, thread);
  }
  if (place < kTeams - 1) {
    tile.give(shared_address(&barriers.given[place]), shared_address(&barriers.taken[place]), round,
              thread);
  } else {
    end.write_sum(tile, thread);
  }
  if (item.pieces == 1) return;
  if (place == kTeams - 1) {
    tile.team_barrier();
    if (thread == 0) {
      end.is_last =
          atomic_inc_acquire_release(&end.workspace.finished[item.slot], item.pieces - 1) ==
          static_cast<uint32_t>(item.pieces - 1);
      barrier_arrive(shared_address(&barriers.counted));
    }
  }
  barrier_wait(shared_address(&barriers.counted), splits & 1);
  ++splits;
  if (end.is_last) end.merge_pieces();
}

#endif

}  // namespace vllm_kernels::cuda
