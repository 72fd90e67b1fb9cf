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

// Hands what a team knows to the same threads of another one, at most `kBatch` units of 16 bytes a
// thread at a time, in the place of the giver's weights: rounds that `given` and `taken`, barriers
// of 4 warps each, begin and end.
template <typename Tile>
struct Handover {
  static constexpr int kBatch = 4;
  static constexpr uint32_t kRounds = (Tile::kUnits + kBatch - 1) / kBatch;
  uint32_t storage;  // of the giver
  uint32_t given, taken;
  uint32_t round;  // number of the first one

  __device__ __forceinline__ void give(const Tile& tile, int thread) const {
    tile.team_barrier();  // no warp reads weights any more
#pragma unroll
    for (int batch = 0; batch < kRounds; ++batch) {
      each_unit(tile, batch, [&](int unit, int b) {
        store_shared(storage + (b * 128 + thread) * 16, tile.unit(unit));
      });
      barrier_arrive_warp(given, thread % 32);
      barrier_wait(taken, round + batch & 1);
    }
  }
  __device__ __forceinline__ void take(Tile& tile, int thread) const {
#pragma unroll
    for (int batch = 0; batch < kRounds; ++batch) {
      barrier_wait(given, round + batch & 1);
      each_unit(tile, batch, [&](int unit, int b) {
        tile.add_unit(unit, load_shared<float4>(storage + (b * 128 + thread) * 16));
      });
      barrier_arrive_warp(taken, thread % 32);
    }
  }

 private:
  template <typename Action>
  static __device__ __forceinline__ void each_unit(const Tile& tile, int batch,
                                                   const Action& action) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int unit = batch * kBatch + b;
      if (unit < Tile::kUnits && tile.has_unit(unit)) action(unit, b);
    }
  }
};

// The end of an item, whose results are fragments as the products leave them: 4 values of a lane,
// of two rows.
template <typename Tile>
struct TeamEnd {
  static constexpr int kTeams = Tile::kTeams;
  const PagedAttentionParams& p;
  const WorkShape& shape;
  const DecodeWorkspace& workspace;
  const WorkItem& item;
  const ItemRows& rows;
  TeamRows<Tile::kMaxRows>& of_rows;
  bool& is_last;
  int warp, lane;  // of all teams

  // The sum of all teams, which `tile` has, to the output or the workspace. All of its team.
  __device__ __forceinline__ void write_sum(Tile& tile, int thread) const {
    const float2 stats = tile.row_stats(thread, lane);
    if (thread < tile.rows_in_use()) {
      const int row = thread;
      const RowPlace place = place_of_row(shape, item, rows, row);
      of_rows.out[row] = row >= rows.count
                             ? -1
                             : (item.sequence.first_query + place.token) * p.out_stride +
                                   static_cast<int64_t>(place.head) * p.kv.head_size;
      if (item.pieces == 1) {
        of_rows.scales[row] = finish_row(row, stats.x, stats.y, true);
      } else {
        *stats_of(item.piece, Tile::place_of_stats(row)) = stats;
      }
    }
    tile.team_barrier();
    tile.each_fragment([&](int f, const float (&out)[4]) {
      if (item.pieces > 1) {
        *outs_of(item.piece, f) = {out[0], out[1], out[2], out[3]};
        return;
      }
      float values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[j] = out[j] * of_rows.scales[tile.fragment_row(lane, f, Tile::pair_of(j))];
      }
      write(tile, f, values);
    });
  }

  // All pieces of the segment, from the workspace.
  __device__ __forceinline__ void merge_pieces(const Tile& tile) const {
#pragma unroll 1
    for (int f = warp; f < tile.fragments(); f += 4 * kTeams) {
      const int pair = Tile::place_of_stats(tile.fragment_row(lane, f, 0));
      float maximum[2] = {kNoMaximum, kNoMaximum}, sum[2] = {}, values[4] = {};
      constexpr int kBatch = 8;  // pieces under way
#pragma unroll 1
      for (int first = 0; first < item.pieces; first += kBatch) {
        float4 pairs[kBatch], outs[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int piece = min(first + b, item.pieces - 1);
          pairs[b] = __ldcg(reinterpret_cast<const float4*>(stats_of(piece, pair)));
          outs[b] = __ldcg(outs_of(piece, f));
        }
        float updated[2] = {maximum[0], maximum[1]};
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          updated[0] = fmaxf(updated[0], pairs[b].x);
          updated[1] = fmaxf(updated[1], pairs[b].z);
        }
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          factor[j] = exp2_approx(maximum[j] - updated[j]);
          maximum[j] = updated[j];
          sum[j] *= factor[j];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] *= factor[Tile::pair_of(j)];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          // The weight of nothing is 0: a branch would make the loads wait for one another.
          const bool there = first + b < item.pieces;
          const float weight[2] = {there ? exp2_approx(pairs[b].x - maximum[0]) : 0.0f,
                                   there ? exp2_approx(pairs[b].z - maximum[1]) : 0.0f};
          sum[0] += weight[0] * pairs[b].y;
          sum[1] += weight[1] * pairs[b].w;
          const float out[4] = {outs[b].x, outs[b].y, outs[b].z, outs[b].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {  // times 0 it may be NaN
            values[j] += weight[Tile::pair_of(j)] * (there ? out[j] : 0.0f);
          }
        }
      }
      float scale[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scale[j] = finish_row(tile.fragment_row(lane, f, j), maximum[j], sum[j],
                              tile.first_of_rows(lane, f));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] *= scale[Tile::pair_of(j)];
      write(tile, f, values);
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
  // In the workspace.
  __device__ __forceinline__ float4* outs_of(int piece, int f) const {
    const int64_t slot = static_cast<int64_t>(item.slot + piece) << shape.row_shift;
    return reinterpret_cast<float4*>(&workspace.out[slot * Tile::kMaxHead + (f * 32 + lane) * 4]);
  }
  __device__ __forceinline__ float2* stats_of(int piece, int place) const {
    const int64_t slot = static_cast<int64_t>(item.slot + piece) << shape.row_shift;
    return &workspace.stats[slot + place];
  }
  // Fragment f, final.
  __device__ __forceinline__ void write(const Tile& tile, int f, const float (&values)[4]) const {
    if (p.dtype == DType::kFloat16) {
      tile.write_fragment(static_cast<__half*>(p.out), of_rows.out, f, values, lane);
    } else {
      tile.write_fragment(static_cast<__nv_bfloat16*>(p.out), of_rows.out, f, values, lane);
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
  const auto handover = [&](int giver_place, int giver) {
    return Handover<Tile>{.storage = tile.storage_of(giver),
                          .given = shared_address(&barriers.given[giver_place]),
                          .taken = shared_address(&barriers.taken[giver_place]),
                          .round = number * Handover<Tile>::kRounds};
  };
  if (place > 0) handover(place - 1, (tile.team + kTeams - 1) % kTeams).take(tile, thread);
  if (place < kTeams - 1) {
    handover(place, tile.team).give(tile, thread);
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
  if (end.is_last) end.merge_pieces(tile);
}

#endif

}  // namespace vllm_kernels::cuda
