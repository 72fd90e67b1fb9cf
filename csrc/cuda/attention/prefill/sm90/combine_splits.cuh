// Work tiles of prefill sm90 whose keys several CTAs share (PrefillTile::splits). Each stores its
// output, relative to the highest score of each row, in the workspace. The last one to finish adds
// all up, in order. So the result depends on the number of splits alone.
//
// Bytes of a split: 4 for each row and dimension, written once and read once, from L2.
#pragma once
#include "cuda/attention/common/warpgroup_barrier.cuh"
#include "cuda/attention/prefill/sm90/mainloop.cuh"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Where a row of the result goes.
template <typename T>
struct PrefillRow {
  T* to;
  int head_size;  // 0: nowhere
  float scale;
};

// c + a * b where `is_there`, else c. Without a branch, behind which ptxas would put the loads of
// b.
__device__ __forceinline__ float fma_if(bool is_there, float a, float b, float c) {
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "@p fma.rn.f32 %0, %1, %2, %0;\n"
      "}"
      : "+f"(c)
      : "f"(a), "f"(b), "r"(static_cast<int>(is_there)));
  return c;
}

// The end of a split, for a thread: two of the 64 rows of its consumer warpgroup.
template <typename Config>
struct SplitEnd {
  using Mma = PrefillMma<Config>;
  using T = typename Config::T;
  static constexpr int kConsumers = Config::kConsumers, kOutTiles = Mma::kOutTiles;
  // From a split to the next, in units of stats and out.
  static constexpr int kStatsStep = kConsumers * 64, kOutStep = kConsumers * kOutTiles * 128;
  // Splits whose loads are in flight, and their groups of 8 dimensions. Registers limit them.
  static constexpr int kSplits = kConsumers > 2 ? 2 : 4, kAhead = kConsumers > 2 ? 1 : 4;

  const PrefillSplits& shape;
  const PrefillTile& work_tile;
  // The main loop has no registers left for addresses, which the compiler would keep. So they are
  // those of an opaque thread index.
  int index = opaque(static_cast<int>(threadIdx.x));

  __device__ __forceinline__ int lane() const { return index % 32; }
  __device__ __forceinline__ int slot_of(int split) const {
    return (work_tile.slot + split) * kConsumers + index / 128;
  }
  __device__ __forceinline__ float2* stats_of(int split) const {  // of row 1: 8 behind
    return shape.partials.stats + slot_of(split) * 64 + index % 128 / 32 * 16 + lane() / 4;
  }
  __device__ __forceinline__ float4* out_of(int split) const {  // [8 dimensions][thread]
    return reinterpret_cast<float4*>(shape.partials.out) +
           int64_t{slot_of(split)} * (kOutTiles * 128) + index % 128;
  }

  __device__ __forceinline__ void store(const Mma& tile, const float (&row_max)[2],
                                        const float (&sum)[2]) const {
    if (lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) stats_of(work_tile.split)[8 * r] = {row_max[r], sum[r]};
    }
    float4* mine = out_of(work_tile.split);
#pragma unroll
    for (int i = 0; i < kOutTiles; ++i) {
      mine[i * 128] = {tile.out[i][0], tile.out[i][1], tile.out[i][2], tile.out[i][3]};
    }
  }
  // Whether the warpgroups of all other splits have stored theirs.
  __device__ __forceinline__ bool is_last() const {
    const int warpgroup = index / 128;
    warpgroup_any<kConsumers>(warpgroup, false);
    bool last = false;
    if (index % 128 == 0) {
      const uint32_t others = work_tile.splits - 1;
      last = atomic_inc_acquire_release(&shape.semaphores[slot_of(0)], others) == others;
    }
    return warpgroup_any<kConsumers>(warpgroup, last);
  }
  // The highest score of each row, and the sum of its weights, of all splits.
  __device__ __forceinline__ void add_stats(float (&highest)[2], float (&total)[2]) const {
    constexpr int kSplits = 8;  // whose loads are in flight
    const float2* from = stats_of(0);
#pragma unroll 1
    for (int first = 0; first < work_tile.splits; first += kSplits) {
      float2 stats[kSplits][2];
#pragma unroll
      for (int j = 0; j < kSplits; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          stats[j][r] = __ldcg(from + min(first + j, work_tile.splits - 1) * kStatsStep + 8 * r);
        }
      }
#pragma unroll
      for (int j = 0; j < kSplits; ++j) {
        const bool is_there = first + j < work_tile.splits;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float max = is_there ? stats[j][r].x : kRowMaxInit;
          const float factor = update_row_max(highest[r], fmaxf(highest[r], max));
          const float now = is_there ? stats[j][r].y * exp2_approx(max - highest[r]) : 0.0f;
          total[r] = fmaf(total[r], factor, now);
        }
      }
    }
  }
  // Of all splits: kAhead groups of 8 dimensions, relative to `highest`.
  __device__ __forceinline__ void add_out(int first, const float (&highest)[2],
                                          float4 (&sums)[kAhead]) const {
    const float2* stats = stats_of(0);
    const float4* out = out_of(0) + first * 128;
#pragma unroll 1
    for (int first_split = 0; first_split < work_tile.splits; first_split += kSplits) {
      float weights[kSplits][2];
      float4 partials[kSplits][kAhead];
#pragma unroll
      for (int j = 0; j < kSplits; ++j) {
        const int split = min(first_split + j, work_tile.splits - 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) weights[j][r] = __ldcg(stats + split * kStatsStep + 8 * r).x;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) partials[j][i] = __ldcg(out + split * kOutStep + i * 128);
      }
#pragma unroll
      for (int j = 0; j < kSplits; ++j) {
        const bool is_there = first_split + j < work_tile.splits;
#pragma unroll
        for (int r = 0; r < 2; ++r) weights[j][r] = exp2_approx(weights[j][r] - highest[r]);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          sums[i].x = fma_if(is_there, weights[j][0], partials[j][i].x, sums[i].x);
          sums[i].y = fma_if(is_there, weights[j][0], partials[j][i].y, sums[i].y);
          sums[i].z = fma_if(is_there, weights[j][1], partials[j][i].z, sums[i].z);
          sums[i].w = fma_if(is_there, weights[j][1], partials[j][i].w, sums[i].w);
        }
      }
    }
  }
  // `permutation`: see ValueBoxes.
  __device__ __forceinline__ void write(const PrefillRow<T> (&rows)[2], int group, int permutation,
                                        const float4& sums) const {
    const int swaps = group & permutation;
    const int dim = group * 8 + (lane() % 4 * 2 ^ (swaps & 2));
    const float pairs[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (dim >= rows[r].head_size) continue;
      const uint32_t pair = pack2<T>(pairs[r][0] * rows[r].scale, pairs[r][1] * rows[r].scale);
      *reinterpret_cast<uint32_t*>(rows[r].to + dim) =
          (swaps & 1) != 0 ? __byte_perm(pair, 0, 0x1032) : pair;
    }
  }
};

// Ends a split, for a consumer warpgroup. row_max and sum are of whole rows. end_row(r, row_max,
// sum, store) calls store(to, head_size, scale) for row r of the thread.
template <typename Config, typename EndRow>
__device__ __forceinline__ void end_split(const PrefillSplits& shape, const PrefillTile& work_tile,
                                          const PrefillMma<Config>& tile, const float (&row_max)[2],
                                          const float (&sum)[2], int permutation,
                                          const EndRow& end_row) {
  using End = SplitEnd<Config>;
  using T = typename Config::T;
  const End end{shape, work_tile};
  end.store(tile, row_max, sum);
  if (!end.is_last()) return;
  float highest[2] = {kRowMaxInit, kRowMaxInit}, total[2] = {0.0f, 0.0f};
  end.add_stats(highest, total);
  PrefillRow<T> rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    end_row(r, highest[r], total[r],
            [&](T* to, int head_size, float scale) { rows[r] = {to, head_size, scale}; });
  }
#pragma unroll 1
  for (int first = 0; first < End::kOutTiles; first += End::kAhead) {
    float4 sums[End::kAhead] = {};
    end.add_out(first, highest, sums);
#pragma unroll
    for (int i = 0; i < End::kAhead; ++i) end.write(rows, first + i, permutation, sums[i]);
  }
}

#endif

}  // namespace vllm_kernels::cuda
