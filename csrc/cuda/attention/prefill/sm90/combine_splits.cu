// Adds up what CTAs that shared work tiles have left (combine_splits.cuh). There are no early
// reads.
//
// A CTA of 128 threads has 16 dimensions of 64 rows, as a consumer warpgroup had them. Loads of
// eight splits are in flight, 4 KiB each.
#include "cuda/attention/prefill/sm90/combine_splits.cuh"

#include "cuda/attention/common/online_softmax.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 128, kCtasPerSm = 4;
constexpr int kGroups = 2;  // of 8 dimensions, of a CTA
constexpr int kAhead = 8;   // splits whose loads are in flight

// c + a * b where `is_there`, else c. The compiler would move the loads of b behind a branch.
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

// Two rows of one split after the other, relative to the highest score so far.
struct SplitSums {
  float highest[2] = {kRowMaxInit, kRowMaxInit}, total[2] = {};
  float4 out[kGroups] = {};

  __device__ __forceinline__ void add(bool is_there, const float2 (&stats)[2],
                                      const float4 (&partial)[kGroups]) {
    float factors[2], weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float max = is_there ? stats[r].x : kRowMaxInit;
      factors[r] = update_row_max(highest[r], fmaxf(highest[r], max));
      weights[r] = exp2_approx(max - highest[r]);
      total[r] = fma_if(is_there, weights[r], stats[r].y, total[r] * factors[r]);
    }
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      out[i].x = fma_if(is_there, weights[0], partial[i].x, out[i].x * factors[0]);
      out[i].y = fma_if(is_there, weights[0], partial[i].y, out[i].y * factors[0]);
      out[i].z = fma_if(is_there, weights[1], partial[i].z, out[i].z * factors[1]);
      out[i].w = fma_if(is_there, weights[1], partial[i].w, out[i].w * factors[1]);
    }
  }
};

// Adds up splits [0, splits), `step` slots apart.
__device__ __forceinline__ SplitSums add_splits(const PrefillSplits& shape, int first_slot,
                                                int step, int splits, int groups, int first_group) {
  SplitSums sums;
#pragma unroll 1
  for (int first = 0; first < splits; first += kAhead) {
    float2 stats[kAhead][2];
    float4 partials[kAhead][kGroups];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int split = min(first + j, splits - 1);
      const PartialOfThread from(shape.partials, first_slot + split * step, groups, threadIdx.x);
#pragma unroll
      for (int r = 0; r < 2; ++r) stats[j][r] = from.stats[8 * r];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) partials[j][i] = from.out[(first_group + i) * 128];
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      sums.add(first + j < splits, stats[j], partials[j]);
    }
  }
  return sums;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    combine_splits_kernel(const __grid_constant__ PagedAttentionParams p,
                          const __grid_constant__ PrefillShape shape, SplitShape split_shape) {
  launch_dependents();
  wait_for_primary_kernel();
  const PrefillSplits& all = shape.splits;
  const uint32_t num_tiles = *all.num_tiles;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const int warpgroups = shape.rows / 64, chunks = split_shape.groups / kGroups;
  const int per_tile = warpgroups * chunks;
#pragma unroll 1
  for (uint32_t i = blockIdx.x; i < num_tiles * per_tile; i += gridDim.x) {
    const SplitTile& work_tile = all.tiles[i / per_tile];
    const int warpgroup = i % per_tile / chunks, first_group = i % chunks * kGroups;
    if (work_tile.splits == 1 || warpgroup * 64 >= work_tile.rows) continue;
    const SplitSums sums = add_splits(all, work_tile.slot * warpgroups + warpgroup, warpgroups,
                                      work_tile.splits, split_shape.groups, first_group);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_of_tile = warpgroup * 64 + row + 8 * r;
      if (row_of_tile >= work_tile.rows) continue;
      int head;
      const int64_t token =
          work_tile.first_query + token_of_row(shape, work_tile, row_of_tile, head);
      const RowResult result =
          row_result(p, work_tile.kv_head, head, sums.highest[r], sums.total[r]);
      T* to = static_cast<T*>(p.out) + token * p.out_stride + head * int64_t{shape.head_size};
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        const int group = first_group + j, swaps = group & split_shape.permutation;
        const int dim = group * 8 + (lane % 4 * 2 ^ (swaps & 2));
        if (dim >= shape.head_size) continue;
        const float4& four = sums.out[j];
        const float x = r == 0 ? four.x : four.z, y = r == 0 ? four.y : four.w;
        const uint32_t pair = pack2<T>(x * result.scale, y * result.scale);
        *reinterpret_cast<uint32_t*>(to + dim) =
            (swaps & 1) != 0 ? __byte_perm(pair, 0, 0x1032) : pair;
      }
      if (p.lse != nullptr && first_group == 0 && lane % 4 == 0) {
        p.lse[token * p.num_heads + head] = result.lse;
      }
    }
  }
}

}  // namespace

std::unique_lock<std::mutex> lock_split_launches() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

void launch_combine_splits(const PagedAttentionParams& p, const PrefillShape& shape,
                           const SplitShape& split_shape, void* stream) {
  dispatch_16_bit(p.dtype, [&](auto tag) {
    launch_kernel("paged_attention", combine_splits_kernel<decltype(tag)>,
                  dim3(kCtasPerSm * current_device_model().num_sms), dim3(kThreads), 0, stream, p,
                  shape, split_shape);
  });
}

}  // namespace vllm_kernels::cuda
