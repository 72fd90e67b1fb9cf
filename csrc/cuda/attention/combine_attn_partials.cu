// combine_attn_partials: merges any number of attention results over disjoint keys by their lse.
// Shapes and the formula are in ops/merge_attn_states.h. Rows are (token, head): up to 32 lanes
// share one, and a CTA of 128 threads has several. There are no early reads.
#include "ops/merge_attn_states.h"

#include <cmath>

#include "cuda/base/launch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // partials whose loads are in flight together, with their lse

// `lanes` neighbouring lanes (a power of two, at most 32) share a (token, head) row. kWidth is the
// number of elements per access: 16 bytes, or one element where a row is unaligned.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    combine_attn_partials_kernel(CombineAttnPartialsParams p, int lanes) {
  using Access = Elements<T, kWidth>;
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t rows = p.num_tokens * p.num_heads;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes;
  if (row >= rows) return;
  const int64_t token = row / p.num_heads, head = row % p.num_heads;
  const auto lse_of = [&](int partial) {
    const float lse = p.lse_partial[partial * rows + row];
    return lse == INFINITY ? -INFINITY : lse;
  };
  const T* first =
      static_cast<const T*>(p.out_partial) + token * p.token_stride + head * p.head_stride;
  T* output =
      static_cast<T*>(p.output) + token * p.output_token_stride + head * p.output_head_stride;
  const int steps = p.head_size / kWidth;
  for (int i = lane; i < max(steps, 1); i += lanes) {  // without elements: the lse alone
    float largest = -INFINITY, sum = 0.0f, merged[kWidth] = {};
    for (int begin = 0; begin < p.num_partials; begin += kAhead) {
      float lse[kAhead];
      Access loaded[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const bool is_there = begin + j < p.num_partials;
        lse[j] = is_there ? lse_of(begin + j) : -INFINITY;
        if (is_there && i < steps)
          loaded[j] = reinterpret_cast<const Access*>(first + (begin + j) * p.partial_stride)[i];
      }
      float highest = largest;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) highest = fmaxf(highest, lse[j]);
      const float base = highest == -INFINITY ? 0.0f : highest;  // all empty: weights become 0
      const float rescale = expf(largest - base);
      sum *= rescale;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) merged[k] *= rescale;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const float weight = expf(lse[j] - base);
        if (weight == 0.0f) continue;  // such a partial may contain anything, even NaN
        sum += weight;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) merged[k] += to_float(loaded[j].data[k]) * weight;
      }
      largest = highest;
    }
    if (i == 0 && p.output_lse != nullptr) p.output_lse[row] = largest + logf(sum);
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    Access result;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) result.data[k] = from_float<T>(merged[k] * scale);
    if (i < steps) reinterpret_cast<Access*>(output)[i] = result;
  }
}

}  // namespace

void launch(const CombineAttnPartialsParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kWidth = kVecWidth<T>;
    const bool vectors =
        aligned16(p.output) && aligned16(p.out_partial) &&
        multiples(kWidth, {p.head_size, p.output_token_stride, p.output_head_stride,
                           p.partial_stride, p.token_stride, p.head_stride});
    const int steps = vectors ? p.head_size / kWidth : p.head_size;
    int lanes = 1;
    while (lanes < steps && lanes < 32) lanes *= 2;
    const int64_t blocks = ceil_div(p.num_tokens * p.num_heads, kThreads / lanes);
    launch_kernel(
        "combine_attn_partials",
        vectors ? combine_attn_partials_kernel<T, kWidth> : combine_attn_partials_kernel<T, 1>,
        dim3(grid_size("combine_attn_partials", blocks)), dim3(kThreads), 0, stream, p, lanes);
  });
}

}  // namespace vllm_kernels::cuda
