// Work tiles of prefill sm90 whose keys several CTAs share (SplitTile::splits). Each stores its
// output, relative to the highest score of each row, in the workspace. A second launch adds all up,
// in order. So the result depends on the number of splits alone.
//
// Bytes of a split: 4 for each row and dimension, written once and read once, from L2.
#pragma once
#include <mutex>

#include "cuda/attention/prefill/tile_scheduler.cuh"
#include "cuda/base/ptx.cuh"

namespace vllm_kernels::cuda {

// The results of a consumer warpgroup, which has 64 rows of a work tile.
struct SplitShape {
  int groups;       // of 8 dimensions
  int permutation;  // see ValueBoxes
};

// What thread `thread` of a warpgroup has of a split: two rows, 8 apart. Of each group of 8
// dimensions it has two of each row.
struct PartialOfThread {
  float2* stats;  // row_max and row_sum; of row 1: 8 behind
  float4* out;    // [groups][128 threads]

  // `slot`: of the split's warpgroup.
  __device__ __forceinline__ PartialOfThread(const SplitPartials& partials, int slot, int groups,
                                             int thread)
      : stats(partials.stats + slot * 64 + thread / 32 * 16 + thread % 32 / 4),
        out(reinterpret_cast<float4*>(partials.out) + int64_t{slot} * groups * 128 + thread) {}
};

// Ends a split, for a consumer warpgroup. It may have no rows. row_max and sum are of whole rows.
template <int kGroups>
__device__ __forceinline__ void store_split(const PrefillShape& shape, const SplitTile& work_tile,
                                            const float (&out)[kGroups][4],
                                            const float (&row_max)[2], const float (&sum)[2]) {
  // The main loop has no registers left for addresses, which the compiler would keep.
  const int index = opaque(static_cast<int>(threadIdx.x));
  if (index / 128 * 64 >= work_tile.rows) return;
  const int slot = (work_tile.slot + work_tile.split) * (shape.rows / 64) + index / 128;
  const PartialOfThread to(shape.splits.partials, slot, kGroups, index % 128);
  if (index % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) to.stats[8 * r] = {row_max[r], sum[r]};
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    to.out[i * 128] = {out[i][0], out[i][1], out[i][2], out[i][3]};
  }
}

// Both launches use the stream's workspace, so no other thread's may come between them.
std::unique_lock<std::mutex> lock_split_launches();

// Writes the result of every work tile that the launch before has split.
void launch_combine_splits(const PagedAttentionParams& p, const PrefillShape& shape,
                           const SplitShape& split_shape, void* stream);

}  // namespace vllm_kernels::cuda
